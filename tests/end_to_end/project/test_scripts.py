"""scripts/train.sh and torchrun as a person starts them: output, signals, codes, lost ranks."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.runs import TINY, records, text, write_corpus
from tests.support.torchrun import Torchrun

ROOT = Path(__file__).resolve().parents[3]
# Neither the session's launcher variables nor its choice of threads.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "WANDB_MODE")}
ENVIRONMENT["PHALANX_PYTHON"] = sys.executable


def kill(process: subprocess.Popen[str]) -> None:
    """End a process and its children."""
    if process.poll() is None:
        for child in (*psutil.Process(process.pid).children(recursive=True), process):
            child.kill()


@contextmanager
def started(*command: str, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A process with pipes that has ended when the context exits."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=ENVIRONMENT | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    guard = threading.Timer(150, kill, [process])
    guard.start()
    try:
        yield process
    finally:
        guard.cancel()
        kill(process)
        process.wait()


def test_an_environment_that_is_none_is_told_in_a_line(tmp_path: Path) -> None:
    given = {"PHALANX_PYTHON": str(tmp_path / "bin/python")}
    with started("bash", "scripts/train.sh", environment=given) as process:
        out, err = process.communicate()
    assert (process.returncode, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(
        f"PHALANX_PYTHON={tmp_path}/bin/python: there is no {tmp_path}/bin/python"
    )


@pytest.mark.dist
def test_train_script_until_a_rank_is_told_to_stop(tmp_path: Path) -> None:
    """Beside another package named `kernels`, as that of Hugging Face."""
    (tmp_path / "site/kernels").mkdir(parents=True)
    (tmp_path / "site/kernels/__init__.py").touch()
    command = [*TINY, "run.steps=1000", "data=synthetic", f"run.dir={tmp_path}"]
    path = {"PYTHONPATH": str(tmp_path / "site")}
    with started("bash", "scripts/train.sh", *command, environment=path) as process:
        seen = ""
        assert process.stdout and process.stderr
        for line in process.stdout:
            seen += line
            if line.strip().startswith("3/1000 "):
                break
        ranks = [
            child
            for child in psutil.Process(process.pid).children(recursive=True)
            if "train.py" in child.cmdline() and child.environ().get("RANK") == "1"
        ]
        assert len(ranks) == 1, seen
        ranks[0].send_signal(signal.SIGTERM)
        out, err = process.communicate()
        assert process.returncode == 0, err
    first, second, third, fourth, *_ = seen.splitlines()
    assert first == "Phalanx: checking command line, data and run folder"
    assert second == "Phalanx: torchrun starts 2 ranks, on the CPU, as there is no GPU"
    assert third.startswith(f"Phalanx: run {tmp_path}/run on 2 ranks; importing torch")
    assert fourth.endswith(": ranks 0-1, no GPU")
    assert "2 CPU processes" in seen and "a signal asked for it" in out
    assert "Traceback" not in err and "OMP_NUM_THREADS" not in err
    folder = tmp_path / "run"
    steps = [r["step"] for r in records(folder)]
    assert steps == list(range(1, len(steps) + 1)) and 3 < len(steps) < 1000
    (saved,) = (folder / "checkpoints").glob("step_*")
    assert saved.name == f"step_{len(steps):08d}" and (saved / "COMMIT.json").exists()
    title, *kept = (folder / "console.log").read_text().splitlines()
    assert "--nproc-per-node 2" in title and f"run.dir={tmp_path}" in title
    assert kept == (seen + out).splitlines()[2:]  # all but the lines of the script


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        (["run.stesp=3", "parallel.expert=3"], "run.stesp: no such knob; did you mean run.steps?"),
        (["data=indexed", "data.blend=[no/text]"], "no/text.bin does not exist; data.blend takes"),
    ],
)
def test_train_script_tells_mistakes_without_the_launcher(
    overrides: list[str], error: str, tmp_path: Path
) -> None:
    command = ["bash", "scripts/train.sh", *overrides, f"run.dir={tmp_path}"]
    finished = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert finished.returncode == 2
    assert finished.stdout == "Phalanx: checking command line, data and run folder\n"
    (line,) = finished.stderr.splitlines()
    assert line.startswith(f"error: {error}") and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--help", "--cfg=job"])
def test_train_script_answers_questions_itself(option: str) -> None:
    command = ["bash", "scripts/train.sh", option]
    finished = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    first = finished.stdout.splitlines()[0]
    assert (
        finished.returncode == 0
        and finished.stderr == ""
        and first.startswith(("usage: ", "# model="))
    )


def test_a_missing_package_is_told_with_the_way_out() -> None:
    bare = [sys.executable, "-S", "train.py"]  # without site-packages
    finished = subprocess.run(bare, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    (line,) = finished.stderr.splitlines()
    assert finished.returncode == 1 and "has no package" in line and "bash scripts/train.sh" in line


@pytest.mark.dist
def test_a_rank_that_fails_alone_is_heard_and_takes_the_others_with_it(tmp_path: Path) -> None:
    bad = [list(p) for p in text()[:12]]
    bad[6][8] = 300  # in one or two of some hundred rows
    prefix = write_corpus(tmp_path / "text", bad)
    data = ["data=indexed", f"data.blend=[{prefix}]", "data.split='1'"]
    folders = [f"data.cache={tmp_path / 'cache'}", f"run.dir={tmp_path / 'runs'}"]
    script = ["train.py", *TINY, *data, *folders, "run.steps=1000"]
    with Torchrun(2, script, tmp_path / "printed") as launch:
        code, out, err = launch.wait(), launch.out(), launch.err()
    assert code == 1
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert "has token id 300" in line and f"{prefix}.bin" in line
    assert err.rstrip().splitlines()[-2].strip() == f"traceback : {line}"  # the launcher's report
    assert err.count("Traceback") == 1 and "Traceback" not in out  # the launcher's own


@pytest.mark.slow
def test_the_default_run_learns(tmp_path: Path) -> None:
    command = ["bash", "scripts/train.sh", f"run.dir={tmp_path}"]
    subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, check=True)
    actual = records(tmp_path / "tiny")
    assert actual[0]["loss"] > 5.4 and actual[-1]["loss"] < 2.6
    assert max(r["load_max"] for r in actual[20:]) < 2.5
    assert (tmp_path / f"tiny/checkpoints/step_{actual[-1]['step']:08d}/COMMIT.json").exists()
