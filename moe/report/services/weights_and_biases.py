"""Weights & Biases (`run.wandb`)."""

from dataclasses import asdict
from pathlib import Path

from phalanx.configs.redact import redacted
from phalanx.configs.schema import Config
from phalanx.moe.report.services.service import Service, own_id


class WeightsAndBiases(Service):
    """A run of `run.project`, offline in the folder of the run, or online."""

    name = "Weights & Biases"

    def __init__(self, cfg: Config, folder: Path, step: int) -> None:
        import wandb

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

    def log(self, step: int, numbers: dict[str, float]) -> None:
        self._run.log({"step": step} | numbers)

    def close(self) -> None:
        self._run.finish()
