"""Captured training with states in host memory on GPUs: bit for bit that of states on the GPU."""

from pathlib import Path

import pytest

from phalanx.configs.load import load
from phalanx.moe.plan.cost.weights import stage_weights
from tests.end_to_end.test_train_gpu import (
    GRAPH,
    OVERRIDES,
    Steps,
    train,
    train_side_by_side,
    two_gpus,
)

__all__ = ["two_gpus"]
pytestmark = pytest.mark.gpu
HOSTED = "optim.moments=fp32_host"

IN_TURNS = """
import runpy
from phalanx.extras.host_states import entry, optimizer

optimizer.ELEMENTS, place = 50_000, entry.placement
entry.placement = lambda *given: place(*given)._replace(room=ROOM)
runpy.run_path("train.py", run_name="__main__")
"""
"""train.py, whose states take turns on the GPU, but for those that fit ROOM bytes."""


def hosted(folder: Path, name: str, *overrides: str, room: int = 0, ranks: int = 1) -> Steps:
    script = folder / f"{name}.py"
    script.write_text(IN_TURNS.replace("ROOM", str(room)))
    return train(folder, name, *overrides, ranks=ranks, program=(str(script),))


def assert_same(ours: Steps, theirs: Steps, count: int) -> None:
    assert len(ours) == len(theirs) == count
    for name in ("loss", "grad_norm"):
        assert [s[name] for s in ours] == [s[name] for s in theirs], name


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_states_on_the_host_have_the_bits_of_those_on_the_gpu(
    kind: str, moments: str, tmp_path: Path
) -> None:
    """Also with some that stay, and where a run goes on with states elsewhere."""
    common = ["run.steps=10", f"optim={kind}", "optim.warmup_steps=0", GRAPH]
    on_gpu, on_host = (f"optim.moments={moments}{where}" for where in ("", "_host"))
    runs = {"gpu": [*common, on_gpu], "host": [*common, on_host]}
    want = train_side_by_side(tmp_path, runs)
    assert_same(want["host"], want["gpu"], 10)  # all of them stay
    assert_same(hosted(tmp_path, "turns", *common, on_host), want["gpu"], 10)
    assert_same(hosted(tmp_path, "some", *common, on_host, room=3_000_000), want["gpu"], 10)
    saving = ["run.save_interval=5", "optim.decay_steps=10"]
    for steps, where in ((5, on_host), (10, on_gpu)):
        steps_override = f"run.steps={steps}"
        parts = hosted(tmp_path, "parts", *common, where, *saving, steps_override)
    assert_same(parts, want["gpu"], 10)


def test_two_gpus_with_experts_on_both(two_gpus: None, tmp_path: Path) -> None:
    common = ["run.steps=10", "parallel.expert=2", "parallel.grad_dtype=bf16", GRAPH]
    want = train(tmp_path, "gpu", *common, "optim.moments=bf16", ranks=2)
    ours = hosted(tmp_path, "host", *common, "optim.moments=bf16_host", ranks=2)
    assert_same(ours, want, 10)


def test_the_gpu_has_none_of_the_states(tmp_path: Path) -> None:
    """At no time since its start, with a model of 0.4 billion parameters."""
    size = ["model=tiny", "model.hidden=1024", "model.layers=4", "model.moe.ffn=1024"]
    size += ["model.moe.experts=32", "run.steps=4"]
    theirs, ours = train(tmp_path, "gpu", *size), hosted(tmp_path, "host", *size, HOSTED)
    (weights,) = stage_weights(load([*OVERRIDES, *size]), 1)
    saved = (theirs[-1]["memory"] - ours[-1]["memory"]) * 2**30
    assert weights.optimizer_bytes > 4 * 2**30
    assert saved == pytest.approx(weights.optimizer_bytes, rel=0.05)
