"""Weights & Biases and TensorBoard as sinks of metrics. One that fails says so once and is dropped.

Both libraries are imported only when their knob asks for them.
"""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from configs.schema import Config


class Sink:
    """Guards a logger: the first exception is reported and ends it, training goes on.

    Args:
        name: shown in the warning.
        make: builds the logger, a pair of functions (log, close).
        warn: where the warning goes.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], tuple[Callable[[dict[str, Any]], None], Callable[[], None]]],
        warn: Callable[[str], None],
    ) -> None:
        self._name, self._warn = name, warn
        self._log: Callable[[dict[str, Any]], None] | None = None
        self._close: Callable[[], None] | None = None
        made = self._try(make)
        if made is not None:
            self._log, self._close = made

    def log(self, record: dict[str, Any]) -> None:
        """Pass a record on; it has `step`."""
        if self._log is not None:
            self._try(lambda: self._log(record) if self._log else None)

    def close(self) -> None:
        """Flush and end."""
        if self._close is not None:
            self._try(self._close)

    def _try(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # a logging service must never end a run
            self._log = self._close = None
            self._warn(f"{self._name} is off for the rest of the run: {error}")
            return None


def make_sinks(cfg: Config, folder: Path, warn: Callable[[str], None]) -> list[Sink]:
    """The sinks that run.wandb and run.tensorboard ask for."""
    sinks = []
    if cfg.run.wandb != "off":
        sinks.append(Sink("Weights & Biases", lambda: _wandb(cfg, folder), warn))
    if cfg.run.tensorboard:
        sinks.append(Sink("TensorBoard", lambda: _tensorboard(folder), warn))
    return sinks


def _wandb(cfg: Config, folder: Path) -> tuple[Callable[[dict[str, Any]], None], Callable[[], None]]:
    import wandb

    run = wandb.init(
        project=cfg.run.wandb_project,
        name=cfg.run.name,
        id=cfg.run.name,
        resume="allow",
        dir=str(folder),
        mode="offline" if cfg.run.wandb == "offline" else "online",
        config=asdict(cfg),
    )

    def log(record: dict[str, Any]) -> None:
        run.log({k: v for k, v in record.items() if k != "step"}, step=record["step"])

    return log, run.finish


def _tensorboard(folder: Path) -> tuple[Callable[[dict[str, Any]], None], Callable[[], None]]:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"))

    def log(record: dict[str, Any]) -> None:
        for key, value in record.items():
            if key != "step":
                writer.add_scalar(key, value, record["step"])

    return log, writer.close
