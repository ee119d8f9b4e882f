"""Ranks that are late are named, and only those, and only when it lasts."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from phalanx.moe.report.loggers import read
from phalanx.moe.report.slow_ranks import EVERY, PATIENCE, SlowRanks
from tests.support.runs import run
from tests.support.tiny_runs import TINY

NAMES = [f"rank {i} on node{i}" for i in range(4)]


def times(seconds: list[float]) -> torch.Tensor:
    return torch.tensor(seconds, dtype=torch.float64)


def test_late_is_what_is_behind_the_median_by_a_share_of_the_step() -> None:
    watch = SlowRanks(NAMES, 0)
    watch.add(times([0.01, 0.02, 0.5, 0.01]))
    watch.add(times([0.01, 0.02, 0.3, 0.09]))
    late, warnings = watch.look(2, 1.0)
    assert late == {"2": pytest.approx(0.38)} and not warnings
    watch.add(times([0.3, 0.3, 0.3, 0.3]))  # all of them: nobody waits for anyone
    assert watch.look(3, 1.0) == ({}, [])
    assert watch.look(4, 1.0) == ({}, [])  # no steps, as after a validation


def test_a_pair_has_a_slow_one_too() -> None:
    watch = SlowRanks(NAMES[:2], 0)
    watch.add(times([0.5, 0.1]))
    assert watch.look(1, 1.0)[0] == {"0": pytest.approx(0.4)}


def test_what_lasts_is_reported_with_its_name_and_not_again_soon() -> None:
    watch, reported = SlowRanks(NAMES, 100), {}
    for step in range(101, 101 + EVERY + 2 * PATIENCE):
        in_time = step == 105
        watch.add(times([0.0, 0.0, 0.0, 0.0 if in_time else 0.25]))
        _, warnings = watch.look(step, 0.5)
        if warnings:
            (reported[step],) = warnings
    assert list(reported) == [105 + PATIENCE, 105 + PATIENCE + EVERY]
    assert "rank 3 on node3 by 0.250 s (50% of a step)" in reported[105 + PATIENCE]
    assert "rank 2" not in reported[105 + PATIENCE]


def test_a_rollback_starts_over() -> None:
    watch = SlowRanks(NAMES, 0)
    for step in range(1, PATIENCE):
        watch.add(times([0.0, 1.0, 0.0, 0.0]))
        watch.look(step, 1.0)
    watch.rewind(4)
    watch.add(times([0.0, 1.0, 0.0, 0.0]))
    assert watch.look(5, 1.0) == ({"1": 1.0}, [])


@contextlib.contextmanager
def slow_data(rank: int) -> Iterator[None]:
    """In a rank: if it is the second, its data takes 60 ms a step."""
    from phalanx.moe.data.loader import Loader

    original = Loader.next_step

    def next_step(self: Any) -> Any:
        time.sleep(0.06 * (rank == 1))
        return original(self)

    with mock.patch.object(Loader, "next_step", next_step):
        yield


@pytest.mark.dist
@pytest.mark.alone
def test_a_run_names_the_rank_whose_data_comes_late(tmp_path: Path) -> None:
    steps = PATIENCE + 4
    given = [*TINY, "data=synthetic", f"run.dir={tmp_path}", f"run.steps={steps}"]
    main, other = run(2, [*given, "run.save_interval=-1"], slow_data)
    assert main.code == other.code == 0, main.err
    found = [r["late"].get("1", 0) for r in read(tmp_path / "run" / "metrics.jsonl")[1:]]
    assert len(found) == steps - 1 and all(0.05 < late < 0.5 for late in found)
    assert f"warning: slow for {PATIENCE} steps, all other ranks wait: rank 1 on " in main.out
