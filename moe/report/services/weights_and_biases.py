"""Weights & Biases (`run.wandb`)."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from phalanx.configs.redact import redacted
from phalanx.configs.schema import Config
from phalanx.moe.report.services.service import Service, own_id
from phalanx.moe.report.services.wandb_file import rows


class WeightsAndBiases(Service):
    """A run of `run.project`, offline in the folder of the run, or online."""

    name = "Weights & Biases"
    file = "wandb"

    def __init__(self, cfg: Config, folder: Path, step: int, sent: int) -> None:
        import wandb

        self._known: dict[str, Any] = {}
        """Numbers that it has: of each name the last one, as of the step."""
        if cfg.run.wandb == "offline" and step:
            self._known = _last_numbers(folder / "wandb", own_id(folder / "wandb_id", step))
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
        if cfg.run.wandb == "online" and self._run.resumed:
            self._known = dict(self._run.summary)

    def has(self, step: int, numbers: dict[str, float]) -> bool:
        last = self._known.get("step", 0)
        return step < last or (step == last and numbers.items() <= self._known.items())

    def log(self, step: int, numbers: dict[str, float], time: float) -> None:
        self._run.log({"step": step, "_timestamp": time} | numbers)

    def close(self) -> None:
        self._run.finish()


def _last_numbers(folder: Path, run: str) -> dict[str, Any]:
    """Numbers in the file of the launch before this one, of each name the last."""
    known: dict[str, Any] = {}
    if files := sorted(folder.glob(f"offline-run-*-{run}/run-{run}.wandb")):
        for row in rows(files[-1]):
            known |= row
    return known
