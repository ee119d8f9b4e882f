"""Runs on a blend that changes by stage: resumes inside a stage, and stages that are added."""

from pathlib import Path

import pytest

from tests.support.runs import TINY, exact, records, run, text, write_corpus

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides of a run of steps of 128 tokens, on two sources."""
    folder, pieces = tmp_path_factory.mktemp("corpus"), [list(p) for p in text()]
    a, b = (write_corpus(folder / name, pieces[i::2]) for i, name in enumerate("ab"))
    data = ["data=indexed", f"data.blend=[0.75,{a},0.25,{b}]", f"data.cache={folder / 'cache'}"]
    return [*TINY, *data, "run.steps=8"]


def test_a_run_goes_on_inside_a_stage_bit_for_bit(command: list[str], tmp_path: Path) -> None:
    args = [*command, "data.stages=[300:0/1,700:0.5/0.5]", "run.save_interval=4"]
    (straight,) = run(1, [*args, f"run.dir={tmp_path / 'a'}"])
    assert straight.code == 0, straight.err
    told = [line for line in straight.out.splitlines() if "tokens on: " in line]
    assert [line.strip() for line in told] == [
        "from 300 tokens on: 100.0% b",
        "from 700 tokens on: 50.0% a, 50.0% b",
        "-- data from 300 tokens on: 100.0% b",
        "-- data from 700 tokens on: 50.0% a, 50.0% b",
    ]
    saved = tmp_path / "a/run/checkpoints/step_00000004"  # after 512 tokens
    (resumed,) = run(1, [*args, f"run.dir={tmp_path / 'b'}", f"run.resume={saved}"])
    assert resumed.code == 0, resumed.err
    actual, other = (records(tmp_path / name / "run") for name in "ab")
    assert exact(actual)[4:] == exact(other) and len(other) == 4
    (plain,) = run(1, [*command, f"run.dir={tmp_path / 'c'}"])
    assert plain.code == 0
    unstaged = exact(records(tmp_path / "c/run"))
    assert unstaged[:2] == exact(actual)[:2] and unstaged[2:] != exact(actual)[2:]


@pytest.mark.extras
def test_stages_are_added_but_not_taken_back(command: list[str], tmp_path: Path) -> None:
    """The checkpoint has passed 512 tokens."""
    args = [*command, f"run.dir={tmp_path}"]
    (first,) = run(1, [*args, "run.steps=4", "data.stages=[300:0/1]"])
    assert first.code == 0, first.err
    for stages in ("none", "300:1/1", "300:0/1,400:1/1"):
        (main,) = run(1, [*args, f"data.stages={stages}"])
        assert main.code == 2 and "go on with data.stages='[300:0/1]'" in main.err
    (main,) = run(1, [*args, "data.stages=[300:0/1,512:0.5/0.5]"])
    assert main.code == 0, main.err
    assert "-- data from 512 tokens on: 50.0% a, 50.0% b" in main.out
    assert len(records(tmp_path / "run")) == 8
