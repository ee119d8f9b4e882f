"""A service that gets the numbers of a run, and what guards the run from its failures.

A service is imported only when its knob asks for it. None can stop training: the first failure is
reported once, and the service is off for the rest of the run. One whose calls may wait for a server
is called in a thread.

A service may lose some records to a kill, so that a run that goes on sends it those of
metrics.jsonl that it lacks. The last step that it surely has is in `<name>_sent` of the run folder:
it is noted at a checkpoint, once the service has taken what was logged, and at the end.
"""

import os
import queue
import secrets
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from phalanx.configs.schema import Config

_MOST = 1000  # records that wait for a service in a thread before it is taken to be away
_PATIENCE = 30.0  # seconds that the end of a run waits for a service to take the last records

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
"""Group -> prefixes of a number's name; all others are of training."""


def tag(name: str) -> str:
    """A number's name in a tracking service: `train/loss`, `valid/loss/wiki`, `moe/load_max`."""
    for group, starts in _GROUPS.items():
        if name.startswith(starts):
            return f"{group}/{name.removeprefix('valid_').removeprefix('balance/')}"
    return name if name.startswith("tasks") else f"train/{name}"


class Service:
    """One service; a subclass opens it in `__init__`, and may raise whatever it likes.

    The run resumes from `step`, 0 if it is new; the service surely has all records up to `sent`.
    """

    name = ""  # name in warnings
    file = ""  # begin of the names of its files in the run folder
    threaded = False  # calls may wait for a server: a thread makes them, the constructor's too

    def __init__(self, cfg: Config, folder: Path, step: int, sent: int) -> None:
        raise NotImplementedError

    def has(self, step: int, numbers: dict[str, float]) -> bool:
        """Whether the service has a record of a step after `sent` already."""
        return False

    def log(self, step: int, numbers: dict[str, float], time: float) -> None:
        """Take the numbers of a step or of its validation, named by `tag`, at a Unix `time`."""
        raise NotImplementedError

    def flush(self) -> bool:
        """Bring all that was logged to a disk or server; False if only `close` does."""
        return False

    def rewind(self, step: int) -> None:
        """Forget the steps after `step`, to which the run returns, where the service can."""

    def close(self) -> None:
        """Send what is left, and end the run there."""
        raise NotImplementedError


class Sink:
    """Guards a service: the first exception is reported and disables it, training continues.

    `records` are those of metrics.jsonl up to `step`; those that the service lacks are sent.
    """

    def __init__(
        self,
        kind: type[Service],
        cfg: Config,
        folder: Path,
        step: int,
        warn: Callable[[str], None],
        records: Sequence[dict[str, Any]] = (),
    ) -> None:
        self._name, self._warn = kind.name, warn
        self._on = True
        self._service: Service
        self._sent = Sent(folder / f"{kind.file}_sent")
        self._last = step
        self._open(lambda: self._begun(kind, cfg, folder, step, records))

    def log(self, record: dict[str, Any]) -> None:
        """Log the numbers of a record, which has `step` and `time`."""
        self._last, logged = record["step"], _logged(record)
        self._guarded(lambda: self._submit(lambda service: service.log(*logged)))

    def flush(self) -> None:
        """Note that all steps so far are sent, once the service has them."""
        step = self._last
        self._guarded(lambda: self._submit(lambda service: self._flush(service, step)))

    def rewind(self, step: int) -> None:
        """Tell the service that the run returns to `step`."""
        self._last = step
        self._guarded(lambda: self._submit(lambda service: self._rewind(service, step)))

    def close(self) -> None:
        """Flush and close the service."""
        self._guarded(self._end)

    def _begun(
        self,
        kind: type[Service],
        cfg: Config,
        folder: Path,
        step: int,
        records: Sequence[dict[str, Any]],
    ) -> Service:
        """The service, which has all records up to the step from which the run goes on."""
        sent = min(self._sent.read(), step)
        service = kind(cfg, folder, step, sent)
        later = [_logged(record) for record in records if record["step"] > sent]
        lacking = [logged for logged in later if not service.has(*logged[:2])]
        self._sent.write(lacking[0][0] - 1 if lacking else step)
        for logged in lacking:
            service.log(*logged)
        return service

    def _flush(self, service: Service, step: int) -> None:
        if service.flush():
            self._sent.write(step)

    def _rewind(self, service: Service, step: int) -> None:
        service.rewind(step)
        self._sent.write(min(self._sent.read(), step))

    def _closed(self, service: Service) -> None:
        service.close()
        self._sent.write(self._last)

    def _open(self, make: Callable[[], Service]) -> None:
        def opened() -> None:
            self._service = make()

        self._guarded(opened)

    def _submit(self, call: Callable[[Service], None]) -> None:
        call(self._service)

    def _end(self) -> None:
        self._closed(self._service)

    def _guarded(self, call: Callable[[], None]) -> None:
        if not self._on:
            return
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
        self._calls: queue.Queue[Callable[[Service], None] | None] = queue.Queue(_MOST)
        self._error: Exception | None = None
        serve = threading.Thread(target=self._serve, args=(make,), name=self._name, daemon=True)
        self._thread = serve
        serve.start()

    def _serve(self, make: Callable[[], Service]) -> None:
        try:
            service = make()
            while (call := self._calls.get()) is not None:
                call(service)
            self._closed(service)
        except Exception as error:
            self._error = error

    def _submit(self, call: Callable[[Service], None]) -> None:
        self._send(call)

    def _end(self) -> None:
        self._send(None)
        self._thread.join(_PATIENCE)
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            raise TimeoutError(f"it did not take the last records in {_PATIENCE:.0f} s")

    def _send(self, call: Callable[[Service], None] | None) -> None:
        if self._error is not None:
            raise self._error
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            raise TimeoutError(f"{_MOST:,} records wait for it") from None


class Sent:
    """Last step up to which a service surely has all records, in a file; 0 without one."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> int:
        """Return the step."""
        return int(self._path.read_text()) if self._path.exists() else 0

    def write(self, step: int) -> None:
        """Replace the step."""
        new = self._path.with_suffix(".new")
        new.write_text(f"{step}\n")
        os.replace(new, self._path)


def _logged(record: dict[str, Any]) -> tuple[int, dict[str, float], float]:
    known = {k: v for k, v in record.items() if k not in ("step", "time")}
    numbers = {tag(k): v for k, v in known.items() if isinstance(v, int | float)}
    return record["step"], numbers, record["time"]


def own_id(path: Path, step: int, size: int = 4) -> str:
    """Id of a run in a service: the same for its continuations, another one from scratch.

    The file at `path` keeps it; a new id is hexadecimal, of `size` bytes.
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
