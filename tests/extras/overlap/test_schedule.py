"""Two micro-batches at a time: the same results, with pipeline stages too, exchanges over a group
for each pass, refusals.

On a CPU passes follow one another. That two streams give the same bits is shown on GPUs
(tests/extras/overlap/test_overlapped_gpu.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from phalanx.configs.load import load
from phalanx.configs.tables.transports import TRANSPORTS
from phalanx.configs.validate import ConfigError, validate
from tests.support.additions import COUNTING_TRANSPORTS
from tests.support.runs import SMALL, run
from tests.support.scheduling import mostly_slow
from tests.support.training import Trained, trained

KNOB = "parallel.overlap_microbatches"
RUN = [
    *SMALL,
    *["run.steps=2", "run.eval_interval=0", "parallel.expert=2", "parallel.dispatch=alltoall"],
    *["data.sequence_length=32", "data.micro_batch=1", "data.global_batch=8"],
]
BALANCE = [f"model.moe.router.{name}=0.01" for name in ("aux_loss", "global_aux_loss", "z_loss")]
CASES = {
    "losses": ["model=tiny", "precision=fp32", *BALANCE],
    # Multi-token prediction, shared experts, a bias that balances.
    "deepseek": ["model=tiny_deepseek", "precision=fp32"],
    "recomputed": ["model=tiny_deepseek", "precision=bf16", "run.recompute=[moe,norm]"],
    "full": ["model=tiny", "precision=bf16", "run.recompute=full", *BALANCE],
    "offloaded": [
        *["model=tiny_deepseek", "precision=bf16"],
        *["run.recompute=[norm]", "run.offload=[residual,attention,expert_h]"],
    ],
    "tensor": ["model=tiny_deepseek", "precision=bf16", "parallel.tensor=2", *BALANCE],
    "muon": ["model=tiny", "precision=bf16", "optim=muon", "parallel.overlap=false"],
    "rows in fp8": ["model=tiny_deepseek", "precision=fp8_block", "precision.dispatch=fp8"],
}


def series(result: Trained) -> list[tuple[float, float]]:
    return list(zip(result.series("loss"), result.series("grad_norm"), strict=True))


CHUNKS = "parallel.virtual_pipeline=2"
STAGES: dict[str, tuple[int, list[str]]] = {
    "two": (
        4,
        [
            *["model=tiny", "precision=fp8_block", "parallel.pipeline=2", "data.micro_batch=2"],
            *BALANCE,
        ],
    ),
    # Embedding and output layer share weights; the step has fewer micro-batches than the first
    # stage runs ahead. Experts of one rank.
    "four": (
        4,
        [
            *["model=tiny", "model.layers=4", "model.tie_embeddings=true"],
            *["parallel.expert=1", "parallel.dispatch=local"],
            *["parallel.pipeline=4", "data.global_batch=5", "run.recompute=full"],
        ],
    ),
    "chunks": (4, ["model=tiny_deepseek", "model.layers=4", "parallel.pipeline=2", CHUNKS]),
    # Chunks of one layer, whose input is memory of the transfers.
    "offloaded": (
        4,
        [
            *["model=tiny", "model.layers=4", "parallel.pipeline=2", CHUNKS, "precision=bf16"],
            "run.offload=[residual,expert_h]",
        ],
    ),
    "tensor": (
        4,
        [
            *["model=tiny", "model.layers=4", "parallel.tensor=2", "parallel.pipeline=2", CHUNKS],
            *["precision=bf16", "run.recompute=full"],
        ],
    ),
    "three": (
        6,
        [
            *["model=tiny", "model.layers=6", "parallel.pipeline=3", CHUNKS],
            *["data.global_batch=12", "run.recompute=full"],
        ],
    ),
    "data parallel": (
        8,
        [
            *["model=tiny", "model.layers=4", "parallel.pipeline=2", CHUNKS],
            *["data.global_batch=16", "run.recompute=full"],
        ],
    ),
}
"""Number of ranks, and overrides."""


@pytest.mark.dist
@mostly_slow("case", CASES, "losses", "recomputed", "offloaded", "tensor", "muon")
def test_results_are_those_of_passes_in_turn(case: str) -> None:
    same_results(2, CASES[case])


@pytest.mark.dist
@mostly_slow("case", STAGES, "two", "four", "chunks", "offloaded", "tensor")
def test_results_with_pipeline_stages(case: str) -> None:
    same_results(*STAGES[case])


@pytest.mark.dist
@mostly_slow("case", ["deepseek", "full", "rows in fp8"], "rows in fp8")
def test_results_over_nodes(case: str) -> None:
    """The rail and the collectives inside nodes have groups for each pass."""
    hier = [*CASES[case], "parallel.dispatch=hier", "parallel.expert=4"]
    same_results(4, hier, node_ranks=2)


def same_results(world: int, overrides: list[str], node_ranks: int = 0) -> None:
    off, on = (
        trained(world, [*RUN, *overrides], {KNOB: v}, node_ranks=node_ranks) for v in ("off", "on")
    )
    assert len(series(on)) == 2 and series(on) == series(off)
    assert on.left == off.left
    assert on.after.keys() == off.after.keys()
    assert all(torch.equal(on.after[key], off.after[key]) for key in on.after)


@contextmanager
def passes(_: int) -> Iterator[list[tuple[str, bool, int]]]:
    """Passes and collectives of a run: (name, inside a backward pass, number of the group)."""
    from megatron.core.pipeline_parallel import schedules

    from phalanx.kernels.derivatives import in_backward

    calls: list[tuple[str, bool, int]] = []
    groups: list[Any] = []
    names = ["forward_step", "backward_step"]
    original = {(schedules, name): getattr(schedules, name) for name in names}
    for name in ("all_gather_into_tensor", "all_to_all_single"):
        original[dist, name] = getattr(dist, name)

    def noted(name: str, function: Any) -> Any:
        def call(*given: Any, **how: Any) -> Any:
            group = how.get("group")
            if group is not None and group not in groups:
                groups.append(group)
            calls.append((name, in_backward(), -1 if group is None else groups.index(group)))
            return function(*given, **how)

        return call

    for (module, name), function in original.items():
        setattr(module, name, noted(name, function))
    try:
        yield calls
    finally:
        for (module, name), function in original.items():
            setattr(module, name, function)


@pytest.mark.dist
@mostly_slow("recompute", ["[]", "[moe]"], "[moe]")
def test_each_pass_has_its_own_group(recompute: str, tmp_path: Any) -> None:
    given = [*RUN, "model=tiny", f"run.recompute={recompute}", f"run.dir={tmp_path}"]
    main, other = run(2, [*given, "run.steps=1", f"{KNOB}=on"], passes)
    assert main.code == 0, main.err
    order = [name for name, *_ in main.seen if name.endswith("step")]
    assert order == ["forward_step", "backward_step"] * 4
    exchanges = [call for call in main.seen if not call[0].endswith("step") and call[2] >= 0]
    used = {(backward, group) for _, backward, group in exchanges}
    in_forward = {group for backward, group in used if not backward}
    (in_backward,) = {group for backward, group in used if backward}
    assert in_backward not in in_forward
    assert [call[:2] for call in main.seen] == [call[:2] for call in other.seen]


@contextmanager
def events(_: int) -> Iterator[list[tuple[str, int]]]:
    """Events of a run, and waits for them: (record or wait, number of the event)."""
    from phalanx.extras.overlap.streams import Streams

    log: list[tuple[str, int]] = []

    def record(self: Streams) -> Any:
        log.append(("record", sum(kind == "record" for kind, _ in log)))
        return log[-1][1]

    def wait(self: Streams, *events: Any) -> None:
        log.extend(("wait", event) for event in events if event is not None)

    original = Streams.event, Streams.wait
    Streams.event, Streams.wait = record, wait  # type: ignore[assignment]
    try:
        yield log
    finally:
        Streams.event, Streams.wait = original  # type: ignore[method-assign]


@pytest.mark.dist
@mostly_slow("recompute", ["[]", "[moe]"], "[moe]")
def test_what_waits_for_what(recompute: str, tmp_path: Any) -> None:
    """Two layers. Event 0 is the start; then come a forward pass's end, four places of its backward
    pass, and the end of that."""
    given = [*RUN, "model=tiny", f"run.dir={tmp_path}", f"run.recompute={recompute}"]
    more = ["run.steps=1", f"{KNOB}=on", "data.global_batch=6", "parallel.overlap=false"]
    main, _ = run(2, [*given, *more], events)
    assert main.code == 0, main.err
    alone = "r0 w0 w0 r1 w0 w0 r2 r3 r4 r5 r6"
    beside = "w0 w1 w2 w3 w4 w5 r7 w0 w6 r8 r9 r10 r11 r12"
    last = "w0 w7 w8 w9 w10 w11 r13 w0 w12 r14 r15 r16 r17 r18 w13 w18 w0"
    assert [f"{kind[0]}{event}" for kind, event in main.seen] == f"{alone} {beside} {last}".split()


@mock.patch.dict(TRANSPORTS, COUNTING_TRANSPORTS)
@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (
            ["parallel.dispatch=broadcasts"],
            "parallel.dispatch=broadcasts has one exchange for both passes",
        ),
        (["kernels=megatron"], "kernels.backend=megatron has its own exchanges"),
        (["parallel.context=2"], "parallel.context=2 has one communicator for both passes"),
        (["parallel.expert_replication=1"], "parallel.expert_replication=1 has one communicator"),
    ],
)
def test_refusals_name_what_to_set(overrides: list[str], reason: str) -> None:
    given = ["model=tiny", "parallel.dispatch=alltoall", "parallel.expert=2", *overrides]
    with pytest.raises(ConfigError) as refused:
        validate(load([*given, f"{KNOB}=on"]), 4)
    (line,) = (line for line in str(refused.value).splitlines() if KNOB in line)
    assert line.startswith(f"{KNOB}=on cannot run: {reason}") and line.endswith(f"set {KNOB}=auto")
    validate(load([*given, f"{KNOB}=auto"]), 4)
