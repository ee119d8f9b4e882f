"""The training loop: data -> forward and backward -> update -> report -> checkpoint.

The host reads from the device once a step, between backward and update (moe.run.step). A bad step
(moe.run.progress) is skipped before the parameters are changed. `moe.run.start` builds a trainer.
"""

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

import torch
from torch.profiler import record_function

from phalanx.configs.layout import logit_interval
from phalanx.configs.schema import Config
from phalanx.configs.tables.capabilities import RECORD_ROUTING
from phalanx.moe.job import Job
from phalanx.moe.report.compiling import report_compilation
from phalanx.moe.report.goodput import TRAINING
from phalanx.moe.report.metrics import Metrics
from phalanx.moe.report.profiler import Profiler
from phalanx.moe.report.step_records import Pace, StepRecords
from phalanx.moe.router import balance
from phalanx.moe.run.callbacks.callback import Callback, Save
from phalanx.moe.run.failure import not_captured
from phalanx.moe.run.faults import Faults
from phalanx.moe.run.preflight import all_steps_done
from phalanx.moe.run.progress import Progress, TrainingData
from phalanx.moe.run.step import Step
from phalanx.moe.totals import Totals
from phalanx.parallel.engine import Diverged
from phalanx.parallel.fault.activity import set_activity
from phalanx.parallel.fault.agreement import gather
from phalanx.parallel.fault.signals import StopSignal

_COLLECT_EVERY = 500  # steps between garbage collections, which all ranks do at once


