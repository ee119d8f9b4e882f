"""The page in a browser: curves, a run that goes on, several runs, part of a run, events."""

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from playwright.sync_api import Page, expect

from phalanx.extras.serving.local import listening
from phalanx.extras.watching.app import app
from phalanx.extras.watching.runs import Runs
from tests.extras.serving.browser import opened
from tests.extras.watching.conftest import FACTS, live, plan, step, write


@contextmanager
def watched(
    *paths: Path, width: int = 1280, allowed: str | None = None, **options: Any
) -> Iterator[Page]:
    """The page of a server in a thread of this process."""
    with listening("127.0.0.1", 0) as (listener, address):
        config = uvicorn.Config(app(Runs(paths), "127.0.0.1"), log_level="warning")
        server = uvicorn.Server(config)
        serving = threading.Thread(target=server.run, args=([listener],), daemon=True)
        serving.start()
        size = {"width": width, "height": 900}
        try:
            with opened(address, allowed=allowed, viewport=size, **options) as page:
                yield page
        finally:
            server.should_exit = True
            serving.join(20)


def points(page: Page, chart: str) -> int:
    """Number of points of the first curve of a chart."""
    path = page.locator(f"#chart-{chart} path.curve").first.get_attribute("d") or ""
    return len(re.findall("[ML]", path))


def box_of(page: Page, chart: str) -> dict[str, float]:
    """Place of a chart's picture."""
    picture = page.locator(f"#chart-{chart} svg[role]")
    expect(picture).to_be_visible()
    x, y, width = picture.evaluate("p => (b => [b.x, b.y, b.width])(p.getBoundingClientRect())")
    return {"x": x, "y": y, "width": width}


def test_a_run_is_followed_from_before_its_start_to_its_end(tmp_path: Path) -> None:
    with watched(tmp_path / "one") as page:
        expect(page.get_by_role("heading", name="one")).to_be_visible()
        expect(page.locator(".head")).to_contain_text("not begun")
        expect(page.get_by_text("no step yet")).to_be_visible()
        plan(tmp_path / "one", 60)
        write(tmp_path / "one", [FACTS | {"time": time.time()}, *live(range(1, 31))])
        head = page.locator(".head")
        expect(head).to_contain_text("running")
        expect(head).to_contain_text("tiny on 2 CPU processes")
        expect(head).to_contain_text("step 30 of 60")
        expect(head).to_contain_text(re.compile(r"ETA 30s \(\d\d:\d\d\)"))
        expect(page.get_by_text("no step yet")).to_be_hidden()
        assert points(page, "loss") == 30
        expect(page.locator("#chart-speed h2")).to_contain_text("tokens/s of a rank")
        expect(page.locator("#chart-time")).to_contain_text("training 30s, 93.8 %")
        write(tmp_path / "one", live(range(31, 41), ago=100))
        expect(head).to_contain_text("step 40 of 60")
        expect(head).to_contain_text("overdue")
        expect(page.locator(".late")).to_contain_text("no record for 1m4")
        assert points(page, "loss") == 40
        write(tmp_path / "one", [{"event": "summary", "at": 40, "loss": 1.0, "time": time.time()}])
        expect(head).to_contain_text("stopped")


def test_values_are_told_under_the_pointer(tmp_path: Path) -> None:
    lines = [step(n, **{"valid_loss": 5.25, "valid_loss/wiki": 4.5} if n == 5 else {}) for n in
             range(1, 10)]  # fmt: skip
    write(tmp_path / "one", lines)
    with watched(tmp_path / "one") as page:
        box = box_of(page, "loss")
        page.mouse.move(box["x"] + 58 + (box["width"] - 68) / 2, box["y"] + 60)
        tip = page.get_by_role("tooltip")
        expect(tip).to_contain_text("step 5")
        for text in ("training 5", "validation 5.25", "wiki 4.5"):
            expect(tip).to_contain_text(text)
        box = box_of(page, "load")
        page.mouse.move(box["x"] + box["width"] - 12, box["y"] + 150)
        expect(tip).to_contain_text("layer 10 11")
        page.mouse.move(2, 2)
        expect(tip).to_be_hidden()
        page.get_by_role("radio", name="tokens").check()
        labels = page.locator("#chart-lr svg text").all_text_contents()
        assert "800" in labels and "8" not in labels
        page.get_by_role("radio", name="time").check()
        assert "4s" in page.locator("#chart-lr svg text").all_text_contents()
        page.reload()  # the address has the view
        expect(page.get_by_role("radio", name="time")).to_be_checked()


def test_a_finger_tells_values_that_stay(tmp_path: Path) -> None:
    write(tmp_path / "one", [step(n) for n in range(1, 10)])
    with watched(tmp_path / "one", width=400, has_touch=True) as page:
        box = box_of(page, "loss")
        page.touchscreen.tap(box["x"] + box["width"] - 10, box["y"] + 60)
        expect(page.get_by_role("tooltip")).to_contain_text("step 9")
        page.wait_for_timeout(200)
        expect(page.get_by_role("tooltip")).to_be_visible()
        page.touchscreen.tap(5, 5)
        expect(page.get_by_role("tooltip")).to_be_hidden()


