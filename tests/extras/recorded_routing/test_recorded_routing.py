"""The routing of a run, recorded after its last step and replayed by another."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from phalanx.extras.recorded_routing import record
from phalanx.moe.router.recording import read_facts, read_layer
from tests.support.runs import TINY, records, run

pytestmark = pytest.mark.dist

COMMAND = [*TINY, "data=synthetic", "kernels=torch"]
SHAPE = ["model.moe.dense_layers=1", "model.mtp_layers=1", "parallel.expert=2"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Override of a run of three steps."""
    folder = tmp_path_factory.mktemp("recorded")
    path = folder / "files" / "routing.safetensors"
    out = [f"run.dir={folder}", f"run.record_routing={path}", "run.save_interval=-1"]
    main, _ = run(2, [*COMMAND, *SHAPE, *out, "run.steps=3"])
    assert main.code == 0
    assert f"-- recorded the routing of 128 tokens in 2 layers to {path}: the busiest " in main.out
    facts = read_facts(path)
    assert facts.layers == ("layer.2", "prediction.1")
    assert (facts.model, facts.experts, facts.top_k, facts.tokens) == ("tiny", 8, 2, 128)
    assert facts.step == 3
    return path


def loads(path: Path, name: str) -> float:
    """Tokens of the busiest expert over the mean."""
    ids = read_layer(path, name).ravel().tolist()
    return max(ids.count(e) for e in range(8)) * 8 / len(ids)


def test_a_replay_has_the_load_that_was_recorded(recorded: Path, tmp_path: Path) -> None:
    """Also in another run whose router would choose other experts, and in every step."""
    replay = [f"model.moe.router.replay={recorded}", "run.seed=5", "run.steps=2"]
    main, _ = run(2, [*COMMAND, *SHAPE, *replay, f"run.dir={tmp_path}"])
    assert main.code == 0 and f"routing: replayed from {recorded}, 128 tokens of tiny" in main.out
    want = {"2": loads(recorded, "layer.2"), "3": loads(recorded, "prediction.1")}
    for step in records(tmp_path / "run"):
        assert {n: load for n, (load, _) in step["layers"].items()} == pytest.approx(want, abs=1e-3)
        assert 1 <= step["rank_load"] <= 2


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("model.moe.top_k=3", "with model.moe.top_k=2, but this run has 3"),
        ("model.moe.dense_layers=0", "without layer.1 of this model"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_line(
    recorded: Path, override: str, why: str, tmp_path: Path
) -> None:
    replay = f"model.moe.router.replay={recorded}"
    main, _ = run(2, [*COMMAND, *SHAPE, replay, override, f"run.dir={tmp_path}"])
    assert main.code == 2
    assert main.err == f"error: {replay} was recorded of tiny {why}\n"


@contextmanager
def unwritable(rank: int) -> Iterator[None]:
    with mock.patch("phalanx.extras.recorded_routing.record.write", side_effect=OSError("gone")):
        yield


def test_a_routing_that_cannot_be_written_ends_the_run_in_a_line(tmp_path: Path) -> None:
    """The disk was there at the start."""
    path = tmp_path / "gone" / "routing.safetensors"
    out = [f"run.dir={tmp_path}", f"run.record_routing={path}", "run.steps=1"]
    main, _ = run(2, [*TINY, *SHAPE, *out], unwritable)
    assert main.code == 2 and "-- saved: checkpoint of step 1" in main.out
    (line,) = main.err.splitlines()
    assert line.startswith(f"error: the routing was not written to run.record_routing={path}: gone")


def test_loads_in_words() -> None:
    even, one = np.array([[0, 1], [2, 3]]), np.array([[0, 1], [0, 1]])
    said = "the busiest expert has 2.00 x the mean, the busiest of 2 ranks 1.50 x, on average"
    assert record.loads({"layer.1": even, "layer.2": one}, 4, 2).startswith(said)
    assert record.loads({"layer.1": one}, 4, 1) == "the busiest expert has 2.00 x the mean"