@dataclass
class Trainer:
    """One run on this rank."""

    cfg: Config  # configuration as the user set it
    job: Job
    stop: StopSignal  # signal handler of this process
    data: TrainingData
    compute: Step
    progress: Progress
    metrics: Metrics
    pace: Pace
    records: StepRecords
    faults: Faults
    callbacks: Sequence[Callback]  # work between steps, in order; saves are the last
    saves: Save
    profiler: Profiler
    page: Callable[[], None]  # prints the start page
    may_write: Callable[[], None]  # raises an error if the lock of the run folder is lost

    def __post_init__(self) -> None:
        self._first = self.step + 1
        self._batches: list[dict[str, torch.Tensor]] = []
        """Micro-batches of the last step, if its routing is to be recorded."""
        self._eager = 0
        """First eager step after a failed capture; 0 if none failed."""
        self._eager_update = False
        """The failure to capture the update has been reported."""

    @property
    def step(self) -> int:
        """Number of steps done."""
        return self.progress.step

    def fit(self) -> None:
        """Train to `run.steps`, or to the step at which a signal arrives.

        Raises:
            Diverged: a step was not finite; the checkpoints before it are complete.
            CheckpointError: a checkpoint could not be written.
            DataError: on this rank alone, a sample could not be used.
        """
        set_activity("start: page")  # on all ranks: they compare how many activities they had
        self.page()
        self.job.engine.train()
        steps = self.cfg.run.steps
        try:
            with _no_gc(), self.profiler:
                self.pace.restart(self.step)
                self.metrics.clock.lap("start")
                self._steps()
        except Diverged:
            self.metrics.clock.lap("skipped")  # the step that was not applied
            self.progress.checkpoints.close()  # finishes a save in the background
            self.metrics.close(ended="diverged")
            raise
        self.saves.finish(steps)
        if self._batches and self.step >= steps:
            set_activity(f"step {self.step}: routing is recorded")
            last = self.compute, self._batches, self.step
            record = resolve_name(RECORD_ROUTING)
            self.metrics.event(record(self.cfg, self.job, *last))
        self.metrics.close(ended="done" if self.step >= steps else "stopped")
        self.data.loader.close()
        self.compute.close()

    def _steps(self) -> None:
        """Run all steps, and the work between them."""
        steps = self.cfg.run.steps
        if self.step < steps and self._asked_to_stop(f"before step {self.step + 1}"):
            return
        if self.step >= steps:
            self.metrics.event(all_steps_done(f"resumed from step {self.step}", self.cfg.run))
        while self.step < steps:
            reached = self.step
            first = reached + 1 == self._first
            with report_compilation(self.metrics.event) if first else nullcontext():
                stopping = self._train_step()
            self.profiler.step(self.step)
            self.progress.checkpoints.poll()
            if self.step <= reached and not stopping:
                continue  # rolled back, to a step after which all work has been done
            if self.step % _COLLECT_EVERY == 0:
                gc.collect()
            for callback in self.callbacks:
                if callback.due(self.step):
                    callback(self.step)
                    self.pace.restart(self.step)
            if stopping and self._asked_to_stop(f"after step {self.step}"):
                break

    def _train_step(self) -> bool:
        """One optimizer step; True if a rank was asked to stop."""
        engine, loader, clock = self.job.engine, self.data.loader, self.metrics.clock
        number, consumed = self.step + 1, loader.consumed_samples
        clock.lap(TRAINING)  # the rest of the step before this one
        started = time.perf_counter()
        self._set_activity("data")
        self.faults.trigger(number)
        with record_function("data"):
            batches = loader.next_step()
        for line in self.data.news(consumed):
            self.metrics.event(line)
        if self.cfg.run.record_routing and number == self.cfg.run.steps:
            self._batches = batches
        waited = time.perf_counter() - started
        clock.lap("data")
        graphs = self.compute.graphs
        self._set_activity("forward and backward")
        before = balance.snapshot(engine.modules)
        every = logit_interval(self.cfg.optim)
        measured = every > 0 and number % every == 0
        totals = self.compute(
            batches,
            before,
            stop=self.stop.received is not None,
            waited=waited,
            measure_logits=measured,
            grad_factor=self.faults.factor(number),
        )
        clock.lap("reruns", self.compute.repeated)
        self.metrics.reruns(totals.reruns, f"step {number}")
        if (failure := self.compute.capture_failure) is not None and not self._eager:
            self._eager = number
            self.metrics.event(f"{not_captured(failure)}; steps are eager from step {number} on")
        if number > self._first:  # the first step compiles, and opens files
            self.records.add_times(totals.ready_seconds_R)
        fault = self.progress.health.fault(number, totals.loss, totals.norm, totals.labels)
        if fault is not None:
            balance.restore(engine.modules, before)
            if not self._skips(fault, totals):
                self._roll_back(fault)
                clock.lap("skipped")
                return totals.stopping
            self.metrics.event(f"skipped: {fault}")
            self.progress.skipped_samples += loader.consumed_samples - consumed
        else:
            self.records.add_accepted(totals.load, totals.max_logits if measured else None)
        self._set_activity("update")
        with record_function("optimizer"):
            self.compute.update(totals.norm) if fault is None else engine.skip()
        if (failure := self.compute.update_failure) is not None and not self._eager_update:
            self._eager_update = True
            self.metrics.event(f"{not_captured(failure)}; updates stay eager")
        self.progress.step = number
        clock.lap(self._kind_of_step(fault, graphs))
        self.may_write()
        if number % self.cfg.run.log_interval == 0 or number == self.cfg.run.steps:
            self.records.log(self._record(totals, waited))
        return totals.stopping

    def _record(self, totals: Totals, waited: float) -> dict[str, Any]:
        """Log record of the step, which waited so many seconds for its data."""
        budget, progress = self.job.budget, self.progress
        record: dict[str, Any] = {"loss": totals.loss} if totals.labels else {}
        record |= {"grad_norm": totals.norm, "lr": self.job.engine.lr}
        record |= {"labels": totals.labels, "data_time": waited}
        if self.cfg.model.mtp_layers and not math.isnan(totals.mtp_loss):
            record["mtp_loss"] = totals.mtp_loss
        record |= {"step": self.step, "tokens": progress.tokens, "reruns": budget.reruns}
        record |= progress.health.counts() | {"capacity_factor": budget.capacity_factor}
        if self._eager:
            record["eager_steps"] = self.step - self._eager + 1
        return record

    def _kind_of_step(self, fault: str | None, graphs: int) -> str:
        """Kind of the time of a step (`moe.report.goodput`).

        Args:
            fault: fault for which the step was skipped.
            graphs: number of graphs before the step.
        """
        if fault is not None:
            return "skipped"
        if self.step == self._first or self.compute.graphs != graphs:
            return "capture"
        return TRAINING

    def _skips(self, fault: str, totals: Totals) -> bool:
        """Whether the step with a fault is skipped, not rolled back."""
        finite = math.isfinite(totals.norm) and (math.isfinite(totals.loss) or not totals.labels)
        return self.progress.health.skips(fault, finite=finite)

    def _roll_back(self, fault: str) -> None:
        """Return to the newest checkpoint; the data continues after the bad step."""
        set_activity(f"step {self.step + 1}: rollback")
        path = self.progress.roll_back(fault)
        self.compute.drop_updates()
        self.records.rewind(self.step)
        self.metrics.rewind(self.step)
        self.metrics.event(f"rolled back to {path}: {fault}")
        self.pace.restart(self.step)

    def _asked_to_stop(self, when: str) -> bool:
        """True on all ranks if any received a stop signal, which is logged. Collective."""
        set_activity(f"{when}: agreement on signals")
        received = gather(self.stop.received)
        signals = [f"{name} to rank {rank}" for rank, name in enumerate(received) if name]
        if signals:
            self.metrics.event(f"stopping {when}: a signal asked for it ({', '.join(signals)})")
        return bool(signals)

    def _set_activity(self, activity: str) -> None:
        """Set the activity for the watchdog, without a time limit for the first step.

        That step compiles, which may take long; a later step that takes as long is a hang.
        """
        set_activity(f"step {self.step + 1}: {activity}", limited=self.step + 1 > self._first)


@contextmanager
def _no_gc() -> Iterator[None]:
    """Disable automatic garbage collection.

    Garbage is collected at checkpoints and every 500 steps, on all ranks at once.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
