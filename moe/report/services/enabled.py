"""The services that a run asks for."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from phalanx.configs.schema import Config
from phalanx.moe.report.services.comet import Comet
from phalanx.moe.report.services.mlflow import Mlflow
from phalanx.moe.report.services.service import Service, Sink, ThreadSink
from phalanx.moe.report.services.tensorboard import TensorBoard
from phalanx.moe.report.services.trackio import Trackio
from phalanx.moe.report.services.weights_and_biases import WeightsAndBiases

TRACKERS: dict[str, type[Service]] = {"mlflow": Mlflow, "comet": Comet, "trackio": Trackio}
"""Services by their name in `run.trackers`."""


def make_sinks(
    cfg: Config,
    folder: Path,
    step: int,
    warn: Callable[[str], None],
    records: Sequence[dict[str, Any]] = (),
) -> list[Sink]:
    """Sinks of run.wandb, run.tensorboard and run.trackers; arguments as for `Sink`."""
    kinds: list[type[Service]] = [WeightsAndBiases] if cfg.run.wandb != "off" else []
    kinds += [TensorBoard] if cfg.run.tensorboard else []
    kinds += [TRACKERS[name] for name in cfg.run.trackers]
    return [
        (ThreadSink if kind.threaded else Sink)(kind, cfg, folder, step, warn, records)
        for kind in kinds
    ]
