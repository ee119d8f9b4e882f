"""Work between steps; that of every run is to save."""

import gc
from abc import ABC, abstractmethod

from torch.profiler import record_function

from phalanx.moe.report.metrics import Metrics
from phalanx.moe.run.progress import Progress
from phalanx.parallel.fault.activity import set_activity


class Callback(ABC):
    """Work after every so many steps, on all ranks; never if `every` is 0 or less."""

    def __init__(self, every: int) -> None:
        self._every = every

    def due(self, step: int) -> bool:
        """Whether the work is done after a step."""
        return self._every > 0 and step % self._every == 0

    @abstractmethod
    def __call__(self, step: int) -> None:
        """Do the work after a step. Collective."""


class Save(Callback):
    """Checkpoints after every `run.save_interval` steps and at the end; below 0 none at all."""

    def __init__(self, every: int, progress: Progress, metrics: Metrics, background: bool) -> None:
        super().__init__(every)
        self._progress, self._metrics = progress, metrics
        self._verb = "saving in the background" if background else "saved"
        self._saved = self._first = progress.step
        """Last step with a checkpoint, and the step from which this launch starts."""

    def __call__(self, step: int) -> None:
        set_activity(f"step {step}: checkpoint")
        self._metrics.flush()  # a run that goes on from here has less to send again
        with record_function("checkpoint"):
            self._progress.save()
        self._metrics.clock.lap("checkpoints")
        folder = self._progress.checkpoints.folder
        self._metrics.event(f"{self._verb}: checkpoint of step {step} in {folder}")
        gc.collect()
        self._saved = step

    def finish(self, last: int) -> None:
        """Save the last step if it has no checkpoint, and wait until all are written."""
        step, checkpoints = self._progress.step, self._progress.checkpoints
        if step > self._saved and self._every >= 0:
            self(step)
        elif step < last and (step > self._saved or step <= self._first):
            start = "starts from scratch"
            if self._progress.origin or self._saved:
                start = f"continues from step {self._saved}"
            self._metrics.event(f"no checkpoint was written: the same command {start}")
        if checkpoints.unfinished:
            self._metrics.event("waiting until the last checkpoint is written")
        checkpoints.close()
        self._metrics.clock.lap("checkpoints")
