"""Errors found before a launch, by one process and without torch.

See test_bad_input for damaged files.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from phalanx.configs.load import load
from phalanx.configs.schema import Config
from phalanx.moe.run.preflight import exit_code, preflight
from phalanx.parallel import folder_lock
from phalanx.parallel.checkpoint import start as run_start
from phalanx.parallel.checkpoint.saved_config import NoUsableCheckpoint
from phalanx.parallel.object_store import Remote
from phalanx.scripts import checkpoint
from tests.parallel.surroundings import full_disk
from tests.parallel.test_folder_lock import leave, living
from tests.support import s3
from tests.support.advice import advised, tried
from tests.support.runs import SMALL, write_checkpoint, write_corpus

ROOT = Path(__file__).resolve().parents[3]
TOKENS = 1_000_000


@pytest.fixture(autouse=True)
def known_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.moe.run.preflight.embedded_tokens", lambda: TOKENS)
    disk_of(1 << 50, monkeypatch)


def disk_of(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk with so many bytes free, whatever this machine has."""
    monkeypatch.setattr("phalanx.parallel.disk_space.free_bytes", lambda folder: free)


def config(folder: Path, *overrides: str) -> Config:
    return load([f"run.dir={folder / 'runs'}", *overrides])


def errors(cfg: Config) -> list[str]:
    found = preflight(cfg)
    assert found.notes == []
    return [str(error) for error in found.errors]


# --- how long a run reads what ----------------------------------------------------------------

STEP = ["data.sequence_length=100", "data.micro_batch=1", "data.global_batch=100"]  # 10,000 tokens


@pytest.mark.parametrize(
    ("steps", "save_interval", "epochs"),
    [(400, 500, 0), (401, 0, 4.0), (99000, 0, 990), (1000, 500, 10)],
)
def test_more_than_a_few_epochs_are_told(
    tmp_path: Path, steps: int, save_interval: int, epochs: float
) -> None:
    run = [f"run.steps={steps}", f"run.save_interval={save_interval}"]
    found = preflight(config(tmp_path, *STEP, *run))
    told = f"data: embedded corpus of 1.0 M tokens, the run reads {steps / 100:.1f} M"
    assert found.errors == []
    assert found.notes == ([f"{told} = {epochs:,.1f} epochs"] if epochs else [])


@pytest.mark.parametrize(
    ("source", "held", "steps", "saves"),
    [
        ("embedded", "a test corpus of 1.0 M tokens", 1000, "run=pretrain"),
        ("synthetic", "random tokens", 25000, "run.save_interval=7"),
    ],
)
def test_a_long_run_on_test_data_is_refused_with_what_to_set(
    source: str, held: str, steps: int, saves: str, tmp_path: Path
) -> None:
    given = [*STEP, f"run.dir={tmp_path}", f"data={source}", saves, "run.steps=99999"]
    (line,) = errors(load(given))
    assert line.startswith(f"data.source={source} is {held}, and this run of 99999 steps with ")
    corpus = write_corpus(tmp_path / "text", [[1] * 100] * 400)
    corpora, *others = advised(line.replace("<prefix>", str(corpus)))
    assert corpora == ["data=indexed", f"data.blend=[{corpus}]"]
    assert others == [["run=bench", "run.save_interval=-1"], [f"run.steps={steps}"]]
    for advice in (corpora, *others):
        assert preflight(tried(given, advice)).errors == []