def test_a_drag_shows_a_part_with_all_its_steps(tmp_path: Path) -> None:
    write(tmp_path / "one", [step(n) for n in range(1, 4001)])
    with watched(tmp_path / "one") as page:
        assert points(page, "lr") == 1000  # of four steps each
        box = box_of(page, "lr")
        y, left, width = box["y"] + 80, box["x"] + 58, box["width"] - 68
        page.mouse.move(left + 0.5 * width, y)
        page.mouse.down()
        page.mouse.move(left + 0.55 * width, y, steps=3)
        page.mouse.up()
        whole = page.get_by_role("button", name="whole run")
        expect(whole).to_be_visible()
        expect(page.locator("#chart-lr svg text", has_text="2,050")).to_have_count(1)
        assert 190 <= points(page, "lr") <= 215
        whole.click()
        expect(whole).to_be_hidden()
        expect(page.locator("#chart-lr svg text", has_text="2,050")).to_have_count(0)
        assert points(page, "lr") == 1000


def test_runs_of_a_folder_lie_over_each_other(tmp_path: Path) -> None:
    for name, steps in (("one", 20), ("two", 30)):
        write(tmp_path / "made" / name, [FACTS, *(step(n) for n in range(1, steps + 1))])
    with watched(tmp_path / "runs", allowed="404") as page:
        expect(page.get_by_text("no step yet")).to_be_visible()
        (tmp_path / "made").rename(tmp_path / "runs")
        expect(page.locator(".head h1")).to_have_text("two", timeout=30_000)  # the newest
        page.get_by_text("runs: 1 of 2").click()
        page.get_by_role("checkbox", name="one").check()
        expect(page.locator(".head")).to_have_count(2)
        expect(page.locator("#chart-loss path.curve")).to_have_count(2)
        expect(page.locator("#chart-loss .legend")).to_contain_text("two -20 one -10")
        expect(page.locator("#chart-load-1")).to_be_visible()
        page.get_by_role("checkbox", name="two").uncheck()
        expect(page.locator(".head h1")).to_have_text("one")
        expect(page.locator("#chart-loss path.curve")).to_have_count(1)
        expect(page.locator("#chart-load-1")).to_have_count(0)


def test_events_are_marked_and_listed(tmp_path: Path) -> None:
    events = ["saved: checkpoint of step 5 in x", "skipped: <b>NaN</b>", "kernels: ready"]
    lines = [{"event": text, "at": 5, "time": 1005.0} for text in events]
    again = FACTS | {"at": 7, "time": 1009.0}
    first, rest = [step(n) for n in range(1, 6)], [step(n) for n in range(6, 10)]
    write(tmp_path / "one", [FACTS, *first, *lines, *rest[:2], again, *rest[2:]])
    with watched(tmp_path / "one", width=400, color_scheme="dark") as page:
        rows = page.locator("#events li")
        expect(rows).to_have_count(4)
        expect(rows.first).to_contain_text("ended without a summary")
        expect(page.locator("#events")).to_contain_text("skipped: <b>NaN</b>")
        marks = page.locator("#chart-loss .mark")
        kinds = [m.get_attribute("class") for m in marks.all()]
        assert kinds == ["mark checkpoint", "mark skipped", "mark restart"]
        page.get_by_role("button", name="skipped 1").click()
        expect(rows).to_have_count(3)
        expect(marks).to_have_count(2)
        page.get_by_role("button", name="kernels 1").click()
        expect(rows).to_have_count(4)
        assert page.evaluate("document.documentElement.scrollWidth") == 400
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(17, 21, 28)"
        page.get_by_text("other numbers").wait_for(state="hidden")


def test_tasks_and_logits_have_charts_of_their_own(tmp_path: Path) -> None:
    scores = {"tasks/arc/acc": 0.5, "tasks_ema/arc/acc": 0.75, "tasks/arc/bits_per_byte": 1.5}
    more = {"max_logits": {"1": 7.0}, "mfu": 0.25, "tflops_per_gpu": 3.0, "memory": 1.5}
    write(tmp_path / "one", [step(1), step(2, **scores, **more)])
    with watched(tmp_path / "one") as page:
        expect(page.locator("#chart-scores .legend")).to_have_text(
            "arc 50.0 % arc, averages 75.0 %"
        )
        expect(page.locator("#chart-bits .legend")).to_have_text("arc 1.5")
        expect(page.locator("#chart-mfu .legend")).to_have_text("25.0 %")
        expect(page.locator("#chart-tflops")).to_have_count(0)
        expect(page.locator("#chart-logit")).to_be_visible()
        page.get_by_text("other numbers (1)").click()
        expect(page.locator("#chart-other-memory")).to_contain_text("1.5")


def test_a_server_that_is_gone_is_told(tmp_path: Path) -> None:
    write(tmp_path / "one", [step(1)])
    with watched(tmp_path / "one", allowed="ERR_BLOCKED_BY_CLIENT") as page:
        expect(page.locator("#chart-loss")).to_be_visible()
        page.route("**/data?*", lambda route: route.abort("blockedbyclient"))
        expect(page.get_by_role("alert")).to_contain_text("does not answer")
        page.unroute("**/data?*")
        expect(page.get_by_role("alert")).to_be_hidden()


@pytest.mark.parametrize("kind", ["empty", "garbage"])
def test_there_may_be_nothing(kind: str, tmp_path: Path) -> None:
    if kind == "garbage":
        write(tmp_path / "one", []).write_bytes(b"\xff\xfe{]\n" * 5)
    with watched(tmp_path) as page:
        said = {"empty": "no run here yet", "garbage": "no step yet"}[kind]
        expect(page.get_by_text(said)).to_be_visible()
