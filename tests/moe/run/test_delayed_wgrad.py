"""Weight gradients that wait for a pipeline's transfers are those of the backward pass."""

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from phalanx.configs.knobs import put
from phalanx.configs.load import load
from phalanx.configs.schema import Config
from tests.support.distributed import run_distributed
from tests.support.row_overflow import overflow_always
from tests.support.scheduling import slow
from tests.support.training import Trained, _train, trained

pytestmark = pytest.mark.dist

SMALL = [
    "run.steps=2",
    "data.sequence_length=16",
    "data.micro_batch=1",
    "model.vocab_size=64",
    "model.hidden=32",
    "model.dense_ffn=48",
    "model.layers=4",
    "model.moe.ffn=16",
    "model.attention.head_dim=8",
    "model.init_std=0.1",
    "optim.warmup_steps=0",
    "parallel.expert=1",
]
STAGES = {"parallel.pipeline": 2}
INTERLEAVED = STAGES | {"parallel.virtual_pipeline": 2}
UNEVEN = ["model=tiny", "parallel.pipeline_layout='Ettt|tL'"]
"""Overrides for two stages, the second of which holds a pass longer."""
CASES: dict[str, tuple[int, list[str], dict[str, Any]]] = {
    "four stages": (4, ["model=tiny"], {"parallel.pipeline": 4, "data.global_batch": 6}),
    "no overlap": (4, ["model=tiny"], INTERLEAVED | {"parallel.overlap": False}),
    "interleaved, data parallel": (
        4,
        ["model=tiny_gpt_oss", "parallel.pipeline_layout='Ett|t|t|L'"],
        INTERLEAVED,
    ),
    "expert parallel": (
        4,
        [*UNEVEN, "data.sequence_length=128"],  # whose balanced load is two tiles
        STAGES | {"parallel.expert": 2},
    ),
    "tied, tokens ahead, recomputed": (
        2,
        [
            *["model=tiny_deepseek", "model.tie_embeddings=true"],
            "run.recompute=[norm,attention,expert_h]",
        ],
        STAGES,
    ),
    "offloaded": (2, ["model=tiny"], INTERLEAVED | {"run.offload": ["residual", "expert_h"]}),
    "fp8": (2, ["model=tiny", "precision=fp8_block"], STAGES),
}


