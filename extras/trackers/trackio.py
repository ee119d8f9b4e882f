"""Trackio."""

from dataclasses import asdict
from pathlib import Path

from phalanx.configs.redact import redacted
from phalanx.configs.schema import Config
from phalanx.moe.report.service import Service, own_id, parameters


class Trackio(Service):
    """A run of `run.project` in its own database, or in the space of TRACKIO_SPACE_ID."""

    name = "Trackio"
    file = "trackio"
    threaded = True

    def __init__(self, cfg: Config, folder: Path, step: int, sent: int) -> None:
        import trackio

        # A run there is its name: one that starts from scratch is another.
        name = f"{redacted(cfg.run.name)}-{own_id(folder / 'trackio_id', step)}"
        self._run = trackio.init(
            project=redacted(cfg.run.project),
            name=name,
            config=parameters(redacted(asdict(cfg))),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, numbers: dict[str, float], time: float) -> None:
        self._run.log(numbers, step=step)

    def close(self) -> None:
        self._run.finish()
