"""Goodput: each moment in one kind, sums over launches, steps that were undone."""

import io
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from phalanx.configs.schema import Config
from phalanx.moe.report.goodput import TRAINING, Clock, earlier, goodput, goodput_line, slow_start
from phalanx.moe.report.loggers import lines, start_facts
from phalanx.moe.report.metrics import Metrics
from phalanx.parallel.fault import activity


class Host:
    """Clock of a host that a test moves."""

    now = 100.0
    process = 100.0  # when the process was created

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    host = Host()
    monkeypatch.setattr(time, "perf_counter", host)
    monkeypatch.setattr(time, "time", lambda: 1e9 + host.now)
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: 1e9 + host.process)
    return host


def spend(clock: Clock, host: Host, **seconds: float) -> None:
    for kind, value in seconds.items():
        host.now += value
        clock.lap(kind)


def test_every_moment_is_of_one_kind(host: Host) -> None:
    host.process = 98.0
    clock = Clock({"start": 1.0})
    spend(clock, host, start=3.0, training=4.0, data=0.5)
    host.now += 10.0
    clock.lap("reruns", most=4.0)
    clock.lap(TRAINING)
    clock.lap("reruns", most=4.0)  # nothing has passed
    want = {"start": 6.0, TRAINING: 10.0, "data": 0.5, "reruns": 4.0}
    assert {kind: s for kind, s in clock.seconds.items() if s} == want
    assert sum(clock.seconds.values()) == 1.0 + host.now - 98.0
    assert goodput(clock.seconds) == pytest.approx(10.0 / 20.5)


def test_the_process_started_before_now() -> None:
    clock = Clock()
    clock.lap("start")
    assert 0 < clock.seconds["start"] < 86400


def test_a_slow_start_names_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(activity, "_parts", {"imports": 99.0})
    monkeypatch.setattr(activity, "_now", activity.current_progress())
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    activity.start_run()
    for seconds, part in ((1.0, "imports"), (3.0, "data"), (3.01, "imports"), (59.0, "model")):
        now[0] = seconds
        activity.set_activity(f"start: {part}")
    assert activity.startup_times() == {"configuration": 1.0, "imports": 57.99, "data": 0.01}
    assert not slow_start()
    now[0] = 62.0
    activity.set_activity("step 1: data")
    want = "the start took 62.0 s: imports 58.0 s, model 3.0 s, configuration 1.0 s"
    assert slow_start() == want


def test_the_line_has_the_largest_loss_first() -> None:
    seconds = {"start": 20.0, TRAINING: 900.0, "data": 0.1, "checkpoints": 79.9}
    assert goodput_line(seconds) == "goodput 90.0% of 1,000 s; checkpoints 8.0%, start 2.0%"
    assert goodput_line({TRAINING: 5.0}) == "goodput 100.0% of 5 s"
    assert goodput({}) == 0.0


def run(folder: Path, step: int, host: Host, *, replaced: bool = False) -> Metrics:
    """Metrics of a launch that begins now, in a new process or in one whose program it replaces."""
    cfg = Config()
    cfg.run.steps = 100
    if not replaced:
        host.process = host.now
    return Metrics(folder, cfg, True, step=step, stream=io.StringIO())


def launch(metrics: Metrics, host: Host, first: int, last: int, saves: int) -> None:
    """A start of 5 s, and steps of 2 s; the checkpoint after step `saves` takes 1 s."""
    spend(metrics.clock, host, start=5.0)
    metrics.start({"model": "tiny"})
    for step in range(first, last + 1):
        spend(metrics.clock, host, training=2.0)
        metrics.log({"step": step, "loss": 1.0, "step_time": 2.0})
        if step == saves:
            spend(metrics.clock, host, checkpoints=1.0)
            metrics.event("saved")


def test_a_resumed_run_goes_on_with_the_sums(tmp_path: Path, host: Host) -> None:
    """Killed after step 6, resumed from step 4, killed at once, resumed again, to step 8."""
    launch(run(tmp_path, 0, host), host, 1, 6, saves=4)
    host.now += 1000.0  # waits for a machine
    launch(run(tmp_path, 4, host), host, 5, 4, saves=0)
    host.now += 1000.0
    metrics = run(tmp_path, 4, host)
    launch(metrics, host, 5, 8, saves=0)
    want = {"start": 15.0, TRAINING: 16.0, "checkpoints": 1.0, "undone": 4.0}
    assert metrics.clock.seconds == want
    last = lines(tmp_path / "metrics.jsonl")[-1]
    assert last["seconds"] == want and last["goodput"] == pytest.approx(16 / 36)
    assert start_facts(tmp_path / "metrics.jsonl") == {"model": "tiny"}
    host.now += 3.0
    metrics.close()
    end = lines(tmp_path / "metrics.jsonl")[-1]
    assert end["event"] == "summary" and end["seconds"] == want | {"end": 3.0}
    assert end["goodput"] == pytest.approx(16 / 39)


def test_a_phase_in_the_same_process_counts_no_moment_twice(tmp_path: Path, host: Host) -> None:
    """The program of the next phase replaces that of the one before; the process is as old."""
    metrics = run(tmp_path, 0, host)
    launch(metrics, host, 1, 4, saves=4)
    metrics.close()
    host.now += 2.0  # what has no line: the end of the first program
    metrics = run(tmp_path, 4, host, replaced=True)
    launch(metrics, host, 5, 6, saves=0)
    want = {"start": 12.0, TRAINING: 12.0, "checkpoints": 1.0, "end": 0.0}
    assert metrics.clock.seconds == want
    assert sum(want.values()) == host.now - host.process


def test_a_line_of_a_clock_that_is_ahead_takes_no_time_away(host: Host) -> None:
    clock = Clock({"start": 1.0}, until=1e9 + host.now + 60)
    spend(clock, host, start=2.0)
    assert clock.seconds == {"start": 3.0}


def test_a_rollback_undoes_steps_once(tmp_path: Path, host: Host) -> None:
    metrics = run(tmp_path, 0, host)
    launch(metrics, host, 1, 6, saves=4)
    spend(metrics.clock, host, skipped=2.5)
    metrics.rewind(4)
    metrics.event("rolled back")
    want = {"start": 5.0, TRAINING: 8.0, "checkpoints": 1.0, "skipped": 2.5, "undone": 4.0}
    assert metrics.clock.seconds == want
    host.now += 9.0
    assert run(tmp_path, 4, host).clock.seconds == want


def test_a_new_run_starts_at_zero(tmp_path: Path, host: Host) -> None:
    launch(run(tmp_path, 0, host), host, 1, 6, saves=4)
    assert run(tmp_path, 0, host).clock.seconds == {}


def test_records_of_before_have_no_times() -> None:
    records: list[dict[str, Any]] = [{"step": 1, "loss": 2.0}, {"event": "saved", "at": 1}]
    assert earlier(records, 1) == {}
    timed = {"step": 2, "seconds": {"data": 1.0}}
    assert earlier([*records, timed], 1) == {"data": 1.0}
