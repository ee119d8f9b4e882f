"""How a run ends that cannot go on: one message, from one rank, and an exit code.

What is wrong on all ranks is told by rank 0. A rank that fails alone tells it itself; the watchdog
knows which is which, and ends the ranks that only suffer. Before there is one, the launcher signals
the others, whose collectives break or never end, and they leave without a word. So a rank waits a
moment for that signal before it speaks, unless its message is certainly the first.
"""

import sys
import time
import traceback

import torch.distributed as dist

from phalanx.configs.redact import redacted
from phalanx.configs.validate import ConfigError
from phalanx.kernels.registry import KernelUnavailable
from phalanx.moe.data.host_cache import DataError
from phalanx.moe.training.out_of_memory import OutOfMemory
from phalanx.parallel.checkpoint.saved_config import CheckpointError, NoUsableCheckpoint
from phalanx.parallel.checkpoint.saved_knobs import CheckpointMismatch
from phalanx.parallel.cuda_graph import CaptureFailed
from phalanx.parallel.dispatcher.exchange import missing
from phalanx.parallel.engine import Diverged
from phalanx.parallel.fault import launcher
from phalanx.parallel.fault.signals import StopSignal
from phalanx.parallel.fault.watchdog import Watchdog
from phalanx.parallel.folder_lock import Taken

_INPUT = (ConfigError, KernelUnavailable, DataError, CheckpointMismatch, CheckpointError, Taken)
_GRACE = 5.0  # seconds in which a launcher surely signals the ranks that are left


def exit_with(
    error: Exception,
    stop: StopSignal,
    *,
    rank: int,
    training: bool,
    watchdog: Watchdog | None = None,
) -> int:
    """Tell why this rank ends, once for all ranks; to be called where `error` is handled.

    Args:
        error: what was raised.
        stop: active, to notice the launcher's signal.
        rank: of this process.
        training: whether the first step had been reached; before it, every ValueError is about
            the configuration.
        watchdog: once there is one.

    Returns:
        The exit code; train.py lists them.
    """
    code, text = _verdict(error, training)
    lost = _lost_others(error)
    if watchdog is not None:
        stack = redacted("".join(traceback.format_exception(error)))
        if not watchdog.report(stack, lost or _first_line(error), own=not lost):
            return code
    elif (rank or lost) and _signalled(stop):
        return code
    if lost:
        text = f"error: the other ranks are gone: {lost}"
    if rank:
        text += f" (rank {rank})"
    emit_error(text)
    return code


def not_captured(failure: CaptureFailed) -> str:
    """What a failed capture is called, to be followed by what comes of it."""
    return f"the step could not be captured as a CUDA graph: {failure}"


def emit_error(text: str) -> None:
    """Tell an error to the user, and to the launcher for its report."""
    text = redacted(text)
    print(text, file=sys.stderr, flush=True)
    launcher.tell(text)


def _verdict(error: Exception, training: bool) -> tuple[int, str]:
    if isinstance(error, Diverged):
        return 43, f"error: {error}"
    if isinstance(error, NoUsableCheckpoint):
        return 44, f"error: {error}"
    if isinstance(error, _INPUT) or (isinstance(error, ValueError) and not training):
        return 2, f"error: {error}"
    if isinstance(error, OutOfMemory):
        return 1, f"error: out of memory: {error}"
    if isinstance(error, CaptureFailed):
        return 1, f"error: {not_captured(error)}; set run.graph=off or run.graph=auto"
    return 1, "".join(traceback.format_exception(error)).rstrip()


def _lost_others(error: Exception) -> str:
    """How other ranks broke a collective under this one; empty if they did not.

    gloo raises RuntimeErrors that only name it. A wait for tokens that was in vain stops a kernel,
    which CUDA calls a failed launch in whatever is called next.
    """
    if not isinstance(error, RuntimeError):
        return ""
    if late := missing():
        return late
    broken = isinstance(error, dist.DistError) or "gloo" in str(error).lower()
    return _first_line(error) if broken else ""


def _signalled(stop: StopSignal) -> bool:
    """Wait for the launcher to signal this rank, which it does when another one has ended."""
    until = time.monotonic() + _GRACE
    while stop.received is None and time.monotonic() < until:
        time.sleep(0.05)
    return stop.received is not None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [repr(error)])[0]
