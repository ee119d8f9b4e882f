"""Checkpoints of a newer version: all readers follow the same rule."""

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from phalanx.parallel.checkpoint import commit
from phalanx.scripts import checkpoint, convert_hf, evaluate, sample
from tests.support.runs import TINY, run
from tests.support.tiny_runs import CommandResult, command

pytestmark = pytest.mark.dist

COMMAND = [*TINY, "run.steps=1"]


@contextmanager
def with_knobs(rank: int, *, added: dict[str, Any]) -> Iterator[None]:
    """Write checkpoints with additional knobs, by section."""
    from phalanx.moe.run.progress import Progress

    original = Progress.state

    def state(self: Progress) -> dict[str, Any]:
        saved = original(self)
        for section, knobs in added.items():
            saved["config"][section] |= knobs
        return saved

    with mock.patch.object(Progress, "state", state):
        yield


def saved(folder: Path, **added: dict[str, Any]) -> Path:
    """Folder of a one-step run by a version with more knobs."""
    (main,) = run(1, [*COMMAND, f"run.dir={folder}"], partial(with_knobs, added=added))
    assert main.code == 0, main.err
    return folder / "run"


def step_1(folder: Path) -> Path:
    return folder / "checkpoints" / "step_00000001"


def resumed(folder: Path) -> CommandResult:
    (main,) = run(1, [*COMMAND, f"run.dir={folder.parent}", "run.steps=2"])
    return CommandResult(main.code, main.out, main.err)


def looked_at(main: Callable[..., int], *more: Any) -> Callable[[Path], CommandResult]:
    return lambda folder: command(main, folder, *more)


def exported(folder: Path) -> CommandResult:
    return command(convert_hf.main, "export", folder, folder / "exported")


def lines(output: CommandResult) -> list[str]:
    """Lines on stderr without progress bars."""
    progress = re.compile(r"-- loading |.*(it/s|B/s)")
    return [line for line in output.err.splitlines() if line and not progress.match(line)]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("some text")
    return tmp_path / "text.txt"


def readers(text: Path) -> dict[str, Callable[[Path], CommandResult]]:
    return {
        "sample": looked_at(sample.main, "--prompt", "x", "--tokens", "1"),
        "evaluate": looked_at(evaluate.main, text),
        "export": exported,
        "resume": resumed,  # last, as it saves another checkpoint
    }


def test_a_knob_of_the_model_is_refused_by_name(tmp_path: Path, text: Path) -> None:
    folder = saved(tmp_path, model={"new_model_knob": True}, data={"order": "sorted"})
    for name, read in readers(text).items():
        output = read(folder)
        assert output.code in (1, 2), name
        (line,) = lines(output)
        assert "has model.new_model_knob=true, data.order=sorted, which this" in line, name
        assert line.endswith(": use the version that wrote it, or a newer one"), name
    assert not (folder / "exported").exists() and not list(folder.glob("checkpoints/*.bad"))
    inspected = command(checkpoint.main, "inspect", step_1(folder))
    assert "  model.new_model_knob=True, which this version does not know\n" in inspected.out


def test_other_knobs_are_told_in_a_line(tmp_path: Path, text: Path) -> None:
    folder = saved(tmp_path, run={"tempo": 3}, optim={"spin": 1})
    for name, read in readers(text).items():
        output = read(folder)
        reported = [line for line in output.err.splitlines() if "are ignored" in line]
        assert output.code == 0 and len(reported) == 1, (name, output.err)
        assert reported[0].endswith("does not know are ignored: optim.spin, run.tempo"), name


def test_a_newer_format_is_refused_and_left_as_it_is(tmp_path: Path, text: Path) -> None:
    """It is neither taken for damaged nor passed over for the checkpoint before it."""
    (main,) = run(1, [*COMMAND, f"run.dir={tmp_path}", "run.steps=2", "run.save_interval=1"])
    assert main.code == 0
    folder = tmp_path / "run"
    file = folder / "checkpoints/step_00000002" / commit.COMMIT
    record = json.loads(file.read_bytes()) | {"format": "2.1"}
    file.write_text(json.dumps(record))
    for name, read in readers(text).items():
        output = read(folder)
        assert output.code in (1, 2), name
        (line,) = lines(output)
        assert f"{file} has format 2.1, and this version reads formats up to 1.0" in line, name
    names = sorted(os.listdir(folder / "checkpoints"))
    assert names == ["START.json", "step_00000001", "step_00000002"]
    listed = command(checkpoint.main, "list", folder)
    assert listed.code == 0 and "has format 2.1" in listed.out
    verified = command(checkpoint.main, "verify", file.parent)
    assert verified.code == 1 and "has format 2.1" in verified.err

    del record["format"]  # from before there was one
    record.pop("seal")
    file.write_text(json.dumps(record | {"seal": commit._seal(record)}))
    assert resumed(folder).code == 0
