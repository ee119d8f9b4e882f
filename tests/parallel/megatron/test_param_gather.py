"""When parameters are gathered, how often, and what forward passes then compute with."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from tests.parallel.checkpoint import checkpoints
from tests.parallel.checkpoint.checkpoints import SEQUENCE, VOCAB, forward, train
from tests.support.distributed import run_distributed

RANKS = 2
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"expert": 2},
    {"pipeline": 2, "virtual_pipeline": 2, "layers": 4},
]


def build(**kw: Any) -> tuple[Any, Any]:
    """(engine, groups) of a tiny model of many buckets."""
    from megatron.core.distributed import DistributedDataParallelConfig

    small = partial(DistributedDataParallelConfig, bucket_size=2000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("phalanx.parallel.engine.DistributedDataParallelConfig", small)
        engine, groups = checkpoints.build(**kw)
    if kw["overlap"] and len(engine.chunks) == 1:
        assert len(engine.chunks[0].bucket_groups) > 3
    return engine, groups


def gathers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Elements of each gathering from now on."""
    from megatron.core.distributed import param_and_grad_buffer as buffers

    sent: list[int] = []
    gather = buffers.dist_all_gather_func

    def counted(output: torch.Tensor, *given: Any, **named: Any) -> Any:
        sent.append(output.numel())
        return gather(output, *given, **named)

    monkeypatch.setattr(buffers, "dist_all_gather_func", counted)
    return sent


def bucket_sizes(engine: Any) -> list[int]:
    groups = [
        g for c in engine.chunks for g in (*c.bucket_groups, *c.expert_parallel_bucket_groups)
    ]
    return sorted(bucket.param_data.numel() for group in groups for bucket in group.buckets)


def validated(engine: Any) -> list[float]:
    """Losses of a forward pass."""
    ids = torch.randint(0, VOCAB, (2, SEQUENCE + 1), generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        reports = engine.forward_backward(
            forward,
            [iter([ids] * 2) for _ in engine.chunks],
            microbatches=2,
            sequence=SEQUENCE,
            micro_batch=2,
            forward_only=True,
        )
    return [float(report["loss"]) for report in reports]


def _once(layout: dict[str, Any], overlap: bool) -> None:
    engine, groups = build(overlap=overlap, **layout)
    with pytest.MonkeyPatch.context() as patch:
        sent = gathers(patch)
        train(engine, groups, 0, 1)
        first = len(sent)
        train(engine, groups, 1, 2)
        assert sorted(sent[first:]) == bucket_sizes(engine)


@pytest.mark.dist
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_a_step_gathers_each_parameter_once(layout: dict[str, Any], overlap: bool) -> None:
    """In a model with experts and other parameters, which have an optimizer each."""
    run_distributed(_once, RANKS, layout, overlap)


def _same(layout: dict[str, Any]) -> None:
    from phalanx.parallel.checkpoint.model_state import parameters_gathered

    engine, groups = build(overlap=True, **layout)
    plain, _ = build(overlap=True, **layout)
    for step in range(3):
        results = train(engine, groups, step, step + 1)
        assert results == train(plain, groups, step, step + 1)
        # A replay of a graph leaves the host's notes as validation has made them.
        for _ in range(2):
            with parameters_gathered(plain.chunks):
                expected = validated(plain)
            assert validated(engine) == expected
            engine.step()
            plain.step()


@pytest.mark.dist
@pytest.mark.parametrize("layout", LAYOUTS)
def test_forward_passes_have_the_parameters_of_the_last_update(layout: dict[str, Any]) -> None:
    """Validation too, after updates without a step of the host between them."""
    run_distributed(_same, 4 if "pipeline" in layout else RANKS, layout)


def _whatever_has_before() -> None:
    engine, groups = build(overlap=True)
    train(engine, groups, 0, 1)
    with pytest.MonkeyPatch.context() as patch:
        sent = gathers(patch)
        validated(engine)
        validated(engine)
        assert sorted(sent) == bucket_sizes(engine)  # once
        train(engine, groups, 1, 2)
        assert sorted(sent) == sorted(2 * bucket_sizes(engine))


@pytest.mark.dist
def test_a_step_gathers_after_validation_too() -> None:
    """Else the graph of a step that is captured after it would never gather."""
    run_distributed(_whatever_has_before, RANKS)


def _nothing_left() -> None:
    engine, _ = build(overlap=True)
    gather, (chunk,) = engine._gather, engine.chunks
    groups = [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]
    for finish in (gather.end, gather.abandon):
        gather.invalidate()
        gather.begin()
        assert any(group.param_gather_handle is not None for group in groups)
        finish()
        assert all(group.param_gather_handle is None for group in groups)
    gather.invalidate()


@pytest.mark.dist
def test_nothing_is_on_its_way_after_a_step() -> None:
    """After a step that calls no module, and after an error."""
    run_distributed(_nothing_left, RANKS)


def _one_at_a_time(layout: dict[str, Any]) -> None:
    from megatron.core.distributed import param_and_grad_buffer as buffers

    engine, groups = build(overlap=True, **layout)
    coalesce, under_way = buffers._coalescing_manager, set()

    @contextmanager
    def watched(group: Any, **named: Any) -> Iterator[Any]:
        before = len(sent)
        with coalesce(group, **named) as work:
            yield work
            gathers_now = len(sent) > before
            assert not (gathers_now and group in under_way)
        if gathers_now:
            under_way.add(group)
            wait = work.wait
            work.wait = lambda: (wait(), under_way.discard(group))

    with pytest.MonkeyPatch.context() as patch:
        sent = gathers(patch)
        patch.setattr(buffers, "_coalescing_manager", watched)
        train(engine, groups, 0, 2)
    assert sent and not under_way


@pytest.mark.dist
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gloo_gathers_one_bucket_at_a_time(layout: dict[str, Any]) -> None:
    """Several at a time corrupt the heap in PyTorch 2.11."""
    run_distributed(_one_at_a_time, 4 if "pipeline" in layout else RANKS, layout)
