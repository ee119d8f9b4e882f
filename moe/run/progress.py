"""Progress of a run: what a checkpoint holds, and how it is saved, loaded and rolled back."""

from dataclasses import asdict
from typing import Any

from phalanx.configs.arithmetic.batch_sizes import in_steps
from phalanx.configs.redact import redacted
from phalanx.configs.schema import Config
from phalanx.moe.job import Job
from phalanx.moe.run.bad_steps import Health
from phalanx.moe.run.data import TrainingData
from phalanx.parallel.checkpoint.checkpointer import Checkpointer
from phalanx.parallel.checkpoint.start import Start
from phalanx.parallel.engine import Diverged
from phalanx.parallel.learning_rate import change
from phalanx.parallel.object_store import Place


class Progress:
    """Steps, data, weights and health of a run.

    Args:
        cfg, job: configuration and job of the run.
        data: data of its steps.
        checkpoints: checkpoints of its folder.
    """

    def __init__(
        self, cfg: Config, job: Job, data: TrainingData, checkpoints: Checkpointer
    ) -> None:
        self._cfg, self._job, self._data, self.checkpoints = cfg, job, data, checkpoints
        self.health = Health(cfg.run)
        self.step = 0
        """Number of steps done, skipped ones included."""
        self.skipped_samples = 0
        """Samples of the steps so far that were skipped."""
        self.origin: Place | None = None
        """Checkpoint from which this run has resumed."""
        self.lr_change = ""
        """Line on a next step whose learning rate departs from the checkpoint's; else empty."""
        self.imported: dict[str, Any] = {}
        """Fields of an imported model without a knob, which an export of this run needs."""

    @property
    def tokens(self) -> int:
        """Number of tokens of the updates so far: none of a step that was skipped or undone."""
        samples = self._data.loader.step_samples - self.skipped_samples
        return samples * self._cfg.data.sequence_length

    def state(self) -> dict[str, Any]:
        """State of the loop, which is saved beside weights and optimizer."""
        return {
            "config": redacted(asdict(self._cfg)),
            "step": self.step,
            "data": self._data.loader.state_dict(),
            "skipped_samples": self.skipped_samples,
            "health": self.health.state_dict(),
            "huggingface": self.imported,
        }

    def save(self) -> None:
        """Save a checkpoint of this step, or start to. Collective."""
        engine = self._job.engine
        self.checkpoints.save(
            self.step, engine.chunks, engine.optimizer, engine.scheduler, self.state()
        )

    def resume(self, start: Start) -> str:
        """Load the checkpoint from which a launch starts, if there is one; return a phrase."""
        run, path = self._cfg.run, start.path
        if path is None:
            reason = "no checkpoint in the run folder"
            if start.over:
                reason = f"run.start_over={run.start_over}"
            elif run.resume == "never":
                reason = "run.resume=never"
            return f"from scratch ({reason})"
        state = self._load(path)
        self._data.loader.load_state_dict(state["data"])
        self.origin = path
        if state.get("weights_only"):
            return f"from the weights of {path}"
        optim = in_steps(self._cfg.optim, self._cfg.data)
        self.lr_change = change(state.get("config", {}), optim, run.steps, self.step)
        return f"resumed from step {self.step}: {path}"

    def roll_back(self, fault: str) -> Place:
        """Return to the newest checkpoint; the data continues after the bad step.

        Raises:
            Diverged: there is no checkpoint, or the run has been rolled back too often.
        """
        self.checkpoints.close()  # finishes a save in the background
        # A run that saves none leaves those of earlier runs in its folder.
        saves = self._cfg.run.save_interval >= 0
        path = (self.checkpoints.newest() if saves else None) or self.origin
        if path is None:
            raise Diverged(
                f"{fault}, and there is no checkpoint to go back to; the parameters are unchanged; "
                "set run.save_interval to fewer steps, or lower optim.lr"
            )
        self._data.loader.roll_back(self._load(path)["data"])
        self.health.roll_back(self.step, fault)
        self._data.fit(self.step)
        return path

    def _load(self, path: Place) -> dict[str, Any]:
        """Restore everything but the data cursor from a checkpoint; return the loop's state."""
        engine = self._job.engine
        state = self.checkpoints.load(
            path, engine.chunks, engine.optimizer, engine.scheduler, redacted(asdict(self._cfg))
        )
        self.step = state["step"]
        self.imported = state.get("huggingface", {})
        self.skipped_samples = state.get("skipped_samples", 0)
        self.health.load_state_dict(state.get("health", {}))
        return state
