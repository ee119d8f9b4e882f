"""One run of a comparison: command, process and figures."""

import contextlib
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from phalanx.moe.report.loggers import read
from phalanx.moe.report.metrics import steady
from phalanx.scripts.lab import timeline

TRAIN = Path(__file__).resolve().parents[3] / "train.py"
COUNTED = 10  # steps at the end of a run that are counted
_CAPTURED = 3  # steps that a graph needs before it is replayed
_PROFILE = "run.profile"
GRACE = 45.0  # seconds between SIGTERM and SIGKILL: torchrun kills its ranks after 30
POLL = 1.0


@dataclass(frozen=True)
class Launch:
    """Options that all runs of a comparison are started with."""

    nproc: int  # ranks per node
    steps: int
    device: str = "auto"
    nnodes: int = 1
    endpoint: str = "localhost:0"  # rendezvous endpoint of torchrun's agents, host:port
    launcher: str = ""  # command that contains `{command}`, or empty
    traced: bool = False  # for the share of exposed communication

    @property
    def ranks(self) -> int:
        return self.nproc * self.nnodes

    def overrides(self, point_overrides: Sequence[str], folder: Path) -> list[str]:
        runs_folder = str(folder.parent)
        runs_folder = runs_folder if re.fullmatch(r"[\w./-]+", runs_folder) else f"'{runs_folder}'"
        own_words = ["run=bench", f"run.steps={self.steps}", "run.log_interval=1"]
        own_words += [f"run.device={self.device}"] if self.device != "auto" else []
        step = window(self.steps)[0] - 2  # the trace is written during the next one
        if (
            self.traced
            and step > _CAPTURED
            and not any(_PROFILE in word for word in point_overrides)
        ):
            own_words.append(f"{_PROFILE}=[{step},{step}]")
        return [*point_overrides, *own_words, f"run.dir={runs_folder}", f"run.name={folder.name}"]

    def command(self, point_overrides: Sequence[str], folder: Path) -> list[str]:
        words = [sys.executable, "-m", "torch.distributed.run"]
        if self.nnodes > 1:
            words += ["--nnodes", str(self.nnodes), "--rdzv-id", folder.name]
        words += ["--nproc-per-node", str(self.nproc)]
        words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", self.endpoint]
        words += [os.path.relpath(TRAIN), *self.overrides(point_overrides, folder)]
        if not self.launcher:
            return words
        out: list[str] = []
        for word in shlex.split(self.launcher):
            text = word.replace("{command}", shlex.join(words))
            out += words if word == "{command}" else [text]
        return out