def run(case: str, delay: str, within: Any = None) -> Trained:
    world, given, changes = CASES[case]
    batch = {"data.global_batch": 4 * world // changes["parallel.pipeline"]}
    knobs = {"kernels.backend": "torch", "parallel.delay_wgrad": delay}
    return trained(world, [*given[:1], *SMALL, *given[1:]], batch | changes | knobs, within)


@functools.cache
def in_turn(case: str) -> Trained:
    """The run without delays."""
    return run(case, "off")


DEFAULT = [
    *[("expert parallel", "pairs"), ("interleaved, data parallel", "on"), ("fp8", "pairs")],
    ("tied, tokens ahead, recomputed", "pairs"),
]


@pytest.mark.parametrize(
    ("case", "delay"),
    [*DEFAULT, *slow(*(c for c in itertools.product(CASES, ("on", "pairs")) if c not in DEFAULT))],
)
def test_bits_are_the_same(case: str, delay: str) -> None:
    """In pairs too: `kernels=torch` adds one micro-batch after the other to a sum."""
    plain = in_turn(case)
    delayed = run(case, delay, _pairs_counted if delay == "pairs" else None)
    assert plain.series("loss") == delayed.series("loss")
    assert plain.series("grad_norm") == delayed.series("grad_norm")
    assert plain.left == delayed.left
    for key, value in plain.after.items():
        assert torch.equal(delayed.after[key], value), key


@contextlib.contextmanager
def _pairs_counted(rank: int, alone: int = 0) -> Iterator[None]:
    """Fail unless all but a number of micro-batches' weight gradients are computed in pairs."""
    from phalanx.kernels.expert_mlp.pending_grads import PendingGrads

    together, call, counts = PendingGrads.run_with, PendingGrads.__call__, [0, 0]

    def counted(self: PendingGrads, later: PendingGrads) -> None:
        counts[0] += 1
        together(self, later)

    def counted_alone(self: PendingGrads) -> Any:
        counts[1] += 1
        return call(self)

    with mock.patch.multiple(PendingGrads, run_with=counted, __call__=counted_alone):
        yield
    assert counts[0] and counts[1] == alone * counts[0], counts


@pytest.mark.parametrize(
    ("world", "expert", "microbatches", "alone"),
    [(2, 2, 3, 1), *slow((1, 1, 4, 0), (2, 1, 3, 1))],
)
def test_pairs_without_stages(world: int, expert: int, microbatches: int, alone: int) -> None:
    """Two micro-batches together, and the last one of an odd number alone, beside exchanges too."""
    knobs = {
        "kernels.backend": "torch",
        "parallel.expert": expert,
        "data.global_batch": world * microbatches,
    }
    plain = trained(world, ["model=tiny", *SMALL], knobs | {"parallel.delay_wgrad": "off"})
    knobs |= {"parallel.delay_wgrad": "pairs"}
    counted = functools.partial(_pairs_counted, alone=alone)
    pairs = trained(world, ["model=tiny", *SMALL], knobs, counted)
    assert plain.series("grad_norm") == pairs.series("grad_norm") and plain.left == pairs.left


def test_pairs_are_summed_before_they_are_rounded() -> None:
    """`kernels=reference` adds the sum over both micro-batches, close to one after the other."""
    batch = {"kernels.backend": "reference", "data.global_batch": 4}
    given = ["model=tiny_gpt_oss", *SMALL]
    plain, pairs, again = (
        trained(1, given, batch | {"parallel.delay_wgrad": delay})
        for delay in ("off", "pairs", "pairs")
    )
    assert pairs.left == again.left != plain.left
    assert pairs.series("loss") == pytest.approx(plain.series("loss"), rel=1e-4)
    assert pairs.series("grad_norm") == pytest.approx(plain.series("grad_norm"), rel=1e-4)


@contextlib.contextmanager
def _order_checked(rank: int) -> Iterator[None]:
    """Fail if weight gradients do not run after the start of the transfers that they wait for.

    For stages of three layers and of one, whose experts have w1 and w2, and a step of 6
    micro-batches.
    """
    from megatron.core.pipeline_parallel import p2p_communication

    from phalanx.kernels import wgrad_queue
    from phalanx.kernels.expert_mlp import main_grad

    events: list[str] = []
    added, start = main_grad.added, p2p_communication._p2p_ops

    def counted(parameter: torch.Tensor) -> None:
        events.append("w")
        added(parameter)

    def transfer(**given: Any) -> Any:
        requests = start(**given)
        sent = [name for name in ("prev", "next") if given[f"tensor_send_{name}"] is not None]
        events.extend("<" if name == "prev" else ">" for name in sent)
        return requests

    main_grad.added, p2p_communication._p2p_ops = counted, transfer
    try:
        yield
    finally:
        main_grad.added, p2p_communication._p2p_ops = added, start
    assert not wgrad_queue.delays()
    pass_, validated = ("ww" if rank else "wwwwww"), 6 * ">"
    if rank == 0:  # sends micro-batches on, and computes after each backward pass
        assert "".join(events) == ">>" + (">" + pass_) * 4 + pass_ * 2 + validated, events
    else:  # sends gradients, and computes those of the pass before
        assert "".join(events) == "<" + ("<" + pass_) * 5 + pass_, events


def test_transfers_start_first() -> None:
    """A stage sends before it computes, and the last one is a micro-batch behind."""
    knobs = {"kernels.backend": "torch", "parallel.delay_wgrad": "on", "data.global_batch": 6}
    once = {"run.steps": 1, "run.eval_interval": 1}
    trained(2, [*UNEVEN, *SMALL], STAGES | knobs | once, _order_checked)


def test_steps_that_are_repeated() -> None:
    """A step that lacks expert rows leaves no work to its repetition."""
    plain = in_turn("expert parallel")
    crowded = run("expert parallel", "on", overflow_always)
    assert min(crowded.series("reruns")) > 0 == max(plain.series("reruns"))
    assert plain.left == crowded.left


def _as_on_a_gpu(cfg: Config) -> tuple[dict[str, str], int]:
    """Digests after a run whose linear layers and embedding add to buffers; gradients delayed."""
    import megatron.core.tensor_parallel.layers as layers

    from phalanx.kernels import wgrad_queue
    from phalanx.moe.model import megatron_config
    from phalanx.parallel.megatron import weight_grad

    execution, delayed = megatron_config._execution, []

    def fused(*given: Any, **named: Any) -> dict[str, Any]:
        return execution(*given, **named) | {"gradient_accumulation_fusion": True}

    def accumulate(x_TI: torch.Tensor, d_TO: torch.Tensor, main_grad_OI: torch.Tensor) -> None:
        delayed.append(wgrad_queue.delays())
        main_grad_OI.addmm_(d_TO.t().float(), x_TI.float())

    with (
        mock.patch.object(megatron_config, "_execution", fused),
        mock.patch.object(weight_grad, "accumulate", accumulate),
        mock.patch.multiple(
            layers,
            create=True,
            fused_weight_gradient_mlp_cuda=weight_grad.Accumulate,
            _grad_accum_fusion_available=True,
        ),
    ):
        return _train(cfg).left, sum(delayed)


@pytest.mark.parametrize(("tied", "tensor"), [(True, 1), *slow((True, 2), (False, 1), (False, 2))])
def test_linear_layers_of_megatron(tied: bool, tensor: int) -> None:
    """Also an output layer whose weight the embeddings of tokens ahead write to as well."""
    left = {}
    for delay in ("off", "on"):
        cfg = load(["model=tiny_deepseek", *SMALL, "run.device=cpu", "run.save_interval=-1"])
        knobs = {
            "data.source": "synthetic",
            "data.global_batch": 4,
            "model.tie_embeddings": tied,
            "kernels.backend": "torch",
            "parallel.pipeline": 2,
            "parallel.tensor": tensor,
            "parallel.delay_wgrad": delay,
        }
        for path, value in knobs.items():
            put(cfg, path, value)
        ranks = run_distributed(_as_on_a_gpu, 2 * tensor, cfg, timeout=300)
        left[delay] = [digests for digests, _ in ranks]
        assert all((count > 0) == (delay == "on") for _, count in ranks)
    assert left["off"] == left["on"]


def test_an_error_in_a_step_leaves_nothing() -> None:
    from megatron.core.pipeline_parallel import p2p_communication

    from phalanx.kernels import wgrad_queue
    from phalanx.parallel import engine

    start, done = p2p_communication._p2p_ops, list[int]()
    with pytest.raises(ZeroDivisionError), engine._queued(wgrad_queue.Waiting(0)):
        assert p2p_communication._p2p_ops is not start
        wgrad_queue.submit(lambda: done.append(1))
        raise ZeroDivisionError
    assert p2p_communication._p2p_ops is start and not wgrad_queue.delays()
    wgrad_queue.run_all()
    assert not done


def test_work_before_a_transfer_that_only_receives() -> None:
    from megatron.core.pipeline_parallel import p2p_communication

    from phalanx.parallel.megatron import patches

    events: list[str] = []
    x = torch.zeros(1)

    def start(**_: Any) -> None:
        events.append("start")

    with (
        mock.patch.multiple(p2p_communication, _p2p_ops=start, _batched_p2p_ops=start),
        patches.during_transfers(lambda: events.append("work")),
    ):
        for transfer in (p2p_communication._p2p_ops, p2p_communication._batched_p2p_ops):
            transfer(tensor_send_prev=x, tensor_send_next=None, tensor_recv_next=x)
            transfer(tensor_send_prev=None, tensor_send_next=x, tensor_recv_next=x)
            transfer(tensor_send_prev=None, tensor_send_next=None, tensor_recv_next=x)
    assert events == 2 * ["start", "work", "start", "work", "work", "start"]
