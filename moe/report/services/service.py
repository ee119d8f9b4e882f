"""A service that gets the numbers of a run, and what guards the run from its failures.

A service is imported only when its knob asks for it. None can stop training: the first failure is
reported once, and the service is off for the rest of the run. One whose calls may wait for a server
is called in a thread, so that a server that is away costs no time either.
"""

import queue
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx.configs.schema import Config

_MOST = 1000
"""Records that wait for a service in a thread before it is taken to be away."""
_PATIENCE = 30.0
"""Seconds that the end of a run waits for a service to take the last records."""

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


class Service:
    """One service; a subclass opens it in `__init__`, and may raise whatever it likes.

    Args:
        cfg: of the run.
        folder: of the run.
        step: step that the run resumes from; 0 for a new run.
    """

    name = ""
    """Name in warnings."""
    threaded = False
    """Calls may wait for a server: a thread makes them, the constructor's too."""

    def __init__(self, cfg: Config, folder: Path, step: int) -> None:
        raise NotImplementedError

    def log(self, step: int, numbers: dict[str, float]) -> None:
        """Take the numbers of a step, under the names of `tag`."""
        raise NotImplementedError

    def close(self) -> None:
        """Send what is left, and end the run there."""
        raise NotImplementedError


class Sink:
    """Guards a service: the first exception is reported and disables it, training continues.

    Args:
        kind: the service.
        cfg, folder, step: as for `Service`.
        warn: prints the warning.
    """

    def __init__(
        self,
        kind: type[Service],
        cfg: Config,
        folder: Path,
        step: int,
        warn: Callable[[str], None],
    ) -> None:
        self._name, self._warn = kind.name, warn
        self._on = True
        self._service: Service
        self._open(lambda: kind(cfg, folder, step))

    def log(self, record: dict[str, Any]) -> None:
        """Log the numbers of a record, which has `step`."""
        if self._on:
            kinds, step = (int, float), record["step"]
            numbers = {tag(k): v for k, v in record.items() if isinstance(v, kinds) and k != "step"}
            self._guarded(lambda: self._take(step, numbers))

    def close(self) -> None:
        """Flush and close the service."""
        if self._on:
            self._guarded(self._end)

    def _open(self, make: Callable[[], Service]) -> None:
        def opened() -> None:
            self._service = make()

        self._guarded(opened)

    def _take(self, step: int, numbers: dict[str, float]) -> None:
        self._service.log(step, numbers)

    def _end(self) -> None:
        self._service.close()

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # a logging service must never end a run
            self._on = False
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            remedy = f"; pip install {missing}" if missing else ""
            self._warn(f"{self._name} is off for the rest of the run: {error!r}{remedy}")


class ThreadSink(Sink):
    """The same for a service that may wait for a server: training does not wait for it.

    A failure in the thread is reported with the next record, or at the end.
    """

    def _open(self, make: Callable[[], Service]) -> None:
        self._records: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(_MOST)
        self._error: Exception | None = None
        serve = threading.Thread(target=self._serve, args=(make,), name=self._name, daemon=True)
        self._thread = serve
        serve.start()

    def _serve(self, make: Callable[[], Service]) -> None:
        try:
            service = make()
            while (record := self._records.get()) is not None:
                service.log(*record)
            service.close()
        except Exception as error:
            self._error = error

    def _take(self, step: int, numbers: dict[str, float]) -> None:
        self._send((step, numbers))

    def _end(self) -> None:
        self._send(None)
        self._thread.join(_PATIENCE)
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            raise TimeoutError(f"it did not take the last records in {_PATIENCE:.0f} s")

    def _send(self, record: tuple[int, dict[str, float]] | None) -> None:
        if self._error is not None:
            raise self._error
        try:
            self._records.put_nowait(record)
        except queue.Full:
            raise TimeoutError(f"{_MOST:,} records wait for it") from None


def own_id(path: Path, step: int, size: int = 4) -> str:
    """Id of a run in a service: the same for its continuations, another one from scratch.

    Args:
        path: file that keeps it.
        step: step that the run resumes from; 0 for a new run.
        size: bytes of a new id, which is hexadecimal.
    """
    if not step or not path.exists():
        path.write_text(secrets.token_hex(size))
    return path.read_text().strip()


def parameters(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, with names such as `model.moe.experts`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= parameters(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