def window(steps: int) -> range:
    """Counted steps: the last ten, or the second half of a run of less than twenty."""
    return range(max(steps - COUNTED, steps // 2) + 1, steps + 1)


def run(
    command: Sequence[str],
    folder: Path,
    *,
    steps: int,
    timeout: float,
    lock: int,
    seen: Callable[[int], None],
) -> tuple[dict[str, float], str]:
    """Start `command`, wait for it and read its results. The process has ended before this raises.

    Args:
        command: creates the run folder `folder`; its output goes to `folder` with suffix .log.
        timeout: seconds after which the run is ended.
        lock: file descriptor that the process inherits and keeps open.
        seen: called with the newest step about once a second.

    Returns:
        Figures of the run (see `figures`) and an empty string, or no figures and the reason.
    """
    metrics, log = folder / "metrics.jsonl", folder.with_suffix(".log")
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=[lock],
            start_new_session=True,  # Ctrl-C reaches the sweep alone, which then ends the run
        )
        try:
            code = _wait(process, timeout, lambda: seen(reached(metrics)))
        except KeyboardInterrupt:
            print("\nending the run in progress", file=sys.stderr)
            raise
        finally:
            _end(process)
    if code is not None and code == 0:
        try:
            return figures(metrics, steps) | traced(folder), ""
        except ValueError as error:
            return {}, str(error)
    problem = f"not done after {timeout:.0f} s (--timeout)" if code is None else ""
    problem = problem or reason(log.read_text(encoding="utf-8", errors="replace"), code or 0)
    step = reached(metrics)
    return {}, problem + (f"; after step {step}" if step else "") + f"; see {log.name}"


def figures(path: Path, steps: int) -> dict[str, float]:
    """Means over `window(steps)` of a metrics.jsonl, by `moe.report.metrics.steady`.

    memory is the peak of the run in GiB, loss that of the last step in nats, reruns those within
    the window. Raises ValueError if a step is missing, or the loss is not finite.
    """
    records = _steps(path)
    by_step = {record["step"]: record for record in records}
    averaged = window(steps)
    if any(step not in by_step for step in averaged):
        raise ValueError(f"ended after step {reached(path)} of {steps}")
    last = [by_step[step] for step in averaged]
    if last[-1]["loss"] is None:
        raise ValueError(f"loss is not finite at step {steps}")
    totals = steady(last)
    del totals["records"]
    totals["memory"] = max(record["memory"] for record in records)
    before = by_step.get(averaged[0] - 1, {}).get("reruns", 0)
    totals["reruns"] = last[-1].get("reruns", 0) - before
    return totals


def traced(folder: Path) -> dict[str, float]:
    """exposed_communication, a share of the step, if the run wrote a GPU trace."""
    for path in folder.glob("trace_*.json.gz"):
        with contextlib.suppress(ValueError, KeyError, OSError):
            trace = timeline.read(path)
            if trace.on_gpu:
                return {"exposed_communication": timeline.exposed(trace.events)}
    return {}


def reached(path: Path) -> int:
    """Newest step of a metrics.jsonl; 0 without one."""
    return max((record["step"] for record in _steps(path)), default=0)


_FOLLOWS = "the other ranks are gone"
# Optional prefix: `[rank3]: ` of torch, `12: ` of srun --label.
_ERROR = re.compile(r"^(?:\S+:\s+)?error: (.+)$", re.MULTILINE)
_RAISED = re.compile(
    r"^(?:\S+:\s+)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*)$", re.MULTILINE
)
_CODE = re.compile(r"^\s*exitcode\s*:\s*(-?\d+)", re.MULTILINE)


def reason(log: str, code: int) -> str:
    """Why a run failed, as one line, from its output and the launcher's exit code.

    Our own lines, `error: ...`, come first; then exceptions, but the launcher's.
    """
    errors = [text for text in _ERROR.findall(log) if _FOLLOWS not in text]
    raised = [text for text in _RAISED.findall(log) if "ChildFailedError" not in text]
    for text in (*errors, *raised):
        if "out of memory" in text.lower():
            return _short(text)
    if errors or raised:
        return _short((errors or raised)[0])
    ranks = [int(text) for text in _CODE.findall(log)]
    code = ranks[0] if ranks else code
    culprit = "a rank" if ranks else "the launcher"
    return f"{culprit} was killed by signal {-code}" if code < 0 else f"{culprit} ended with {code}"


def _short(text: str, width: int = 200) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 3] + "..."


def _steps(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [record for record in read(path) if "step_time" in record]


def _wait(process: subprocess.Popen[bytes], timeout: float, tick: Callable[[], None]) -> int | None:
    """Exit code, or None if the process still runs after `timeout` seconds."""
    until = time.monotonic() + timeout
    while (left := until - time.monotonic()) > 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(min(POLL, left))
        tick()
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Terminate a process that still runs; kill it and its children after a grace period."""
    if process.poll() is not None:
        return
    tree = [psutil.Process(process.pid)]
    with contextlib.suppress(psutil.NoSuchProcess):
        tree += tree[0].children(recursive=True)
    try:
        process.terminate()
        _await_end(tree, GRACE)
    finally:
        for one in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        _await_end(tree, GRACE)  # the next run must not share the machine with them
        process.wait()


def _await_end(tree: Sequence[psutil.Process], seconds: float) -> None:
    until = time.monotonic() + seconds
    while any(map(_alive, tree)) and time.monotonic() < until:
        time.sleep(0.05)


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
