"""Loggers besides the console: metrics.jsonl, Weights & Biases, TensorBoard.

metrics.jsonl is always written and survives kills and resumes. The other two are imported only when
their knob asks for them. None of the three can stop training: the first failure is reported once.
"""

import contextlib
import json
import math
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from phalanx.configs.redact import redacted
from phalanx.configs.schema import Config

Log = Callable[[dict[str, Any]], None]


def read(path: Path) -> list[dict[str, Any]]:
    """Records of a metrics.jsonl by step, each step once (with its validation loss, if it has one).

    Lines without a step (events, the summary) and half-written lines are left out.
    """
    steps: dict[int, dict[str, Any]] = {}
    for _, record in _lines(path):
        if record is not None and "step" in record:
            steps.setdefault(record["step"], {}).update(record)
    return [steps[step] for step in sorted(steps)]


def lines(path: Path) -> list[dict[str, Any]]:
    """All lines of a metrics.jsonl that are complete; empty without the file."""
    return [record for _, record in _lines(path) if record is not None] if path.exists() else []


def is_finite(value: Any) -> bool:
    """True for a value that is a number; metrics.jsonl has null for NaN and infinity."""
    return isinstance(value, int | float) and math.isfinite(value)


def start_facts(path: Path) -> dict[str, Any]:
    """Facts of `moe.report.title` in a metrics.jsonl; empty if it has none.

    A resumed run has those of its last start.
    """
    facts: dict[str, Any] = {}
    for _, record in _lines(path):
        if record is not None and record.get("event") == "start":
            facts = {k: v for k, v in record.items() if k not in ("event", "at", "time", "seconds")}
    return facts


_GROUPS = {
    "valid": ("valid_",),
    "moe": ("balance/", "load_", "dead_experts", "reruns", "capacity_factor"),
    "perf": (
        "tokens_per_second",
        "tflops",
        "mfu",
        "step_time",
        "data_time",
        "memory",
        "eager_steps",
        "goodput",
    ),
}
"""Group of a number in a tracking service -> prefixes of its name; all others are of training."""


def tag(name: str) -> str:
    """A number's name in a tracking service: `train/loss`, `valid/loss/wiki`, `moe/load_max`.

    Args:
        name: in metrics.jsonl.
    """
    for group, starts in _GROUPS.items():
        if name.startswith(starts):
            return f"{group}/{name.removeprefix('valid_').removeprefix('balance/')}"
    return f"train/{name}"


class Journal:
    """metrics.jsonl: one JSON object per line, on disk when `write` returns.

    Lines after the step that a run resumes from move to metrics.superseded.jsonl, so that a reader
    sees each step once. NaN and infinity are null, and named under `nonfinite`.

    Args:
        path: of the file.
        step: step that the run resumes from; 0 for a new run.
        warn: called once if the file can no longer be written.

    Raises:
        OSError: it cannot be written from the start.
    """

    def __init__(self, path: Path, step: int, warn: Callable[[str], None]) -> None:
        self._path, self._warn, self._torn = path, warn, False
        self._failed = False
        self.lost = 0
        """Number of records that could not be written."""
        self._file: TextIO | None = None
        self._open(step)

    def _open(self, step: int) -> None:
        _drop_after(self._path, step)
        self._file = self._path.open("a", encoding="utf-8")

    def rewind(self, step: int) -> None:
        """Move records after `step`, to which the run returns, to the superseded ones."""
        try:
            self.close()
            self._open(step)
        except OSError as error:
            self._lose(error)

    def write(self, record: dict[str, Any]) -> None:
        """Append a record. A full disk costs the record, not the run."""
        odd = {
            k: str(v) for k, v in record.items() if isinstance(v, float) and not math.isfinite(v)
        }
        record = {k: None if k in odd else v for k, v in record.items()}
        record |= {"nonfinite": odd} if odd else {}
        text = json.dumps(record | {"time": round(time.time(), 3)}, default=float) + "\n"
        try:
            if self._file is None:
                self._file = self._path.open("a", encoding="utf-8")
            self._file.write("\n" + text if self._torn else text)
            self._file.flush()
            self._torn = False
        except OSError as error:
            self._torn = True
            self.lost += 1
            self._lose(error)

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # the buffer of a failed write
                file.close()

    def _lose(self, error: OSError) -> None:
        """Close the file until the next record reopens it, and warn the first time."""
        self.close()
        if not self._failed:
            self._warn(f"records are being lost, {self._path} cannot be written: {error}")
        self._failed = True


