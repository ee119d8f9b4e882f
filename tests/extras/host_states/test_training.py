"""Training and checkpoints with states in host memory: bit for bit those of states on the device.

On a CPU both are host memory, but states travel through slots as on a GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from phalanx.extras.host_states.stream import SLOTS, Stream
from tests.parallel.checkpoint.checkpoints import (
    assert_equal,
    build,
    checkpointer,
    load,
    save,
    stored,
    train,
)
from tests.support.distributed import run_distributed
from tests.support.scheduling import slow


@contextmanager
def in_small_batches() -> Iterator[None]:
    """Inside, optimizers update a few elements at a time, so that their states take turns."""
    from phalanx.extras.host_states import optimizer
    from phalanx.extras.muon import optimizer as muon

    few = mock.patch.object(optimizer, "ELEMENTS", 1 << 10)
    with few, mock.patch.object(muon, "_SLICE", 1 << 11):
        yield


def _stream(engine: Any) -> Stream:
    from phalanx.parallel.megatron.updated import parts

    (stream,) = {part.optimizer.stream for part in parts(engine.optimizer)}
    return stream


def _weights(engine: Any) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for m in engine.modules for n, p in m.named_parameters()}


def _trained(folder: Path, moments: str, kw: dict[str, Any]) -> tuple[Any, ...]:
    """Losses and norms, weights, and the tensors of a checkpoint on the way."""
    with in_small_batches():
        engine, groups = build(moments=moments, **kw)
        steps = train(engine, groups, 0, 4)
        if moments.endswith("_host"):
            assert len(_stream(engine)._turns) > SLOTS, "some states take turns"
        path = save(checkpointer(folder / moments, groups), 4, engine)
        return steps + train(engine, groups, 4, 6), _weights(engine), stored(path)


AS_ON_THE_DEVICE = [
    ("fp32", 1, {}),
    ("bf16", 1, {"kind": "muon"}),
    ("bf16", 2, {"expert": 2, "grad_dtype": "bf16"}),
    ("fp32", 2, {"kind": "muon", "expert": 2}),
    ("bf16", 2, {"pipeline": 2, "layers": 4}),
    *slow(
        ("bf16", 1, {}),
        ("fp32", 1, {"kind": "muon"}),
        ("fp32", 1, {"bf16": False}),
        ("bf16", 1, {"bf16": False, "kind": "muon"}),
        ("fp32", 2, {"overlap": True}),
        ("bf16", 2, {"overlap": True, "kind": "muon"}),
        ("fp32", 2, {"pipeline": 2, "virtual_pipeline": 2, "layers": 4}),
    ),
]


@pytest.mark.dist
@pytest.mark.parametrize(("moments", "world", "kw"), AS_ON_THE_DEVICE)
def test_steps_and_checkpoints_are_those_of_states_on_the_device(
    moments: str, world: int, kw: dict[str, Any], tmp_path: Path
) -> None:
    _needs_muon(kw)
    runs = [run_distributed(_trained, world, tmp_path, m, kw) for m in (moments, f"{moments}_host")]
    for here, there in zip(*runs, strict=True):
        assert here[0] == there[0]
        assert_equal(here[1], there[1])
        assert_equal(here[2], there[2])


def _needs_muon(kw: dict[str, Any]) -> None:
    if kw.get("kind") == "muon":
        pytest.importorskip("emerging_optimizers")


def _as_in_one_run(folder: Path, moments: str, kw: dict[str, Any]) -> None:
    """From the device to the host, back, and on the host again, with what stays on the device."""
    with in_small_batches():
        engine, groups = build(moments=moments, **kw)
        whole = train(engine, groups, 0, 8)
        parts = list[Any]()
        for i, name in enumerate((moments, f"{moments}_host", moments, f"{moments}_host")):
            part, groups = build(seed=9, moments=name, **kw)
            checkpoints, path = checkpointer(folder, groups), folder / f"step_{2 * i:08d}"
            if i:
                load(checkpoints, path, part)
            else:
                part, groups = build(moments=name, **kw)
            parts += train(part, groups, 2 * i, 2 * i + 2)
            save(checkpoints, 2 * i + 2, part)
        assert parts == whole
        assert_equal(_weights(part), _weights(engine))


@pytest.mark.parametrize(
    ("moments", "kw"), [("fp32", {}), ("bf16", {"kind": "muon"}), *slow(("bf16", {}))]
)
def test_a_run_goes_on_with_states_elsewhere(
    moments: str, kw: dict[str, Any], tmp_path: Path
) -> None:
    _needs_muon(kw)
    run_distributed(_as_in_one_run, 1, tmp_path, moments, kw)


def _from_the_other_form(folder: Path) -> None:
    """Masters in fp32 of a checkpoint become halves, and the other way round."""
    with in_small_batches():
        for source, target in (("fp32", "bf16"), ("bf16", "fp32")):
            first, groups = build(moments=source)
            train(first, groups, 0, 2)
            path = save(checkpointer(folder / source, groups), 2, first)
            found = list[Any]()
            for moments in (target, f"{target}_host"):
                engine, groups = build(seed=7, moments=moments)
                train(engine, groups, 0, 1)  # which the checkpoint replaces, on the device too
                load(checkpointer(folder / source, groups), path, engine)
                again = save(checkpointer(folder / f"{source}_{moments}", groups), 2, engine)
                found.append((stored(again), train(engine, groups, 2, 4)))
            (state, steps), (other, others) = found
            assert_equal(state, other)
            assert steps == others


def test_checkpoints_of_the_other_form_are_loaded(tmp_path: Path) -> None:
    run_distributed(_from_the_other_form, 1, tmp_path)


def _from_weights_alone(folder: Path) -> None:
    with in_small_batches():
        engine, groups = build()
        checkpoints, common = checkpointer(folder, groups), {"config": {}, "weights_only": True}
        path = checkpoints.save(0, engine.chunks, None, None, common)
        for moments in ("fp32", "bf16"):
            found = []
            for name in (moments, f"{moments}_host"):
                other, groups = build(seed=7, moments=name)
                train(other, groups, 0, 2)  # leaves states on the device
                checkpoints.load(path, other.chunks, other.optimizer, other.scheduler)
                found.append((train(other, groups, 0, 2), _weights(other)))
            assert found[0][0] == found[1][0]
            assert_equal(found[0][1], found[1][1])


def test_a_new_run_from_weights_begins_with_no_moments(tmp_path: Path) -> None:
    run_distributed(_from_weights_alone, 1, tmp_path)


def _device_bytes(moments: str) -> tuple[int, int, int]:
    """Bytes of states on the host, of tensors that are updated, and of the slots."""
    from phalanx.parallel.megatron.updated import parts

    with in_small_batches():
        engine, groups = build(moments=moments)
        train(engine, groups, 0, 1)
    held, updated = 0, 0
    weights = {p.data_ptr() for m in engine.modules for p in m.parameters()}
    for part in parts(engine.optimizer):
        held += sum(t.nbytes for state in part.optimizer.state.values() for t in state.values())
        for p in (p for group in part.optimizer.param_groups for p in group["params"]):
            own = p.untyped_storage()
            updated += 0 if own.data_ptr() in weights or not own.nbytes() else p.numel()
    return held, updated, _stream(engine).device_bytes


@pytest.mark.parametrize(("moments", "each"), [("fp32_host", 12), ("bf16_host", 6)])
def test_the_device_has_the_slots_alone(moments: str, each: int) -> None:
    ((held, updated, slots),) = run_distributed(_device_bytes, 1, moments)
    (parameters,) = run_distributed(_parameters, 1)
    assert held == each * parameters
    assert slots <= SLOTS * ((1 << 10) * each + 20 * 3 * 512) < held
    if each == 12:  # of bf16, what is updated are parts of the weights
        assert updated == 0


def _parameters() -> int:
    engine, _ = build()
    return sum(p.numel() for m in engine.modules for p in m.parameters())
