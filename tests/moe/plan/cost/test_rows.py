"""Memory of expert rows at the budget and at worst, written out once for GPT-OSS-20B on 8 GPUs."""

import pytest

from phalanx.configs.formats import fp8_row
from phalanx.configs.load import load
from phalanx.configs.schema import Config
from phalanx.configs.validate import validate
from phalanx.moe.plan.cost.activations import Activations
from phalanx.moe.plan.cost.stages import buffer_bytes, exchange_bytes, row_memory, stage_memory
from phalanx.moe.plan.described import resolved

LAYERS, TOKENS, TOP_K, HIDDEN, FFN, RANKS = 24, 4096, 4, 2880, 2880, 8


def known(*overrides: str, world: int = RANKS, node_gpus: int = 8) -> Config:
    given = ["experiment=gpt_oss_20b_8gpu", "run.eval_interval=0"]
    given += ["parallel.overlap_microbatches=off"]  # the rows of one micro-batch
    cfg = load([*given, *overrides])
    validate(cfg, world)
    return resolved(cfg, world, node_gpus)


@pytest.mark.parametrize("dispatch", ["symm", "alltoall"])
@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_the_budget_and_the_worst_case(factor: float, dispatch: str) -> None:
    cfg = known(f"parallel.capacity_factor={factor}", f"parallel.dispatch={dispatch}")
    given, worst = row_memory(cfg, RANKS)
    assert given.rows == factor * TOKENS * TOP_K and worst.rows == RANKS * TOKENS * TOP_K
    for m in (given, worst):
        assert m.layer == m.rows * (2 * 2 * FFN + 8)  # gated h in bf16, places
        # The backward pass of one layer: gradients of h, the activation and its gradient.
        assert LAYERS * m.layer < m.rank <= (LAYERS + 2) * m.layer
    (even,), (uneven,) = (stage_memory(cfg, RANKS, n) for n in (given.rows, worst.rows))
    assert 0 < uneven.peak - even.peak <= worst.rank - given.rank


def test_dispatch_holds_received_tokens() -> None:
    received = RANKS * TOKENS * 2 * HIDDEN
    symm, alltoall, keep, local = (
        known("parallel.dispatch=symm"),
        known("parallel.dispatch=alltoall"),
        known("parallel.dispatch=symm", "parallel.save_x=keep"),
        known("parallel.expert=1"),
    )
    assert buffer_bytes(symm, RANKS) == exchange_bytes(symm, RANKS) > 3 * received
    assert buffer_bytes(keep, RANKS) == exchange_bytes(keep, RANKS) + LAYERS * received
    assert buffer_bytes(alltoall, RANKS) == LAYERS * received + received  # and their gradients
    assert local.parallel.dispatch == "local" and buffer_bytes(local, RANKS) == 0


FP8 = ("precision=fp8_block", "parallel.dispatch=symm")


def test_dispatch_holds_received_tokens_in_fp8() -> None:
    """Experts that quantize the tokens save them; others save those that are sent once more."""
    received, own = RANKS * TOKENS * fp8_row(HIDDEN), TOKENS * fp8_row(HIDDEN)
    arriving, resent = known(*FP8, "precision.dispatch=bf16"), known(*FP8)
    alltoall = known(*FP8, "parallel.dispatch=alltoall")
    local = known(*FP8[:1], "parallel.expert=1")
    apart = known(*FP8, "parallel.comm_sms=0")  # exchanges do not overlap the experts
    outside = exchange_bytes(resent, RANKS)
    assert outside == exchange_bytes(arriving, RANKS) > 0
    for cfg in (resent, apart):
        assert buffer_bytes(cfg, RANKS) == outside + LAYERS * own
    assert buffer_bytes(arriving, RANKS) == outside + LAYERS * received
    gradients = RANKS * TOKENS * 2 * HIDDEN
    assert buffer_bytes(alltoall, RANKS) == LAYERS * received + gradients
    assert buffer_bytes(local, RANKS) == 0
    moe, other = (Activations(cfg, RANKS).moe_layer().saved for cfg in (arriving, resent))
    assert moe - other == received - own


def test_recomputed_layers_keep_nothing_but_one_needs_all() -> None:
    cfg = known("run.recompute=full")
    given, worst = row_memory(cfg, RANKS)
    assert given.layer == worst.layer == 0
    for m, plain in zip((given, worst), row_memory(known(), RANKS), strict=True):
        assert plain.layer < m.rank == plain.rank - (LAYERS - 1) * plain.layer
