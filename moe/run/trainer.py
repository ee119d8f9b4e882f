"""The training loop: data -> forward and backward -> update -> report -> checkpoint.

The host reads from the device once a step, between backward and update (moe.run.step). A bad
step (moe.run.bad_steps) is skipped before the parameters are changed.
"""

import gc
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from phalanx.configs.arithmetic.batch_sizes import in_steps, samples_after, spans
from phalanx.configs.arithmetic.data_stages import begun
from phalanx.configs.knobs import pluralize
from phalanx.configs.layout import logit_interval
from phalanx.configs.redact import redacted
from phalanx.configs.schema import Config
from phalanx.moe.data import loader as data_loader
from phalanx.moe.data.loader import Loader, build_datasets
from phalanx.moe.data.sources import stage_line
from phalanx.moe.plan.plan import Plan
from phalanx.moe.report.compiling import report_compilation
from phalanx.moe.report.goodput import TRAINING, slow_start
from phalanx.moe.report.metrics import Metrics
from phalanx.moe.report.profiler import Profiler
from phalanx.moe.report.start_page import describe, device, versions
from phalanx.moe.report.step_records import StepRecords
from phalanx.moe.report.throughput import Pace
from phalanx.moe.report.title import title_facts
from phalanx.moe.router import balance
from phalanx.moe.run.bad_steps import Health
from phalanx.moe.run.callbacks.routing_record import record_routing
from phalanx.moe.run.callbacks.samples import Samples
from phalanx.moe.run.callbacks.scores import SourceLosses, scores
from phalanx.moe.run.failure import not_captured
from phalanx.moe.run.faults import Faults
from phalanx.moe.run.launch import Launch
from phalanx.moe.run.preflight import all_steps_done, checkpoint_root, preflight
from phalanx.moe.run.setup import Job, setup
from phalanx.moe.run.step import Step
from phalanx.parallel.checkpoint.checkpointer import Checkpointer
from phalanx.parallel.checkpoint.saved_config import NoneValid
from phalanx.parallel.dispatcher.capacity import Growth
from phalanx.parallel.engine import Diverged
from phalanx.parallel.fault.activity import parts_of_start, set_activity
from phalanx.parallel.fault.agreement import Failed, failing_together, gather
from phalanx.parallel.fault.signals import StopSignal
from phalanx.parallel.folder_lock import FolderLock
from phalanx.parallel.learning_rate import change
from phalanx.parallel.object_store import Place
from phalanx.parallel.run_start import Start
from phalanx.parallel.runtime import Runtime