@pytest.mark.parametrize("name", ["gpt_oss_20b_8gpu", "qwen3_30b_8gpu", "moonlight_8gpu"])
def test_experiments_want_data_unless_they_are_benchmarks(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.moe.run.preflight.embedded_tokens", lambda: 11_500_000)
    (line,) = errors(config(tmp_path, f"experiment={name}"))
    assert "name a corpus with data=indexed" in line
    assert preflight(config(tmp_path, f"experiment={name}", "run=bench")).errors == []


def test_epochs_of_each_source_are_told(tmp_path: Path) -> None:
    few = write_corpus(tmp_path / "few", [[1] * 100] * 10)
    many = write_corpus(tmp_path / "many", [[1] * 100] * 400)
    data = ["data=indexed", f"data.blend=[0.5,{few},0.5,{many}]", "data.split='1'", *STEP]
    found = preflight(config(tmp_path, *data, "run.steps=2", "run.save_interval=1"))
    assert found.errors == []
    assert found.notes == [f"data: {few} of 1.0 k tokens, the run reads 10.0 k = 10.0 epochs"]


def test_epochs_are_those_of_the_stages(tmp_path: Path) -> None:
    """Ten thousand tokens: 2,500 of the first source up to the stage, and none of it after."""
    paths = [write_corpus(tmp_path / name, [[1] * 100] * 10) for name in "ab"]
    blend = ["data=indexed", f"data.blend=[1,{paths[0]},1,{paths[1]}]", "data.split='1'"]
    cfg = config(tmp_path, *STEP, *blend, "run.steps=1", "data.stages=[5e3:0/1,10e3:1/1]")
    assert preflight(cfg).notes == [
        "data: the stage from 10.0 k tokens on does not begin, as the run reads 10.0 k",
        f"data: {paths[1]} of 1.0 k tokens, the run reads 7.5 k = 7.5 epochs",
    ]


def test_an_impossible_size_is_told(tmp_path: Path) -> None:
    (note,) = preflight(config(tmp_path, "model.vocab_size=1000000000")).notes
    expected = "model.vocab_size=1000000000: lower it, published models have at most 1,000,000"
    assert note == expected


# --- folders ----------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [0, 4096])
def test_a_full_disk_is_told(tmp_path: Path, left: int) -> None:
    """A name, or a few bytes, may fit where nothing else does."""
    with full_disk(left):
        (line,) = errors(config(tmp_path))
    assert line.startswith(f"cannot write to {tmp_path / 'runs/tiny'} (run.dir, run.name): ")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_a_run_uses_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "runs/tiny"
    folder.mkdir(parents=True)
    with living() as owner:
        leave(folder / folder_lock.NAME, owner)
        (line,) = errors(config(tmp_path))
        assert line.startswith(f"{folder} is in use by a run that lives (host ")
        assert errors(config(tmp_path, "run.name=other")) == []
    assert errors(config(tmp_path)) == []
    assert [path.name for path in folder.iterdir()] == [folder_lock.NAME]


def test_a_store_is_written_to_and_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = "run.checkpoints=memory://check/runs"
    assert errors(config(tmp_path, store)) == []
    assert Remote("memory://check").objects() == {} and list(tmp_path.iterdir()) == []

    def denied(*args: Any) -> None:
        raise PermissionError("Access Denied")

    with monkeypatch.context() as patch:
        patch.setattr("fsspec.implementations.memory.MemoryFileSystem.pipe_file", denied)
        for more in ([], ["run.resume=never"], ["run.start_over=1"]):
            (line,) = errors(config(tmp_path, store, *more))
            assert line.startswith("cannot write to memory://check/runs/tiny (run.checkpoints): ")
            assert line.endswith(": Access Denied")
    with s3.credentials(s3.endpoint()):
        (line,) = errors(config(tmp_path, "run.checkpoints=s3://no-such-bucket/runs"))
        assert "(run.checkpoints)" in line and line.endswith("the bucket does not exist")
        assert errors(config(tmp_path, f"run.checkpoints=s3://{s3.BUCKET}/check")) == []
        assert Remote(f"s3://{s3.BUCKET}/check").objects() == {}


def test_a_bucket_that_is_missing_is_not_an_empty_one(capsys: pytest.CaptureFixture[str]) -> None:
    with s3.credentials(s3.endpoint()):
        for what in (Remote.objects, Remote.is_dir, Remote.exists):
            assert not what(Remote(f"s3://{s3.BUCKET}/nothing"))
            for address in ("s3://no-such-bucket", "s3://no-such-bucket/runs"):
                with pytest.raises(OSError, match="the bucket does not exist"):
                    what(Remote(address))
        assert checkpoint.main(["list", "s3://no-such-bucket/runs"]) == 1
    assert capsys.readouterr().err.endswith("the bucket does not exist\n")


def test_a_routing_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, why in ((tmp_path / "file" / "x.pt", "Not a directory"), (tmp_path, "a folder")):
        (line,) = errors(config(tmp_path, f"run.record_routing={path}"))
        assert line.startswith(f"cannot write to run.record_routing={path}: ") and why in line
    assert errors(config(tmp_path, f"run.record_routing={tmp_path / 'new' / 'x.pt'}")) == []
    assert not (tmp_path / "new").exists()


def test_nothing_is_made_to_find_out_whether_it_could_be(tmp_path: Path) -> None:
    assert errors(config(tmp_path)) == [] and list(tmp_path.iterdir()) == []


def test_all_that_is_wrong_is_told(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    data = ["data=indexed", "data.blend=[nowhere/text]", f"run.resume={tmp_path / 'none'}"]
    first, second, third = errors(config(tmp_path, *data))
    assert first.startswith("nowhere/text.bin does not exist")
    assert second.startswith(f"cannot write to {tmp_path / 'runs'}/tiny (run.dir, run.name): ")
    assert third.endswith("no such folder; run.resume takes auto, never or a checkpoint folder")


def test_an_unreadable_checkpoint_folder_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> list[Path]:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("phalanx.parallel.checkpoint.commit.committed", refuse)
    (line,) = errors(config(tmp_path))
    where = tmp_path / "runs/tiny/checkpoints"
    assert line == f"cannot read {where} (run.dir, run.resume): Permission denied"


# --- where a run starts -----------------------------------------------------------------------


def test_a_repeated_command_is_told_that_it_goes_on(tmp_path: Path) -> None:
    root = tmp_path / "runs/tiny/checkpoints"
    write_checkpoint(root / "step_00000005")
    run_start.write(root, run_start.Record("scratch", ("scratch",), ("a",)))
    found = preflight(config(tmp_path, "run.resume=never"))
    assert found.errors == [] and len(found.notes) == 1
    assert found.notes[0].startswith("run.resume=never: an earlier launch has started this run")
    assert errors(config(tmp_path)) == []
    (line,) = errors(config(tmp_path, "run.resume=elsewhere"))
    assert "has started from scratch and has checkpoints" in line and f"from {root}/step" in line


def test_a_start_that_was_obeyed_need_not_be_there_any_more(tmp_path: Path) -> None:
    """Weights may be deleted once the run has a checkpoint of its own."""
    root, weights = tmp_path / "runs/tiny/checkpoints", f"run.resume={tmp_path / 'weights'}"
    (line,) = errors(config(tmp_path, weights))
    assert f"{weights} is no valid checkpoint" in line
    write_checkpoint(root / "step_00000005")
    run_start.write(root, run_start.Record(str(tmp_path / "weights")))
    assert preflight(config(tmp_path, weights)).errors == []
    (line,) = errors(config(tmp_path, "run.start_over=1"))
    assert f"{weights} is no valid checkpoint" in line


def test_checkpoints_are_not_left_in_another_place_without_a_word(tmp_path: Path) -> None:
    store = Remote("memory://moved/runs")
    folder = tmp_path / "runs/tiny"
    write_checkpoint(store / "tiny" / "step_00000005.00000000aaaaaaaa")
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"run: {{checkpoints: '{store}', name: tiny}}")
    assert errors(config(tmp_path, f"run.checkpoints={store}")) == []
    for other in ((), ("run.resume=never",), ("run.checkpoints=memory://moved/others",)):
        (line,) = errors(config(tmp_path, *other))
        assert line.startswith(f"the checkpoints of {folder} are in {store}/tiny: set ")
        (fix, word) = (w.rstrip(",") for w in line.split() if w.startswith("run."))
        assert preflight(config(tmp_path, *other, fix)).errors == []
        assert errors(config(tmp_path, *other, word)) == []
    write_checkpoint(folder / "checkpoints/step_00000005")
    (folder / "config.yaml").write_text("run: {checkpoints: '', name: tiny}")
    (line,) = errors(config(tmp_path, "run.checkpoints=memory://moved/others"))
    (fix, _) = (w for w in line.split() if w.startswith("run."))
    assert errors(config(tmp_path, "run.checkpoints=memory://moved/others", fix)) == []


def test_exit_codes_are_those_of_a_run() -> None:
    assert exit_code(NoUsableCheckpoint("none")) == 44 and exit_code(ValueError("x")) == 2


def test_a_check_imports_neither_torch_nor_megatron_core(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "text", [[1] * 100] * 10)
    data = ["data=indexed", f"data.blend=[{prefix}]", f"run.dir={tmp_path / 'runs'}"]
    program = (
        "import sys, train\n"
        f"code = train.main({[*SMALL, *data, '--check']!r})\n"
        "print(code, [name for name in ('torch', 'megatron') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "0 []\n", done.stderr


@pytest.mark.extras
def test_what_needs_a_library_that_is_not_here_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (line,) = errors(config(tmp_path, "optim=muon"))
    assert "needs emerging-optimizers" in line
    assert errors(tried([f"run.dir={tmp_path}", "optim=muon"], *advised(line))) == []
    stock = ["kernels=megatron", "run.recompute=[norm,moe_act]"]
    (line,) = errors(config(tmp_path, *stock))
    assert "moe_act needs Transformer Engine" in line
    assert errors(tried([f"run.dir={tmp_path}", *stock], *advised(line))) == []
    assert errors(config(tmp_path, "optim=adamw")) == []


# --- room for checkpoints -----------------------------------------------------------------------

SAVES = ["model=tiny", "precision=bf16", "run.steps=100", "run.save_interval=10"]
ONE = 14 * 3_413_120
"""Bytes of a checkpoint of `tiny`: bf16 weights, fp32 master weights and two moments."""


def saved(folder: Path, *steps: int, suffix: str = "") -> None:
    """Checkpoints of a run as large as those of `tiny`; nothing else is right about them."""
    for step in steps:
        path = folder / f"runs/tiny/checkpoints/step_{step:08d}{suffix}"
        path.mkdir(parents=True)
        with (path / "__0_0.distcp").open("wb") as file:
            file.truncate(ONE)


def room_of(folder: Path, *overrides: str) -> tuple[list[str], list[str]]:
    """(errors, notes) on the disk."""
    found = preflight(config(folder, *SAVES, *overrides))
    errors, notes = [str(e) for e in found.errors], found.notes
    return [e for e in errors if "disk" in e], [n for n in notes if "disk" in n]


def test_a_disk_without_room_for_a_checkpoint_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_of(ONE - 1, monkeypatch)
    (error,) = preflight(config(tmp_path, *SAVES)).errors
    assert exit_code(error) == 2
    assert str(error) == (
        f"a checkpoint of this run takes 45.6 MiB, and the disk of {tmp_path}/runs/tiny/checkpoints"
        " (run.dir) has 45.6 MiB free: free space, set run.dir to a larger disk, or "
        "run.save_interval=-1 to save none"
    )
    assert room_of(tmp_path, "run.save_interval=-1") == ([], [])
    disk_of(ONE, monkeypatch)
    assert room_of(tmp_path, "run.save_interval=0") == ([], [])  # the last step's only


@pytest.mark.parametrize(
    ("free", "given", "advice"),
    [
        (3, [], None),
        (2.9, [], "run.keep_last=1 or run.dir"),
        (1.9, [], "run.dir"),
        (5.9, ["run.keep_last=5"], "run.keep_last=4 or run.dir"),
        (6, ["run.keep_last=5"], None),
        (2, ["run.keep_last=5", "run.steps=20"], None),  # saves two
    ],
)
def test_a_disk_with_little_room_is_told_with_what_to_set(
    free: float,
    given: list[str],
    advice: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk_of(int(free * ONE), monkeypatch)
    errors, notes = room_of(tmp_path, *given)
    assert errors == [] and len(notes) == (advice is not None)
    if advice is not None:
        assert notes[0].startswith("warning: ") and "\n" not in notes[0]
        assert notes[0].endswith(f"free: free space, or set {advice} to a larger disk")
        assert "checkpoints of 45.6 MiB are there at once with run.keep_last=" in notes[0]


@pytest.mark.parametrize(
    ("steps", "suffix", "free", "told"),
    [
        ((10, 20), "", 1, 0),  # the third is the last that comes without one that goes
        ((20,), "", 2, 0),
        ((20,), "", 1.9, 1),
        ((10, 20), ".old", 1, 0),
        ((10, 20, 30), ".tmp", 0, 0),  # deleted before the first save
        ((10, 20), ".bad", 2.9, 1),  # which stay
    ],
)
def test_checkpoints_that_a_resumed_run_replaces_are_room(
    steps: tuple[int, ...],
    suffix: str,
    free: float,
    told: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saved(tmp_path, *steps, suffix=suffix)
    disk_of(int(free * ONE), monkeypatch)
    errors, notes = room_of(tmp_path)
    assert errors == [] and len(notes) == told
