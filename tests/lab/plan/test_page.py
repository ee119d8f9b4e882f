"""docs/plan.md has the figures of the planner."""

import dataclasses
import re
from pathlib import Path

import pytest

from phalanx import train
from phalanx.configs.tables.machines import Machine, machine_named
from phalanx.moe.plan.cost.step_time import StepTime
from phalanx.scripts.lab.plan import pictures, points, tables
from phalanx.scripts.lab.plan.points import IN_MEMORY, MODELS, SHOWN, SIZES, Point
from phalanx.scripts.output.pictures import pyplot

DOCS = Path(train.__file__).resolve().parent / "docs"
TEXT = (DOCS / "plan.md").read_text("utf-8")
SAID = " ".join(TEXT.split())
ROWS = re.findall(rf"^\| ({'|'.join(MODELS)}) \| ([\d,]+) \|.*\| `(.*)` \|$", TEXT, re.M)


def shown() -> list[Point]:
    """Points of the layouts in the table."""
    found = (
        points.again(model, int(gpus.replace(",", "")), layout) for model, gpus, layout in ROWS
    )
    return [each for each in found if each is not None]


def test_the_table_of_clusters_is_that_of_its_layouts() -> None:
    assert tables.clusters(shown()) in TEXT
    assert len(shown()) == len(ROWS) > 15


@pytest.mark.parametrize(("model", "gpus"), [("GPT-OSS-120B", 64), ("DeepSeek-V3", 512)])
def test_a_search_finds_the_layout_of_the_table(model: str, gpus: int) -> None:
    found = points.point(model, gpus)
    assert found is not None and tables.row(found) in TEXT


def test_a_model_is_in_the_table_where_it_fits() -> None:
    there = {(model, int(gpus.replace(",", ""))) for model, gpus, _ in ROWS}
    missing = [(model, gpus) for model in MODELS for gpus in SIZES if (model, gpus) not in there]
    assert len(missing) == 5
    assert [each for each in missing if points.point(*each) is not None] == []


def test_the_tables_of_memory_and_time_are_those_of_their_layouts() -> None:
    of_size = {each.model: each for each in shown() if each.gpus == SHOWN}
    stages, buffers = points.memory(of_size[IN_MEMORY])
    reserve = points.machine().reserved_gib
    assert tables.memory_table(stages, buffers, reserve) in TEXT
    assert tables.time_table({model: points.time(of_size[model]) for model in MODELS}) in TEXT
    # The parts are all of it.
    largest = max(stages, key=lambda stage: stage.peak)
    parts = tables.memory_parts(largest, buffers, reserve)
    assert sum(parts.values()) == pytest.approx(of_size[IN_MEMORY].memory_gib)


def test_shares_of_a_step_are_all_of_it() -> None:
    parts = [f.name for f in dataclasses.fields(StepTime)]
    assert sorted(sum(tables.WORK.values(), ())) == sorted(parts)


def test_errors_are_those_of_the_page_that_compares_them() -> None:
    compared = " ".join((DOCS / "published" / "simulated.md").read_text("utf-8").split())
    found = re.search(
        r"The median error of the (\d+) held records is ([\d.]+) %; (\d+) are within 15 %. Of the "
        r"(\d+) benchmarks among them 1 is off by more than 25 %: (\w+) by .*? \(\+(\d+)%\). "
        r"Trials are off by \+(\d+)% and \+(\d+)%",
        compared,
    )
    assert found
    held, median, within, benchmarks, miss, error, low, high = found.groups()
    assert f"off by {median} % at the median of {held} [published runs]" in SAID
    assert f"{within} of them are within 15 %" in SAID
    assert f"One of their {benchmarks} benchmarks is off by more than 25 %: Qwen3-30B-A3B" in SAID
    assert miss == "qwen3_30b_a3b" and f"has as {error} % faster" in SAID
    assert f"GPT-OSS-20B is off by {low} %" in SAID and f"not tuned, by {high} %" in SAID


def test_what_is_assumed_of_a_vendor_is_in_the_table_of_machines() -> None:
    rows = re.findall(r"^\| .*? \| `(\w+)` \| ([\d.]+) \|$", TEXT, re.M)
    h100: Machine = machine_named("h100")
    assert len(rows) == 7
    assert [
        (name, float(value)) for name, value in rows if getattr(h100, name) != float(value)
    ] == []


def test_the_pictures_are_drawn(tmp_path: Path) -> None:
    some = [each for each in shown() if each.gpus == SHOWN]
    stages, buffers = points.memory(some[0])
    limits = {"memory": 79.1, "reserve": 4.0}
    pictures.speed(some, tmp_path / "speed.png")
    pictures.memory(stages, buffers, limits, tmp_path / "memory.png", "memory")
    pictures.time({each.model: points.time(each) for each in some}, tmp_path / "time.png", "time")
    for name in ("speed", "memory", "time"):
        drawn = pyplot().imread(tmp_path / f"{name}.png")
        assert drawn.shape[0] > 300 and drawn.std() > 0.05
        assert (
            f"(plan/{name}.png)" in TEXT and (DOCS / "plan" / f"{name}.png").stat().st_size > 9000
        )
