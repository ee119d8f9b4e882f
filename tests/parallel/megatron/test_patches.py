"""Patches of Megatron-Core apply to the pinned release alone, and only while they are meant to."""

import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from phalanx import train
from phalanx.parallel.megatron import imports

ROOT = Path(train.__file__).resolve().parent


def test_the_release_is_the_pinned_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    train = project["optional-dependencies"]["train"]
    assert f"megatron-core=={imports.MEGATRON_CORE}" in train
    imports.check_version()


def test_another_release_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.18.0")
    with pytest.raises(ValueError) as refused:
        imports.check_version()
    assert train.main(["model=tiny", f"run.dir={tmp_path}", "run.device=cpu"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"error: {refused.value}"
    assert "megatron-core 0.18.0" in line and "pip install megatron-core==0.19.2" in line
    assert not list(tmp_path.iterdir())


def test_a_source_tree_without_a_version_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    imports.check_version()


def test_results_come_to_a_queue_only_while_it_is_asked_for() -> None:
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from phalanx.parallel.megatron.patches import results_to

    queue = object()
    with pytest.raises(OSError), results_to(queue):
        assert filesystem_async._results_queue is queue
        raise OSError
    assert filesystem_async._results_queue is None


def test_a_scale_of_losses_that_all_buckets_share() -> None:
    from types import SimpleNamespace

    from phalanx.parallel.megatron.patches import scale_in_loss

    def chunk(*factors: float) -> SimpleNamespace:
        buckets = [SimpleNamespace(gradient_scaling_factor=f) for f in factors]
        buffers = [SimpleNamespace(buckets=[bucket]) for bucket in buckets]
        return SimpleNamespace(buffers=buffers[:1], expert_parallel_buffers=buffers[1:])

    same = [chunk(0.25, 0.25), chunk(0.25)]
    scale = scale_in_loss(same)
    assert scale is not None and scale(8.0) == 2.0
    buckets = [b for c in same for f in (*c.buffers, *c.expert_parallel_buffers) for b in f.buckets]
    assert {b.gradient_scaling_factor for b in buckets} == {1.0}
    assert scale_in_loss([chunk(1.0, 1.0)]) is None
    apart = [chunk(0.25, 0.5)]
    assert scale_in_loss(apart) is None
    assert apart[0].buffers[0].buckets[0].gradient_scaling_factor == 0.25