class Trainer:
    """One run on this rank.

    Args:
        cfg: validated config.
        runtime: this process.
        stop: signal handler of this process.
        launch: record of this start for the run folder; None records nothing.
        held: lock of the run folder, for the rank that writes there.
        plan: plan of the run; by default the ranks make one.

    Raises:
        ConfigError, DataError, CheckpointMismatch, CheckpointError: findings of
            `moe.run.preflight`, before a model is built.
    """

    def __init__(
        self,
        cfg: Config,
        runtime: Runtime,
        stop: StopSignal,
        launch: Launch | None = None,
        held: FolderLock | None = None,
        plan: Plan | None = None,
    ) -> None:
        self.cfg, self.runtime, self.stop = cfg, runtime, stop
        self._may_write = held.check if held is not None else lambda: None
        self.folder = Path(cfg.run.dir) / cfg.run.name
        set_activity("start: checks")
        notes = self._checked()
        set_activity("start: data")
        train_set, self.valid_set = self._datasets(samples_after(cfg.data, cfg.run.steps))
        if runtime.is_main:
            for note in notes:
                print(f"-- {note}", flush=True)
        set_activity("start: model")
        self.job: Job = setup(cfg, runtime, plan)
        self.loader = self._loader(train_set, spans(cfg.data))
        self.health = Health(cfg.run)
        self.step = 0
        self.skipped_samples = 0
        """Samples of the steps so far that were skipped."""
        self.compute = Step(cfg, self.job)
        self._eager = 0
        """First eager step after a failed capture; 0 if none failed."""
        self._eager_update = False
        """The failure to capture the update has been reported."""
        self._batch = 0
        """Size of the global batch of the last step, if it has been told."""
        self._batches: list[dict[str, torch.Tensor]] = []
        """Micro-batches of the last step, if its routing is to be recorded."""
        self.samples: Samples | None = None
        if cfg.run.sample_every:
            row = torch.from_numpy(train_set[0]).long()
            position = train_set.positions(0) if cfg.data.document_mask else None
            self.samples = Samples(cfg, self.compute, row, position)
        self._logits_every = logit_interval(cfg.optim)
        self._async_save = self.job.plan.cfg.run.async_save == "on"
        self.checkpoints = Checkpointer(
            checkpoint_root(cfg),
            keep_last=cfg.run.keep_last,
            keep_every=cfg.run.keep_every,
            async_save=self._async_save,
            dp_cp_group=self.job.groups.pg.dp_cp,
            may_write=self._may_write,
            staging=self.folder / "uploads",
        )
        self.origin: Place | None = None
        """Checkpoint from which this run has resumed."""
        self.lr_change = ""
        """Line on a next step whose learning rate departs from the checkpoint's; else empty."""
        self.imported: dict[str, Any] = {}
        """Fields of an imported model without a knob, which an export of this run needs."""
        self.faults = Faults(cfg.run, runtime.rank, self.folder)
        set_activity("start: checkpoint")
        start = self.checkpoints.start(cfg.run)
        self.resumed = self._resume(start)
        self._first = self.step + 1
        self._fit_data()
        # Every check has passed: only then records of earlier launches are replaced.
        if launch is not None:
            launch.keep(cfg, self.folder, device(runtime.device), versions(runtime.device))
        if cfg.run.save_interval >= 0:  # else the checkpoints stay as they are
            self.checkpoints.started(start)
        self.metrics = self._metrics()
        self.pace = Pace(cfg, runtime, lambda: self.loader.consumed_samples)
        self.records = StepRecords(
            self.job, self.compute.collector, self.metrics, self.pace, self.step
        )
        self.facts = title_facts(self.job)

    # --- the loop ---------------------------------------------------------------------------------

    def fit(self) -> None:
        """Train to `run.steps`, or to the step at which a signal arrives.

        Raises:
            Diverged: a step was not finite; the checkpoints before it are complete.
            CheckpointError: a checkpoint could not be written.
            DataError: on this rank alone, a sample could not be used.
        """
        set_activity("start: page")  # on all ranks: they compare how many activities they had
        if self.runtime.is_main:
            self.metrics.text(describe(self.job, self.resumed, self.loader, self.valid_set))
            self.metrics.start(self.facts | {"start_parts": parts_of_start()})
            for line in (slow_start(), self.lr_change, self.faults.summary()):
                if line:
                    self.metrics.event(line)
        self.job.engine.train()
        try:
            run, main = self.cfg.run, self.runtime.is_main
            window = run.profile if main else []
            profiled = Profiler(window, self.folder, self.facts, self.step, self.metrics.event)
            with _no_gc(), profiled as profiler:
                self.pace.restart(self.step)
                self.metrics.clock.lap("start")
                saved = self._steps(profiler)
        except Diverged:
            self.metrics.clock.lap("skipped")  # the step that was not applied
            self.checkpoints.close()  # finishes a save in the background
            self.metrics.close(ended="diverged")
            raise
        if self.step > saved and self.cfg.run.save_interval >= 0:
            self._save()
        elif self.step < self.cfg.run.steps and (self.step > saved or self.step < self._first):
            start = (
                f"continues from step {saved}" if self.origin or saved else "starts from scratch"
            )
            self.metrics.event(f"no checkpoint was written: the same command {start}")
        if self.checkpoints.unfinished:
            self.metrics.event("waiting until the last checkpoint is written")
        self.checkpoints.close()
        self.metrics.clock.lap("checkpoints")
        if self._batches and self.step >= self.cfg.run.steps:
            set_activity(f"step {self.step}: routing is recorded")
            self.metrics.event(
                record_routing(self.cfg, self.job, self.compute, self._batches, self.step)
            )
        self.metrics.close(ended="done" if self.step >= self.cfg.run.steps else "stopped")
        self.loader.close()
        self.compute.close()

    def _steps(self, profiler: Profiler) -> int:
        """Run all steps and the work between them; return the last step that was saved."""
        run, saved, clock = self.cfg.run, self.step, self.metrics.clock
        if self.step < run.steps and self._asked_to_stop(f"before step {self.step + 1}"):
            return saved
        if self.step >= run.steps:
            self.metrics.event(all_steps_done(f"resumed from step {self.step}", run.steps))
        while self.step < run.steps:
            reached = self.step
            first = self.step + 1 == self._first
            with report_compilation(self.metrics.event) if first else nullcontext():
                stopping = self._train_step()
            profiler.step(self.step)
            self.checkpoints.poll()
            if self.step <= reached and not stopping:
                continue  # rolled back, to a step after which all work has been done
            if self.step % 500 == 0:
                gc.collect()
            if run.eval_interval and self.step % run.eval_interval == 0:
                self._validate()
                clock.lap("validation")
                self.pace.restart(self.step)
            if self.samples is not None and self.step % run.sample_every == 0:
                self._sample(self.samples)
                clock.lap("samples")
                self.pace.restart(self.step)
            if run.save_interval > 0 and self.step % run.save_interval == 0:
                self._save()
                saved = self.step
                self.pace.restart(self.step)
            if stopping and self._asked_to_stop(f"after step {self.step}"):
                break
        return saved

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

    def _train_step(self) -> bool:
        """One optimizer step; True if a rank was asked to stop."""
        engine, number, clock = self.job.engine, self.step + 1, self.metrics.clock
        clock.lap(TRAINING)  # the rest of the step before this one
        started = time.perf_counter()
        self._set_activity("data")
        self.faults.trigger(number)
        consumed = self.loader.consumed_samples
        with record_function("data"):
            batches = self.loader.next_step()
        self._report_data(consumed)
        if self.cfg.run.record_routing and number == self.cfg.run.steps:
            self._batches = batches
        waited = time.perf_counter() - started
        clock.lap("data")
        graphs = self.compute.graphs
        self._set_activity("forward and backward")
        before = balance.snapshot(engine.modules)
        measured = self._logits_every > 0 and number % self._logits_every == 0
        totals = self.compute(
            batches,
            before,
            stop=self.stop.received is not None,
            waited=waited,
            measure_logits=measured,
            grad_factor=self.faults.factor(number),
        )
        loss, mtp_loss, labels, norm, stopping, reruns, late, load, logits = totals
        clock.lap("reruns", self.compute.repeated)
        self._report_reruns(reruns, f"step {number}")
        if (failure := self.compute.capture_failure) is not None and not self._eager:
            self._eager = number
            self.metrics.event(f"{not_captured(failure)}; steps are eager from step {number} on")
        if number > self._first:  # the first step compiles, and opens files
            self.records.add_times(late)
        fault = self.health.fault(number, loss, norm, labels)
        if fault is not None:
            balance.restore(engine.modules, before)
            finite = math.isfinite(norm) and (math.isfinite(loss) or not labels)
            if not self.health.skips(fault, finite=finite):
                self._roll_back(fault)
                clock.lap("skipped")
                return stopping
            self.metrics.event(f"skipped: {fault}")
            self.skipped_samples += self.loader.consumed_samples - consumed
        else:
            self.records.add_accepted(load, logits if measured else None)
        self._set_activity("update")
        with record_function("optimizer"):
            self.compute.update(norm) if fault is None else engine.skip()
        if (failure := self.compute.update_failure) is not None and not self._eager_update:
            self._eager_update = True
            self.metrics.event(f"{not_captured(failure)}; updates stay eager")
        self.step = number
        clock.lap(self._kind_of_step(fault, graphs))
        self._may_write()
        if self.step % self.cfg.run.log_interval == 0 or self.step == self.cfg.run.steps:
            record: dict[str, Any] = {"loss": loss} if labels else {}
            record |= {"grad_norm": norm, "lr": engine.lr, "labels": labels, "data_time": waited}
            if self.cfg.model.mtp_layers and not math.isnan(mtp_loss):
                record["mtp_loss"] = mtp_loss
            budget = self.job.budget
            record |= {"step": self.step, "tokens": self._tokens(), "reruns": budget.reruns}
            record |= self.health.counts() | {"capacity_factor": budget.capacity_factor}
            if self._eager:
                record["eager_steps"] = self.step - self._eager + 1
            self.records.log(record)
        return stopping

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

    # --- around the loop --------------------------------------------------------------------------

    def _validate(self) -> None:
        if record := self.validate():
            self.metrics.log({"step": self.step, "tokens": self._tokens()} | record)
        else:
            self.metrics.event(
                f"the validation after step {self.step} has no loss: none of its labels counts; "
                "raise run.eval_batches or check the documents of the validation data"
            )

    def validate(self) -> dict[str, float]:
        """Scores of the validation batches (`moe.run.callbacks.scores.scores`).

        Empty if none of their labels counts.
        """
        assert self.valid_set is not None
        rows, sources = self.valid_set, self.valid_set.sources
        engine, loader = self.job.engine, self._loader(rows, self.cfg.data.global_batch)
        set_activity(f"step {self.step}: validation")
        engine.eval()
        steps, before = list[tuple[float, int]](), balance.snapshot(engine.modules)
        by_source = SourceLosses(len(sources), self.runtime.device) if len(sources) > 1 else None
        with torch.no_grad(), record_function("validation"):
            for _ in range(self.cfg.run.eval_batches):
                numbers = loader.next_rows()
                totals = self.compute(loader.next_step(), before, forward_only=True)
                self._report_reruns(totals.reruns, f"the validation after step {self.step}")
                steps.append((totals.loss, totals.labels))
                if by_source is not None:
                    by_source.add([rows.source(n) for n in numbers], self.compute.sample_losses)
        engine.train()
        loader.close()
        return scores(steps, sources, [] if by_source is None else by_source.totals())

    def _sample(self, samples: Samples) -> None:
        set_activity(f"step {self.step}: sample")
        with record_function("sample"):
            sample, reruns = samples()
        self._report_reruns(reruns, f"the sample after step {self.step}")
        title = f"sample after step {self.step}"
        if sample is None:
            self.metrics.event(f"{title}: none, as the model's logits are NaN or infinite")
        else:
            self.metrics.event(title, shown=str(sample), **asdict(sample))

    def _loader(self, dataset: Any, global_batch: int | Sequence[tuple[int, int]]) -> Loader:
        data, job = self.cfg.data, self.job
        return Loader(
            dataset,
            data.micro_batch,
            global_batch,
            job.groups.data_rank,
            job.data_parallel,
            pin=self.runtime.device.type == "cuda",
            documents=data.document_mask,
            places=job.plan.document_slots,
        )

    def _report_reruns(self, reruns: Iterable[Growth], subject: str) -> None:
        for growth in reruns:
            self.metrics.event(growth.event(subject))

    def _report_data(self, before: int) -> None:
        """Tell what is new of the data of a step, which began at `before` samples."""
        data, sources = self.cfg.data, self.loader.dataset.sources
        length, passed = data.sequence_length, self.loader.consumed_samples
        if (size := passed - before) != self._batch:
            self._batch = size
            if data.batch_warmup:
                self.metrics.event(f"the global batch is {pluralize(size, 'sequence')}")
        for stage in begun(data.stages, passed, length)[-1:]:
            if stage.first(length) >= before:
                self.metrics.event(f"data {stage_line(stage, [s.name for s in sources])}")

    def _tokens(self) -> int:
        """Number of tokens of the updates so far: none of a step that was skipped or undone."""
        samples = self.loader.step_samples - self.skipped_samples
        return samples * self.cfg.data.sequence_length

    def _metrics(self) -> Metrics:
        """Reports of the run; ValueError on every rank if rank 0 cannot write them."""
        try:
            with failing_together(ValueError):
                return Metrics(self.folder, self.cfg, self.runtime.is_main, step=self.step)
        except Failed as failed:
            raise ValueError(str(failed)) from None

    def _state(self) -> dict[str, Any]:
        return {
            "config": redacted(asdict(self.cfg)),
            "step": self.step,
            "data": self.loader.state_dict(),
            "skipped_samples": self.skipped_samples,
            "health": self.health.state_dict(),
            "huggingface": self.imported,
        }

    def _save(self) -> None:
        engine = self.job.engine
        set_activity(f"step {self.step}: checkpoint")
        self.metrics.flush()  # a run that goes on from here has less to send again
        with record_function("checkpoint"):
            self.checkpoints.save(
                self.step, engine.chunks, engine.optimizer, engine.scheduler, self._state()
            )
        self.metrics.clock.lap("checkpoints")
        state = "saving in the background" if self._async_save else "saved"
        self.metrics.event(f"{state}: checkpoint of step {self.step} in {self.checkpoints.folder}")
        gc.collect()

    def _resume(self, start: Start) -> str:
        """Load the checkpoint from which this launch starts, if there is one; return a phrase."""
        run, path = self.cfg.run, start.path
        if path is None:
            reason = "no checkpoint in the run folder"
            if start.over:
                reason = f"run.start_over={run.start_over}"
            elif run.resume == "never":
                reason = "run.resume=never"
            return f"from scratch ({reason})"
        state = self._load(path)
        self.loader.load_state_dict(state["data"])
        self.origin = path
        if state.get("weights_only"):
            return f"from the weights of {path}"
        optim = in_steps(self.cfg.optim, self.cfg.data)
        self.lr_change = change(state.get("config", {}), optim, run.steps, self.step)
        return f"resumed from step {self.step}: {path}"

    def _load(self, path: Place) -> dict[str, Any]:
        """Restore everything but the data cursor from a checkpoint; return the loop's state."""
        engine = self.job.engine
        state = self.checkpoints.load(
            path, engine.chunks, engine.optimizer, engine.scheduler, redacted(asdict(self.cfg))
        )
        self.step = state["step"]
        self.imported = state.get("huggingface", {})
        self.skipped_samples = state.get("skipped_samples", 0)
        self.health.load_state_dict(state.get("health", {}))
        return state

    def _roll_back(self, fault: str) -> None:
        """Return to the newest checkpoint; the data continues after the bad step.

        Raises:
            Diverged: there is no checkpoint, or the run has been rolled back too often.
        """
        set_activity(f"step {self.step + 1}: rollback")
        self.checkpoints.close()  # finishes a save in the background
        # A run that saves none leaves those of earlier runs in its folder.
        saves = self.cfg.run.save_interval >= 0
        path = (self.checkpoints.newest() if saves else None) or self.origin
        if path is None:
            raise Diverged(
                f"{fault}, and there is no checkpoint to go back to; the parameters are unchanged; "
                "set run.save_interval to fewer steps, or lower optim.lr"
            )
        self.loader.roll_back(self._load(path)["data"])
        self.compute.drop_updates()
        self.health.roll_back(self.step, fault)
        self._fit_data()
        self.records.rewind(self.step)
        self.metrics.rewind(self.step)
        self.metrics.event(f"rolled back to {path}: {fault}")
        self.pace.restart(self.step)

    def _checked(self) -> list[str]:
        """Notes of `preflight` by rank 0, whose first error is raised on every rank."""
        findings: list[Any] = [preflight(self.cfg) if self.runtime.is_main else None]
        dist.broadcast_object_list(findings, src=0)
        for error in findings[0].errors:
            # If no checkpoint of the run is complete, all ranks verify them and set them aside.
            if not isinstance(error, NoneValid):
                raise error
        return findings[0].notes

    def _datasets(self, samples: int) -> tuple[data_loader.Samples, data_loader.Samples | None]:
        cfg, run = self.cfg, self.cfg.run
        valid = run.eval_batches * cfg.data.global_batch if run.eval_interval else 0
        return build_datasets(cfg, cfg.model.vocab_size, samples, valid)

    def _fit_data(self) -> None:
        """Fit the dataset to all steps left, if a rollback or batch size moved the cursor."""
        done, steps = self.loader.step_samples, self.cfg.run.steps - self.step
        wanted = self.loader.undone_samples + samples_after(self.cfg.data, max(0, steps), done)
        if wanted != len(self.loader.dataset):
            self.loader.dataset, _ = self._datasets(wanted)


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
