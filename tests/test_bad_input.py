"""Bad input ends with one clear line, a non-zero exit code, and nothing half-written.

Mistakes of the command line are found by a real `train.py` in a moment; those that need data,
kernels or checkpoints by a run of one rank.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.runs import SMALL, run, text, write_corpus

ROOT = Path(__file__).resolve().parent.parent
TINY = [*SMALL, "model=tiny", "model.attention.head_dim=8", "run.steps=2"]


# --- the command line -----------------------------------------------------------------------------


def train_py(*args: str, ranks: int = 2, rank: int = 0) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"WORLD_SIZE": str(ranks), "RANK": str(rank)}
    command = [sys.executable, "train.py", *args]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "model=tiny_gpt",
            "error: model=tiny_gpt: no such option; did you mean model=tiny_gpt_oss",
        ),
        ("run.stesp=3", "error: run.stesp: no such knob; did you mean run.steps?"),
        ("run.steps=many", "error: run.steps=many: expected an integer, as in run.steps=100"),
        ("parallel.tensor=3", "error: parallel.tensor=3 does not divide"),
        ("parallel.expert=4", "error: parallel.expert=4 must divide model.moe.experts=8 and the 2"),
        ("data.global_batch=7", "error: data.global_batch=7 is no multiple of micro_batch="),
        ("kernels.backend=fast", "error: kernels.backend=fast is not one of auto, reference"),
    ],
)
@pytest.mark.parametrize("options", [[], ["--check"]])
def test_command_line(override: str, line: str, options: list[str], tmp_path: Path) -> None:
    done = train_py(*options, override, f"run.dir={tmp_path / 'runs'}")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(line) and len(done.stderr.splitlines()) == 1
    assert "set " in done.stderr or "did you mean" in done.stderr or "as in" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_all_mistakes_are_told_by_one_rank() -> None:
    mistakes = ["run.keep=0", "optim.lr=0", "parallel.pipeline=3"]
    lines = train_py(*mistakes).stderr.splitlines()
    assert [line.split("=")[0] for line in sorted(lines)] == [
        "error: optim.lr",
        "error: parallel.pipeline",
        "error: run.keep",
    ]
    other = train_py(*mistakes, rank=1)
    assert (other.returncode, other.stderr, other.stdout) == (2, "", "")


@pytest.mark.parametrize("args", [[], ["run.steps=7"], ["--help"], ["--cfg", "job"]])
def test_a_check_of_what_is_right_is_silent(args: list[str]) -> None:
    done = train_py("--check", *args)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# --- what only the machine knows ------------------------------------------------------------------


def refused(folder: Path, *overrides: str, code: int = 2) -> list[str]:
    """Lines of the error of a run that must fail; nothing of the run is left."""
    before = sorted(folder.rglob("*"))
    command = [*TINY, f"data.cache={folder / 'cache'}", *overrides]
    if not any(o.startswith("run.dir=") for o in overrides):
        command.append(f"run.dir={folder / 'runs'}")
    (main,) = run(1, command)
    assert main.code == code and main.out == ""
    left = [p for p in sorted(folder.rglob("*")) if folder / "cache" not in (p, *p.parents)]
    assert left == before
    assert main.err.startswith("error: ") and "Traceback" not in main.err
    return main.err.splitlines()


@pytest.fixture
def data(tmp_path: Path) -> list[str]:
    write_corpus(tmp_path / "text", [list(p) for p in text()])
    return ["data=indexed", f"data.blend=[{tmp_path / 'text'}]"]


def cut(path: Path, size: int) -> None:
    os.truncate(path, path.stat().st_size - size)


@pytest.mark.parametrize(
    ("damage", "file", "reason"),
    [
        (Path.unlink, "text.bin", "does not exist"),
        (Path.unlink, "text.idx", "does not exist"),
        (lambda path: cut(path, 2), "text.bin", "is truncated"),
        (lambda path: cut(path, 100), "text.idx", "is truncated"),
    ],
)
def test_missing_and_truncated_files(
    tmp_path: Path, data: list[str], damage: Callable[[Path], None], file: str, reason: str
) -> None:
    damage(tmp_path / file)
    (line,) = refused(tmp_path, *data)
    assert f"{tmp_path / file} {reason}" in line


def test_sequence_longer_than_the_data(tmp_path: Path, data: list[str]) -> None:
    (line,) = refused(tmp_path, *data, "data.sequence_length=100000")
    assert "data.sequence_length=100000 is longer than the data" in line
    assert f"{tmp_path / 'text'}.bin" in line


def test_kernels_that_cannot_run_here(tmp_path: Path) -> None:
    (line,) = refused(tmp_path, "kernels.attention=flex", "data=synthetic")
    assert "kernels.attention=flex cannot run here: needs CUDA; use kernels.attention=" in line
    (line,) = refused(tmp_path, "kernels=fused", "run.device=auto", "data=synthetic")
    assert "kernels.backend=fused cannot run here" in line and "use kernels=torch" in line


def test_no_gpu(tmp_path: Path) -> None:
    (line,) = refused(tmp_path, "run.device=cuda", "data=synthetic")
    assert line == "error: run.device=cuda: torch sees no GPU here; set run.device=auto"


def test_run_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (line,) = refused(tmp_path, f"run.dir={tmp_path / 'file/runs'}", "data=synthetic")
    assert f"cannot write to {tmp_path / 'file/runs'}" in line and "run.dir" in line


def test_no_such_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "step_00000009"
    resume = [f"run.resume={path}", f"run.dir={tmp_path / 'runs'}", "data=synthetic"]
    (main,) = run(1, [*TINY, *resume])
    assert main.code == 44 and main.out == ""
    assert main.err.startswith(f"error: run.resume={path} is no valid checkpoint")
    assert len(main.err.splitlines()) == 1


def test_token_beyond_the_vocabulary(tmp_path: Path) -> None:
    """Found when it is read: the file says nothing of the ids in it."""
    write_corpus(tmp_path / "text", [[7] * 40, [7, 300] * 20, [7] * 40])
    data = ["data=indexed", f"data.blend=[{tmp_path / 'text'}]", "data.split='1'"]
    cache = f"data.cache={tmp_path / 'cache'}"
    (main,) = run(1, [*TINY, *data, cache, f"run.dir={tmp_path / 'runs'}"])
    assert main.code == 2
    (line,) = main.err.splitlines()
    assert f"{tmp_path / 'text'}.bin, has token id 300, but model.vocab_size=256" in line
    assert list((tmp_path / "runs/run/checkpoints").iterdir()) == []


def test_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    command = [*TINY, f"run.dir={tmp_path}", "data=synthetic"]
    assert run(1, command)[0].code == 0
    files = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    (main,) = run(1, [*command, "run.steps=4", "model.moe.ffn=24", "model.moe.top_k=1"])
    assert main.code == 2 and main.out == ""
    assert main.err.splitlines() == [
        "error: this run is not configured as its checkpoint:",
        "                   checkpoint  now",
        "  model.moe.top_k  2           1",
        "  model.moe.ffn    16          24",
        "go on with model.moe.top_k=2 model.moe.ffn=16,",
        "or start anew with another run.name or with run.resume=never",
    ]
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == files
