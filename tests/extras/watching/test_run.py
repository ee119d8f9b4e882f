"""Runs as they are followed: files that grow, are cut and rewritten; points, events, and an ETA."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.extras.watching.run import Run
from phalanx.extras.watching.table import MOST_POINTS, size_of, thinned
from phalanx.moe.report import loggers
from tests.extras.watching.conftest import FACTS, live, plan, step, write


class Page:
    """The replies of a run, put together as page.js does."""

    def __init__(self, run: Run) -> None:
        self.run, self.have = run, None
        self.points: dict[str, Any] = {}
        self.events: list[dict[str, Any]] = []

    def poll(self, *window: int) -> dict[str, Any]:
        reply = self.run.look(self.have and tuple(self.have), window or (None, None))
        self.have = reply["have"]
        self.events = self.events[: reply["known"]] + reply["events"]
        if "points" in reply:
            since, new = reply["since"], reply["points"]
            self.points = new if since is None else _joined(self.points, new, since)
        return reply


def _joined(old: Any, new: Any, since: int) -> Any:
    if "step" not in {**old, **new}:
        return {k: _joined(old.get(k, {}), new.get(k, {}), since) for k in {**old, **new}}
    kept = sum(number < since for number in old.get("step", []))
    return {k: old.get(k, [])[:kept] + new.get(k, []) for k in {**old, **new}}


def test_a_run_that_has_not_begun_fills_as_it_goes(tmp_path: Path) -> None:
    page = Page(Run(tmp_path / "run" / "metrics.jsonl"))
    assert page.poll()["state"]["phase"] == "not begun"
    write(tmp_path / "run", [FACTS | {"time": time.time()}])
    reply = page.poll()
    assert reply["state"]["phase"] == "starting" and reply["state"]["title"].endswith("processes")
    write(tmp_path / "run", live(range(1, 4)))
    assert page.poll()["state"]["phase"] == "running"
    assert page.points["series"]["loss"] == {"step": [1, 2, 3], "mean": [9.0, 8.0, 7.0]}
    assert page.points["axis"]["tokens"] == [100, 200, 300]
    assert [*page.points["images"]["load"]] == ["step", "2", "10"]
    assert page.points["images"]["load"]["10"] == [3.0, 4.0, 5.0]
    assert page.points["images"]["dead"]["2"] == [0.0, 0.0, 0.0]
    assert "points" not in page.poll()  # nothing is new
    write(tmp_path / "run", live(range(4, 5)))
    reply = page.poll()
    assert reply["points"]["series"]["loss"]["step"] == [3, 4] and reply["since"] == 3
    assert page.points["series"]["loss"]["mean"] == [9.0, 8.0, 7.0, 6.0]


def test_a_line_counts_once_it_is_whole(tmp_path: Path) -> None:
    path = write(tmp_path, [step(1)])
    page, text = Page(Run(path)), json.dumps(step(2))
    with path.open("a") as file:
        file.write(text[:40])
        file.flush()
        page.poll()
        assert page.points["axis"]["step"] == [1]
        file.write(text[40:] + "\n")
    page.poll()
    assert page.points["axis"]["step"] == [1, 2]
    with path.open("a") as file:  # a launch that was killed while it wrote, and the one after it
        file.write(text[:40] + "\n[1]\nnull\n" + json.dumps(step(3)) + "\n")
    page.poll()
    assert page.points["axis"]["step"] == [1, 2, 3]


@pytest.mark.parametrize("odd", ['"step":1e30', '"seconds":{"training":null,"start":NaN}'])
@pytest.mark.parametrize("huge", ["step", "time", "loss"])
def test_numbers_that_no_run_writes_do_not_hide_the_others(
    odd: str, huge: str, tmp_path: Path
) -> None:
    path = write(tmp_path, [step(1)])
    with path.open("a") as file:
        file.write(json.dumps(step(2) | {huge: 10**400}) + "\n{" + odd + "}\n")
        file.write(json.dumps(step(3)) + "\n")
    page = Page(Run(path))
    assert json.dumps(page.poll()["state"], allow_nan=False)
    assert page.points["axis"]["step"] == [1, 3]


def test_a_validation_joins_its_step_though_the_page_has_it(tmp_path: Path) -> None:
    path = write(tmp_path, [step(1), step(2)])
    page = Page(Run(path))
    page.poll()
    write(tmp_path, [{"step": 2, "tokens": 200, "valid_loss": 7.5, "valid_loss/wiki": 7.0}])
    page.poll()
    assert page.points["series"]["valid_loss/wiki"] == {"step": [2], "mean": [7.0]}
    assert page.points["axis"]["step"] == [1, 2] and page.points["series"]["loss"]["step"] == [1, 2]


@pytest.mark.parametrize("how", ["rewind", "resume", "in place", "removed", "begun anew"])
def test_steps_that_are_undone_go(how: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    journal = loggers.Journal(path, 0, print)
    for record in (FACTS, *(step(n) for n in range(1, 6))):
        journal.write(record)
    page = Page(Run(path))
    page.poll()
    assert page.points["axis"]["step"][-1] == 5
    after = step(4, loss=50.0)
    if how == "rewind":
        journal.rewind(3)
        journal.write(after)
    elif how == "resume":
        journal.close()
        loggers.Journal(path, 3, print).write(after)
    elif how == "in place":  # longer than before, by a program that copies runs
        write(tmp_path, [FACTS, *(step(n) for n in range(1, 4)), after | {"note": "x" * 5000}], "w")
    elif how == "removed":
        path.unlink()
        assert page.poll()["state"]["phase"] == "not begun"
        assert page.points["axis"]["step"] == [] and page.events == []
        write(tmp_path, [FACTS, *(step(n) for n in range(1, 4)), after])
    else:  # an old step without a rewritten file
        write(tmp_path, [step(4, loss=50.0)])
    page.poll()
    assert page.points["series"]["loss"]["step"] == [1, 2, 3, 4]
    assert page.points["series"]["loss"]["mean"][-1] == 50.0
    assert page.points["images"]["load"]["step"] == [1, 2, 3, 4]
    assert [event["kind"] for event in page.events] == ["start"]


def test_points_are_means_with_the_range_and_spikes_stay() -> None:
    values = np.random.default_rng(0).normal(size=1000)
    values[[300, 301]] = 80.0, -90.0
    values[448:456] = np.nan
    values[500] = np.inf
    found = thinned(np.arange(1000) // 8, values)
    rows = np.ma.masked_invalid(values.reshape(-1, 8))
    for numbers, expected in ((found.mean, rows.mean(1)), (found.low, rows.min(1))):
        np.testing.assert_allclose(numbers, expected.filled(np.nan))
    np.testing.assert_array_equal(found.high, rows.max(1).filled(np.nan))
    assert found.high[37] == 80.0 and found.low[37] == -90.0 and np.isnan(found.mean[56])
    assert found.last.tolist() == list(range(7, 1000, 8))
    sparse = thinned(np.array([0, 0, 7]), np.array([1.0, 3.0, 5.0]))
    assert sparse.mean.tolist() == [2.0, 5.0] and sparse.last.tolist() == [1, 2]


@pytest.mark.parametrize(("rows", "size"), [(0, 1), (1, 1), (1000, 1), (1001, 2), (100_000, 128)])
def test_a_curve_has_a_bounded_number_of_points(rows: int, size: int) -> None:
    assert size_of(rows) == size and rows / size <= MOST_POINTS


def test_what_is_sent_piece_by_piece_is_what_is_sent_at_once(tmp_path: Path) -> None:
    """At sizes of 1, 2 and 4 rows to a point, with numbers that some rows have."""
    path = write(tmp_path, [FACTS])
    page, random = Page(Run(path)), np.random.default_rng(1)
    number = sent = 0
    while number < 2500:
        more = [
            step(n, **({"valid_loss": float(n)} if n % 50 == 0 else {}))
            for n in range(number + 1, number + 1 + int(random.integers(1, 90)))
        ]
        number += len(more)
        write(tmp_path, more)
        reply = page.poll()
        sent += len(reply["points"]["axis"]["step"])
    whole = Page(Run(path))
    whole.poll()
    assert page.points == whole.points and page.events == whole.events
    assert len(page.points["axis"]["step"]) <= MOST_POINTS
    assert sent < 2500 + 3 * MOST_POINTS  # not everything at each poll
    assert page.points["series"]["valid_loss"]["mean"][:2] == [50.0, 100.0]


def test_a_part_of_a_run_has_finer_points(tmp_path: Path) -> None:
    page = Page(Run(write(tmp_path, [step(n) for n in range(1, 3001)])))
    page.poll(2001, 2100)
    assert page.points["axis"]["step"] == list(range(2001, 2101))
    assert "low" not in page.points["series"]["loss"]
    page.have = None  # as the page does where it shows another part
    page.poll(4000, 5000)
    assert page.points["axis"]["step"] == []


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    lost = step(2, loss=None, nonfinite={"loss": "nan"}, layers={"2": [None, 0], "10": "x"})
    page = Page(Run(write(tmp_path, [step(1), lost, step(3)])))
    state = page.poll()["state"]
    assert page.points["series"]["loss"]["mean"] == [9.0, None, 7.0]
    assert page.points["images"]["load"]["10"] == [3.0, None, 5.0]
    assert state["newest"]["loss"] == 7.0
    json.dumps(page.points, allow_nan=False)


def test_layers_may_differ_between_records(tmp_path: Path) -> None:
    more = step(2, layers={"1": [5.0, 0], "2": [6.0, 0]})
    page = Page(Run(write(tmp_path, [step(1), more, step(3)])))
    page.poll()
    expected = {"step": [1, 2, 3], "1": [None, 5.0, None], "2": [1.5, 6.0, 1.5]}
    assert page.points["images"]["load"] == expected | {"10": [3.0, None, 5.0]}


def test_the_end_is_foreseen_and_silence_is_noticed(tmp_path: Path) -> None:
    plan(tmp_path, 200)
    run = Run(write(tmp_path, [FACTS, *live(range(1, 51), ago=5)]))
    state = run.look()["state"]
    assert state["phase"] == "running" and 4 < state["age"] < 10 and state["wait"] == 30
    assert state["eta"] == pytest.approx(150, rel=0.01) and state["pace"] == pytest.approx(1)
    write(tmp_path, [FACTS, *live(range(1, 51), ago=40)], "w")
    assert run.look()["state"]["phase"] == "overdue"
    # Steps of a minute may be that late; so may a run that still compiles.
    slow = [step(n, time=time.time() - 60 * (9 - n)) for n in range(1, 9)]
    write(tmp_path, slow, "w")
    assert run.look()["state"]["phase"] == "running"
    write(tmp_path, [FACTS | {"time": time.time() - 200}], "w")
    assert run.look()["state"]["phase"] == "starting"
    # So may a validation of a minute, as the one before.
    times = [time.time() - n for n in (170, 169, 168, 108, 107, 80)]
    write(tmp_path, [step(n, time=when) for n, when in enumerate(times, 1)], "w")
    assert run.look()["state"]["phase"] == "running"
    write(tmp_path, [step(1, time=None), step(2, time="x")], "w")
    assert run.look()["state"]["pace"] is None
    end = {"event": "summary", "at": 50, "loss": 1.0, "time": time.time() - 1e6}
    write(tmp_path, [FACTS, *live(range(1, 51), ago=1e6), end], "w")
    state = run.look()["state"]
    assert state["phase"] == "stopped" and state["eta"] is None
    plan(tmp_path, 50, "short", "long")
    state = run.look()["state"]
    assert state["phase"] == "ended" and state["phases"] == ["short", "long"]


def test_the_next_phase_starts_where_one_has_ended(tmp_path: Path) -> None:
    plan(tmp_path, 50, "short")
    begun = FACTS | {"phases_after": ["long", "anneal"]}
    end = {"event": "summary", "at": 50, "time": time.time() - 100}
    run = Run(write(tmp_path, [begun, *live(range(1, 51), ago=100), end]))
    state = run.look()["state"]
    assert state["phase"] == "starting" and state["phases"] == ["short", "long"]
    assert state["age"] < state["wait"] and state["eta"] is None  # a start may take that long
    plan(tmp_path, 80, "short", "long")  # of the next launch, whose first line follows
    state = run.look()["state"]
    assert state["phase"] == "starting" and state["phases"] == ["short", "long"]
    write(tmp_path, [begun | {"at": 50, "phases_after": ["anneal"]}, *live(range(51, 53))])
    assert run.look()["state"]["phase"] == "running"
    write(tmp_path, [{"event": "summary", "at": 52, "time": time.time()}])
    assert run.look()["state"]["phase"] == "stopped"  # by a signal
    plan(tmp_path, 52, "short", "long")
    assert run.look()["state"]["phases"] == ["short", "long", "anneal"]
    write(tmp_path, [begun | {"phases_after": []}, end | {"at": 52}])
    assert run.look()["state"]["phase"] == "ended"
    write(tmp_path, [begun, *live(range(1, 53), ago=1e4), end | {"time": time.time() - 1e4}], "w")
    assert run.look()["state"]["phase"] == "overdue"


def test_events_have_kinds_and_a_killed_launch_is_told(tmp_path: Path) -> None:
    texts = {
        "phase 4k from step 1 on": "phase",
        "saving in the background: checkpoint of step 2 in runs/one/checkpoints": "checkpoint",
        "skipped: the gradient norm is NaN": "skipped",
        "rolled back to step 2: the loss is NaN": "rollback",
        "warning: 1 expert had no token": "warning",
        "kernels: ready": "kernels",
        "waiting until the last checkpoint is written": "note",
    }
    lines = [{"event": text, "at": 2, "time": 1002.0} for text in texts]
    again, end = FACTS | {"at": 2, "time": 1010.0}, {"event": "summary", "at": 3, "loss": 7.0}
    page = Page(Run(write(tmp_path, [FACTS, step(1), step(2), *lines, again, step(3), end, FACTS])))
    page.poll()
    assert [e["kind"] for e in page.events] == ["start", *texts.values(), "restart", "end", "start"]
    assert "ended without a summary" in page.events[-3]["text"]
    assert page.events[-3]["text"].startswith("resumed after step 2: one: tiny on 2 CPU processes")
    assert page.events[-2]["text"] == "end after step 3, loss 7.0000"
    write(tmp_path, [{"event": "warning: more", "at": 3}])
    assert [event["text"] for event in page.poll()["events"]] == ["warning: more"]


def test_post_mortems_are_failures(tmp_path: Path) -> None:
    run = Run(write(tmp_path, [FACTS]))
    folder = tmp_path / "failures" / "20260301-120000"
    folder.mkdir(parents=True)
    assert run.look()["failures"] == []
    (folder / "rank0.txt").write_text("stack")
    (failure,) = run.look()["failures"]
    assert failure["text"] == "failure: 20260301-120000/ has rank0.txt"
    assert failure["time"] == pytest.approx(time.time(), abs=60)
