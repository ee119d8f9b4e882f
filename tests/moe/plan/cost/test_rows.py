"""Memory of expert rows at the budget and at worst, written out once for GPT-OSS-20B on 8 GPUs."""

import pytest

from phalanx.configs.formats import fp8_row
from phalanx.configs.load import load
from phalanx.configs.schema import Config
from phalanx.configs.validate import validate
from phalanx.moe.plan.cost.activations import Activations
from phalanx.moe.plan.cost.rows import buffer_bytes, row_memory
from phalanx.moe.plan.cost.stages import exchange_bytes, stage_memory
from phalanx.moe.plan.cost.traffic import costs
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
    """Experts that do not overlap the exchange save the FP8 tokens instead of a second transfer."""
    received = RANKS * TOKENS * fp8_row(HIDDEN)
    arriving, resent = known(*FP8, "precision.dispatch=bf16"), known(*FP8)
    alltoall = known(*FP8, "parallel.dispatch=alltoall")
    local = known(*FP8[:1], "parallel.expert=1")
    outside = exchange_bytes(resent, RANKS)
    assert buffer_bytes(resent, RANKS) == outside == exchange_bytes(arriving, RANKS) > 0
    assert buffer_bytes(arriving, RANKS) == outside + LAYERS * received
    gradients = RANKS * TOKENS * 2 * HIDDEN
    assert buffer_bytes(alltoall, RANKS) == LAYERS * received + gradients
    assert buffer_bytes(local, RANKS) == 0
    moe, other = (Activations(cfg, RANKS).moe_layer().saved for cfg in (arriving, resent))
    assert moe - other == received


@pytest.mark.parametrize("precision", [(), FP8])
def test_dispatch_holds_replicas(precision: tuple[str, ...]) -> None:
    for name in ("symm", "alltoall"):
        of = (*precision, f"parallel.dispatch={name}")
        without, replicated = known(*of), known(*of, "parallel.expert_replication=2")
        more = buffer_bytes(replicated, RANKS) - buffer_bytes(without, RANKS)
        outside = exchange_bytes(replicated, RANKS) - exchange_bytes(without, RANKS)
        assert more == outside + Activations(replicated, RANKS).replica_memory().backward > 0


def test_replicas_have_memory() -> None:
    """Weights of 2 replicas, gradients in fp32, and what is exchanged of fc1. Other kernels than
    the fused ones put own experts' fc1 beside the replicas'."""
    alltoall, slots, own = "parallel.dispatch=alltoall", 2, 32 // RANKS
    without, replicated = known(alltoall), known(alltoall, f"parallel.expert_replication={slots}")
    kept = known(alltoall, f"parallel.expert_replication={slots}", "parallel.save_x=keep")
    matrix = HIDDEN * FFN
    held = slots * 3 * matrix * (2 + 4) + 3 * RANKS * slots * 2 * matrix * 4
    (a,), (b,), (c,) = (stage_memory(cfg, RANKS) for cfg in (without, replicated, kept))
    assert 0 < b.backward - a.backward <= held and b.saved == a.saved
    assert c.saved - b.saved == LAYERS * slots * 3 * matrix * 2
    torch = known(alltoall, "kernels=torch", f"parallel.expert_replication={slots}")
    both = [Activations(cfg, RANKS).replica_memory().backward for cfg in (replicated, torch)]
    assert both == [held, held + (own + slots) * 2 * matrix * 2]
    assert known("parallel.expert_replication=auto").parallel.expert_replication == 0


def test_replicas_over_symm_are_outside_of_what_torch_allocates() -> None:
    """Weights of 2 replicas, gradients in fp32, and a row of every slot of a rank's tokens."""
    symm, slots, matrix = "parallel.dispatch=symm", 2, HIDDEN * FFN
    without, replicated = known(symm), known(symm, f"parallel.expert_replication={slots}")
    rows = TOP_K * TOKENS * (2 * HIDDEN + 8 * TOP_K)
    more = exchange_bytes(replicated, RANKS) - exchange_bytes(without, RANKS)
    assert more == slots * 3 * matrix * (2 + 4) + rows
    assert Activations(replicated, RANKS).replica_memory().backward == 0


def test_replicas_over_nodes_are_exchanged_in_a_node() -> None:
    """Two nodes of 8: by pushes a row of every slot of a rail's tokens, by collectives the larger
    matrix of 8 ranks, not of 16."""
    slots, world, matrix = 2, 16, HIDDEN * FFN
    without, replicated = (
        known("parallel.expert=16", f"parallel.expert_replication={n}", world=world)
        for n in (0, slots)
    )
    assert (
        replicated.parallel.dispatch == "hier" and replicated.parallel.expert_replication == slots
    )
    more = exchange_bytes(replicated, world) - exchange_bytes(without, world)
    rows = 2 * TOP_K * TOKENS * (2 * HIDDEN + 8 * TOP_K)
    assert more == slots * 3 * matrix * (2 + 4) + rows
    replicated.run.device = "cpu"
    inside = Activations(replicated, world).replica_memory().backward
    assert inside == slots * 3 * matrix * (2 + 4) + 3 * 8 * slots * 2 * matrix * 4
    back = costs(replicated, world).back
    assert (back.near, back.far) == (TOP_K * 2 * 7, 1)


def test_recomputed_layers_keep_nothing_but_one_needs_all() -> None:
    cfg = known("run.recompute=full")
    given, worst = row_memory(cfg, RANKS)
    assert given.layer == worst.layer == 0
    for m, plain in zip((given, worst), row_memory(known(), RANKS), strict=True):
        assert plain.layer < m.rank == plain.rank - (LAYERS - 1) * plain.layer
