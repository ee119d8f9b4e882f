"""Weights & Biases and TensorBoard, and the sinks of all services."""

import contextlib
import json
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from phalanx.configs.redact import redacted
from phalanx.configs.schema import Config
from phalanx.configs.tables.trackers import TRACKERS
from phalanx.moe.report.service import Service, Sink, ThreadSink, own_id

_BLOCK = 32 << 10
_PREAMBLE = 7
_HEAD = struct.Struct("<IHB")  # checksum, size and kind of a chunk
_WHOLE, _LAST = 1, 4  # kinds of chunks that end a record; 2 begins one, 3 goes on


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a .wandb file, in their order, up to where the file breaks off.

    W&B writes blocks of 32 KiB: a kill loses the rows of the last one. The file is a log of LevelDB
    (doc/log_format.md there) behind seven bytes: blocks with chunks of records, which are wandb's
    protobuf messages.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    for content in _records(path.read_bytes()):
        record = Record.FromString(content)
        if record.HasField("history"):
            yield {
                ".".join(item.nested_key) or item.key: json.loads(item.value_json)
                for item in record.history.item
            }


def _records(data: bytes) -> Iterator[bytes]:
    at, record = _PREAMBLE, b""
    while at + _HEAD.size <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEAD.size:  # too little for another chunk
            at += left
            continue
        _, size, kind = _HEAD.unpack_from(data, at)
        begin, at = at + _HEAD.size, at + _HEAD.size + size
        if not kind or at > len(data):
            return
        record = (b"" if kind in (_WHOLE, 2) else record) + data[begin:at]
        if kind in (_WHOLE, _LAST):
            yield record


class WeightsAndBiases(Service):
    """A run of `run.project`, offline in the folder of the run, or online."""

    name = "Weights & Biases"
    file = "wandb"

    def __init__(self, cfg: Config, folder: Path, step: int, sent: int) -> None:
        import wandb

        self._known: dict[str, Any] = {}  # last of each name, as of the step
        if cfg.run.wandb == "offline" and step:
            self._known = _last_numbers(folder / "wandb", own_id(folder / "wandb_id", step))
        if cfg.run.wandb == "online" and not wandb.login(prompt=False):
            raise RuntimeError("not logged in: run `wandb login`, or set run.wandb=offline")
        self._run = wandb.init(
            project=redacted(cfg.run.project),
            name=redacted(cfg.run.name),
            id=own_id(folder / "wandb_id", step),
            resume="allow",
            dir=str(folder),
            mode="offline" if cfg.run.wandb == "offline" else "online",
            config=redacted(asdict(cfg)),
            # What wandb collects by itself has the command line and the repository's address in it.
            settings=wandb.Settings(
                console="off", quiet=True, init_timeout=60, disable_git=True, x_disable_meta=True
            ),
        )
        # Our step as a field: their own counter refuses the steps that a resumed run does again.
        # Every record has train/tokens too, which a chart can have as its x-axis.
        self._run.define_metric("*", step_metric="step")
        if cfg.run.wandb == "online" and self._run.resumed:
            self._known = dict(self._run.summary)

    def has(self, step: int, numbers: dict[str, float]) -> bool:
        last = self._known.get("step", 0)
        return step < last or (step == last and numbers.items() <= self._known.items())

    def log(self, step: int, numbers: dict[str, float], time: float) -> None:
        self._run.log({"step": step, "_timestamp": time} | numbers)

    def close(self) -> None:
        self._run.finish()


def _last_numbers(folder: Path, run: str) -> dict[str, Any]:
    """Numbers in the file of the launch before this one, of each name the last."""
    known: dict[str, Any] = {}
    if files := sorted(folder.glob(f"offline-run-*-{run}/run-{run}.wandb")):
        for row in rows(files[-1]):
            known |= row
    return known


class TensorBoard(Service):
    """Event files in the folder of the run."""

    name = "TensorBoard"
    file = "tensorboard"

    def __init__(self, cfg: Config, folder: Path, step: int, sent: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        with _silent_threads():
            # Later steps of event files before it are no longer shown: they follow once more.
            self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=sent + 1)

    def log(self, step: int, numbers: dict[str, float], time: float) -> None:
        for key, value in numbers.items():
            self._writer.add_scalar(key, value, step, walltime=time)

    def flush(self) -> bool:
        self._writer.flush()
        return True

    def rewind(self, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        begun = SessionLog(status=SessionLog.START)  # as purge_step begins an event file
        writer: Any = self._writer.file_writer
        writer.add_event(Event(session_log=begun), step + 1)

    def close(self) -> None:
        self._writer.close()


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


def make_sinks(
    cfg: Config,
    folder: Path,
    step: int,
    warn: Callable[[str], None],
    records: Sequence[dict[str, Any]] = (),
) -> list[Sink]:
    """Sinks of run.wandb and run.trackers; arguments as for `Sink`."""
    kinds: list[type[Service]] = [WeightsAndBiases] if cfg.run.wandb != "off" else []
    kinds += [resolve_name(TRACKERS[name]) for name in cfg.run.trackers]
    return [
        (ThreadSink if kind.threaded else Sink)(kind, cfg, folder, step, warn, records)
        for kind in kinds
    ]
