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

from tests.parallel.checkpoint.checkpoints import (
    assert_equal,
    build,
    checkpointer,
    save,
    stored,
    train,
)
from tests.support.distributed import run_distributed


@contextmanager
def in_small_batches() -> Iterator[None]:
    """Inside, optimizers update a few elements at a time, so that their states take turns."""
    from phalanx.extras.host_states import optimizer
    from phalanx.extras.muon import optimizer as muon

    few = mock.patch.object(optimizer, "ELEMENTS", 1 << 10)
    with few, mock.patch.object(muon, "_SLICE", 1 << 11):
        yield


def _weights(engine: Any) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for m in engine.modules for n, p in m.named_parameters()}


def _trained(folder: Path, moments: str, kw: dict[str, Any]) -> tuple[Any, ...]:
    """Losses and norms, weights, and the tensors of a checkpoint on the way."""
    with in_small_batches():
        engine, groups = build(moments=moments, **kw)
        steps = train(engine, groups, 0, 4)
        path = save(checkpointer(folder / moments, groups), 4, engine)
        return steps + train(engine, groups, 4, 6), _weights(engine), stored(path)


LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (1, {"kind": "muon"}),
    (1, {"bf16": False}),
    (2, {"overlap": True}),
    (2, {"expert": 2, "grad_dtype": "bf16"}),
    (2, {"kind": "muon", "expert": 2}),
    (2, {"pipeline": 2, "layers": 4}),
]


@pytest.mark.dist
@pytest.mark.parametrize("moments", ["fp32", "bf16"])
@pytest.mark.parametrize(("world", "kw"), LAYOUTS)
def test_steps_and_checkpoints_are_those_of_states_on_the_device(
    world: int, kw: dict[str, Any], moments: str, tmp_path: Path
) -> None:
    if kw.get("kind") == "muon":
        pytest.importorskip("emerging_optimizers")
    here, there = (
        run_distributed(_trained, world, tmp_path, name, kw)
        for name in (moments, f"{moments}_host")
    )
    for (steps, weights, saved), (others, other_weights, other_saved) in zip(
        here, there, strict=True
    ):
        assert steps == others
        assert_equal(weights, other_weights)
        assert_equal(saved, other_saved)