class Sink:
    """Guards a logger: the first exception is reported and disables it, training continues.

    The logger receives numbers under the names of `tag`, and `step`.

    Args:
        name: shown in the warning.
        make: builds the logger, a pair of functions (log, close).
        warn: prints the warning.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], tuple[Log, Callable[[], None]]],
        warn: Callable[[str], None],
    ) -> None:
        self._name, self._warn = name, warn
        self._pair: tuple[Log, Callable[[], None]] | None = None
        self._pair = self._try(make)

    def log(self, record: dict[str, Any]) -> None:
        """Log the numbers of a record, which has `step`."""
        if self._pair is not None:
            log, kinds = self._pair[0], (int, float)
            numbers = {tag(k): v for k, v in record.items() if isinstance(v, kinds) and k != "step"}
            self._try(lambda: log({"step": record["step"]} | numbers))

    def close(self) -> None:
        """Flush and close the logger."""
        if self._pair is not None:
            self._try(self._pair[1])

    def _try(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # a logging service must never end a run
            self._pair = None
            self._warn(f"{self._name} is off for the rest of the run: {error!r}")
            return None


def make_sinks(cfg: Config, folder: Path, step: int, warn: Callable[[str], None]) -> list[Sink]:
    """Sinks enabled by run.wandb and run.tensorboard; `step` as in `Journal`."""
    sinks = []
    if cfg.run.wandb != "off":
        sinks.append(Sink("Weights & Biases", lambda: _wandb(cfg, folder, step), warn))
    if cfg.run.tensorboard:
        sinks.append(Sink("TensorBoard", lambda: _tensorboard(folder, step), warn))
    return sinks


def _wandb(cfg: Config, folder: Path, step: int) -> tuple[Log, Callable[[], None]]:
    import wandb

    if cfg.run.wandb == "online" and not wandb.login(prompt=False):
        raise RuntimeError("not logged in: run `wandb login`, or set run.wandb=offline")
    run = wandb.init(
        project=redacted(cfg.run.wandb_project),
        name=redacted(cfg.run.name),
        id=_wandb_id(folder / "wandb_id", step),
        resume="allow",
        dir=str(folder),
        mode="offline" if cfg.run.wandb == "offline" else "online",
        config=redacted(asdict(cfg)),
        # What wandb collects by itself has the command line and the repository's address in it.
        settings=wandb.Settings(
            console="off", quiet=True, init_timeout=60, disable_git=True, x_disable_meta=True
        ),
    )
    # Our step as a field: their own counter refuses the steps that a resumed run does again. Every
    # record has train/tokens too, which a chart can have as its x-axis.
    run.define_metric("*", step_metric="step")
    return run.log, run.finish


def _wandb_id(path: Path, step: int) -> str:
    """The same for a run and its continuations, another one when it starts from scratch."""
    if not step or not path.exists():
        path.write_text(secrets.token_hex(4))
    return path.read_text().strip()


def _tensorboard(folder: Path, step: int) -> tuple[Log, Callable[[], None]]:
    from torch.utils.tensorboard import SummaryWriter

    with _silent_threads():
        writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def log(record: dict[str, Any]) -> None:
        for key, value in record.items():
            if key != "step":
                writer.add_scalar(key, value, record["step"])

    return log, writer.close


@contextlib.contextmanager
def _silent_threads() -> Iterator[None]:
    """Suppress tracebacks of threads that are started inside the block.

    An error of TensorBoard's writer thread is raised once more at the next record, where `Sink`
    reports it.
    """
    before, hook = set(threading.enumerate()), threading.excepthook
    yield
    silent = weakref.WeakSet(set(threading.enumerate()) - before)

    def unless_silent(args: threading.ExceptHookArgs) -> None:
        if args.thread not in silent:
            hook(args)

    threading.excepthook = unless_silent


def _lines(path: Path) -> list[tuple[str, dict[str, Any] | None]]:
    """(line, record) of a jsonl; None for a line that is incomplete after a kill."""
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            record = None
        lines.append((text, record if isinstance(record, dict) else None))
    return lines


def _drop_after(path: Path, step: int) -> None:
    if not path.exists():
        return
    kept: list[str] = []
    superseded: list[str] = []
    for text, record in _lines(path):
        if record is not None:
            at = record.get("step", record.get("at", 0))
            (kept if step and at <= step else superseded).append(text + "\n")
    if superseded:
        with path.with_suffix(".superseded.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(superseded)
    new = path.with_suffix(".new")
    new.write_text("".join(kept), encoding="utf-8")
    os.replace(new, path)
