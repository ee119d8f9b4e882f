"""End of a run that cannot continue: one message, from one rank, and an exit code.

Rank 0 reports an error that all ranks have; a rank that fails alone reports itself. The watchdog
distinguishes the two, and ends the ranks that fail as a consequence. Before it has started, the
launcher signals the other ranks, which exit silently. So a rank waits some seconds for that signal
before it prints, unless its message is certainly the first.
"""

import sys
import time
import traceback

import torch.distributed as dist

from phalanx.configs.redact import redacted
from phalanx.configs.validate import ConfigError
from phalanx.kernels.registry import KernelUnavailable
from phalanx.moe.data.host_cache import DataError
from phalanx.moe.run.memory_check import OutOfMemory
from phalanx.parallel.checkpoint.saved_config import CheckpointError, NoUsableCheckpoint
from phalanx.parallel.checkpoint.saved_knobs import CheckpointMismatch
from phalanx.parallel.connections import Connections
from phalanx.parallel.cuda_graph import CaptureFailed
from phalanx.parallel.engine import Diverged
from phalanx.parallel.fault import launcher
from phalanx.parallel.fault.signals import StopSignal
from phalanx.parallel.fault.watchdog import Watchdog
from phalanx.parallel.folder_lock import Taken

_INPUT = (ConfigError, KernelUnavailable, DataError, CheckpointMismatch, CheckpointError, Taken)
_GRACE = 5.0  # seconds within which a launcher surely signals the remaining ranks


def exit_with(
    error: Exception,
    stop: StopSignal,
    *,
    rank: int,
    training: bool,
    watchdog: Watchdog | None = None,
    connections: Connections | None = None,
) -> int:
    """Report the error that ends this rank, once for all ranks, and return the exit code.

    Called in the handler of `error`; train.py lists the exit codes.

    Args:
        training: the first step had been reached; before it, every ValueError is about the config.
        watchdog: the watchdog, if it has been started.
        connections: memory shared with other ranks, if the process has joined the job.
    """
    lost = _lost_others(error, connections)
    # Told before a traceback is formatted, which reads lines of code from the disk.
    if watchdog is not None:
        speaks = watchdog.report(error, lost or _first_line(error), own=not lost)
    else:
        speaks = not ((rank or lost) and _signalled(stop))
    code, text = _verdict(error, training)
    if not speaks:
        if not lost:
            # torchrun reports the rank that ends first, which need not be the one that speaks.
            launcher.tell(redacted(text))
        return code
    if lost:
        text = f"error: the other ranks are gone: {lost}"
    if rank:
        text += f" (rank {rank})"
    emit_error(text)
    return code


def not_captured(failure: CaptureFailed) -> str:
    """Description of a failed capture, to be followed by its consequence."""
    return f"{failure.work} could not be captured as a CUDA graph: {failure}"


def emit_error(text: str) -> None:
    """Print an error for the user, and pass it to the launcher for its report."""
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


def _lost_others(error: Exception, connections: Connections | None) -> str:
    """First line on a collective that broke because other ranks are gone; empty for other errors.

    gloo raises RuntimeErrors that only contain its name. A wait for tokens that timed out stops a
    kernel, which CUDA reports as a failed launch in the next call.
    """
    if not isinstance(error, RuntimeError):
        return ""
    if connections is not None and (late := connections.missing()):
        return late
    broken = isinstance(error, dist.DistError) or "gloo" in str(error).lower()
    return _first_line(error) if broken else ""


def _signalled(stop: StopSignal) -> bool:
    """Wait for the launcher to signal this rank, which it does when another rank has ended."""
    deadline = time.monotonic() + _GRACE
    while stop.received is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return stop.received is not None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [repr(error)])[0]
