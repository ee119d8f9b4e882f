"""The start of a run is decided at its first launch, however often its command is repeated."""

import dataclasses
import time
from pathlib import Path

import pytest

from phalanx.configs.load import load
from phalanx.configs.schema import RunConfig
from phalanx.configs.validate import ConfigError
from phalanx.parallel.checkpoint import start as run_start
from phalanx.parallel.checkpoint.start import Record, Start, decide
from phalanx.parallel.object_store import Place, Remote


def launch(record: Record, newest: Place | None = None, **knobs: str) -> Start:
    run = RunConfig(name="run", **knobs)  # type: ignore[arg-type]
    return decide(run, record, None if run_start.starts_over(run, record) else newest)


IMPORT = "s3://bucket/imported"
NEWEST = Path("/runs/run/checkpoints/step_00000060")


@pytest.mark.parametrize("resume", ["auto", "never", IMPORT, "checkpoints/of/another"])
@pytest.mark.parametrize("word", ["", "higher-rate"])
def test_a_command_that_is_repeated_starts_once(resume: str, word: str) -> None:
    knobs = {"resume": resume, "start_over": word}
    first = launch(Record(), **knobs)
    at = str(first.path) if first.path is not None else resume
    assert first.over == bool(word) and first.note == "" and at.endswith(resume)
    before = launch(first.record, **knobs)  # killed before there was a checkpoint
    assert (before.path, before.over, before.record) == (first.path, False, first.record)
    again = launch(first.record, NEWEST, **knobs)
    assert (again.path, again.over, again.record) == (NEWEST, False, first.record)
    obeyed = [f"run.start_over={word}"] * bool(word) + [f"run.resume={resume}"] * (resume != "auto")
    assert again.note.startswith(" and ".join(obeyed)) and bool(again.note) == bool(obeyed)


def test_a_run_that_was_imported_starts_there_whoever_launches_it() -> None:
    """A requeue that leaves `run.resume` out, and a start from the same place once more."""
    first = launch(Record(), resume=IMPORT)
    assert launch(first.record).path == Remote(IMPORT)
    over = launch(first.record, NEWEST, start_over="1")
    assert (over.path, over.over) == (Remote(IMPORT), True)
    scratch = launch(first.record, NEWEST, start_over="1", resume="never")
    assert (scratch.path, scratch.over, scratch.record.origin) == (None, True, "scratch")


def test_a_word_acts_once_even_if_others_came_between() -> None:
    record = launch(Record(), start_over="a").record
    record = launch(record, NEWEST, start_over="b").record
    assert not launch(record, NEWEST, start_over="a").over
    assert launch(record, NEWEST, start_over="c").over


def test_another_start_is_refused_with_the_ways_out() -> None:
    record = launch(Record(), resume=IMPORT).record
    for resume in ("never", "s3://bucket/other"):
        with pytest.raises(ConfigError) as told:
            launch(record, NEWEST, resume=resume)
        line = str(told.value)
        assert f"run.resume={resume}: runs/run has started from {IMPORT}" in line
        word = next(w for w in line.split() if w.startswith("run.start_over="))
        cfg = load([word, f"run.resume={resume}", "run.name=run"])
        assert decide(cfg.run, record, NEWEST).over
        cfg = load(["run.resume=auto", "run.name=run"])
        assert decide(cfg.run, record, NEWEST).path == NEWEST
    with pytest.raises(ConfigError, match="has started from scratch"):
        launch(launch(Record()).record, NEWEST, resume=IMPORT)


def test_an_own_checkpoint_is_a_start_while_it_is_the_newest() -> None:
    """The command goes on from later ones when it is repeated; an older one needs the word."""
    record = launch(Record()).record
    named = launch(record, NEWEST, resume=str(NEWEST))
    assert (named.path, named.note) == (NEWEST, "")
    later = NEWEST.with_name("step_00000080")
    assert launch(named.record, later, resume=str(NEWEST)).path == later
    with pytest.raises(ConfigError, match="run.start_over="):
        launch(record, later, resume=str(NEWEST))
    back = launch(record, later, resume=str(NEWEST), start_over="1")
    assert (back.path, back.over) == (NEWEST, True)


def test_a_run_without_a_record_goes_on() -> None:
    """It was begun before there were any, and may be in the middle of its restarts."""
    begin = launch(Record(), NEWEST, resume="never")
    assert begin.path == NEWEST and begin.note and begin.record == Record()


def test_a_start_is_the_same_from_every_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    record = launch(Record(), resume="imported").record
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert launch(record, NEWEST, resume="../imported").path == NEWEST
    assert launch(record).path == tmp_path / "imported"


@pytest.mark.parametrize("store", [False, True])
def test_the_record_is_kept_beside_the_checkpoints(tmp_path: Path, store: bool) -> None:
    root: Place = Remote("memory://starts/run") if store else tmp_path
    assert run_start.read(root) == Record()
    for record in (Record("scratch"), Record(IMPORT, ("never", IMPORT), ("a", "b"))):
        run_start.write(root, record)
        assert run_start.read(root) == record
    assert store or [path.name for path in tmp_path.iterdir()] == [run_start.NAME]


@pytest.mark.parametrize("text", ["", "[]", '{"origin": 1, "asked": [], "words": []}', "\0"])
def test_a_damaged_record_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / run_start.NAME).write_text(text)
    with pytest.raises(OSError, match=f"{run_start.NAME} is damaged: delete it") as told:
        run_start.read(tmp_path)
    assert "\n" not in str(told.value)


def test_advice_names_a_new_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "strftime", lambda form: "20260102-030405")
    assert run_start.start_over_override() == "run.start_over=20260102-030405"
    record = dataclasses.replace(Record("scratch"), words=("20260102-030404",))
    assert run_start.starts_over(load([run_start.start_over_override()]).run, record)
