"""Current activity of this process, for the report if the job fails.

Setting it costs well under a microsecond; the watchdog reads it from its own thread.
"""

import time
from typing import NamedTuple


class Progress(NamedTuple):
    """A moment of this process."""

    at: str  # activity, as in `step 3: forward and backward`
    serial: int  # moments before this one: of two ranks in the same loop, the lower one is behind
    since: float  # time.monotonic() when it began
    limited: bool  # true if taking longer than the timeout counts as a hang


_now = Progress("start", 0, time.monotonic(), False)
_STARTING = "start: "
_parts: dict[str, float] = {}


def set_activity(at: str, *, limited: bool = False) -> None:
    """From now on this process is doing `at`; with `limited` not for longer than the timeout."""
    global _now
    before, _now = _now, Progress(at, _now.serial + 1, time.monotonic(), limited)
    if before.at.startswith(_STARTING):
        name = before.at.removeprefix(_STARTING)
        _parts[name] = _parts.get(name, 0.0) + _now.since - before.since


def start_run() -> None:
    """A run starts in this process, which may have had another one."""
    set_activity(f"{_STARTING}configuration")
    _parts.clear()


def startup_times() -> dict[str, float]:
    """Seconds of each activity of this run named `start: PART` that has ended, by part."""
    return {part: round(seconds, 3) for part, seconds in _parts.items()}


def heartbeat() -> None:
    """Say that this process still does the same, and gets on with it."""
    set_activity(_now.at, limited=_now.limited)


def current_progress() -> Progress:
    """Return the activity that was set last."""
    return _now
