"""TensorBoard (`run.tensorboard`)."""

import contextlib
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from phalanx.configs.schema import Config
from phalanx.moe.report.services.service import Service


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
