"""Progress of a run: its data and health, what a checkpoint holds, how it is rolled back.

Loss and gradient norm decide whether the update of a step is applied, between backward pass and
optimizer. Both have the same bits on every rank, so that all ranks decide the same without a
message. `run.bad_steps` is the policy for values that are not finite. A step without a label that
counts is skipped: only the balancing losses of the routers would change the parameters. A spike is
skipped, which is an idea of OLMo-core's SkipStepOptimizer: a loss or norm more than
`run.skip_spikes` standard deviations above the mean of the last 128 accepted steps.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pkgutil import resolve_name
from typing import Any

from phalanx.configs.arithmetic.batch_sizes import in_steps, samples_after, spans
from phalanx.configs.arithmetic.data_stages import begun
from phalanx.configs.knobs import pluralize
from phalanx.configs.redact import redacted
from phalanx.configs.schema import Config, RunConfig
from phalanx.configs.tables.capabilities import PHASES
from phalanx.moe.data.loader import Loader, Samples, build_datasets
from phalanx.moe.data.sources import stage_line
from phalanx.moe.job import Job
from phalanx.parallel.checkpoint.checkpointer import Checkpointer
from phalanx.parallel.checkpoint.start import Start
from phalanx.parallel.engine import Diverged
from phalanx.parallel.learning_rate import change
from phalanx.parallel.object_store import Place

_ROWS = ("source", "blend", "stages", "split", "seed", "sequence_length")  # of data
WINDOW = 128  # accepted steps to which a spike is compared; half of them are enough


class Health:
    """Losses and norms of recent steps, and counts of skipped steps and rollbacks of the run."""

    def __init__(self, run: RunConfig) -> None:
        self._run = run
        self._seen = {name: deque[float](maxlen=WINDOW) for name in ("loss", "gradient norm")}
        self._in_a_row = 0  # steps skipped since the last accepted one
        self._returns = {-1: 0}  # step of the last rollback's checkpoint -> rollbacks to it
        self.skipped = self.rollbacks = 0

    def fault(self, step: int, loss: float, norm: float, labels: int = 1) -> str | None:
        """Fault of a step; None for a good step, to which later ones are compared.

        The loss is a mean over the labels that count, undefined without any.
        """
        values = {"loss": loss, "gradient norm": norm}
        if not labels:
            del values["loss"]
        for name, value in values.items():
            if not math.isfinite(value):
                return f"the {name} of step {step} is {value}"
        if not labels:
            return f"step {step} has no loss: none of its labels counts"
        for name, value in values.items():
            if above := self._spike(value, self._seen[name]):
                return f"the {name} of step {step} is {value:.4g}, {above}"
        for name, value in values.items():
            self._seen[name].append(value)
        self._in_a_row = 0
        return None

    def skips(self, fault: str, *, finite: bool) -> bool:
        """True if a step with `fault` is skipped, False if the run has to be rolled back.

        Raises Diverged if the run has to end, by `run.bad_steps` or `run.max_bad_steps`.
        """
        policy, most = "skip" if finite else self._run.bad_steps, self._run.max_bad_steps
        if policy == "stop":
            advice = "lower optim.lr, check the data, or set run.bad_steps=skip"
            raise Diverged(f"{fault}; the parameters are unchanged; {advice}")
        if policy == "rollback":
            return False
        if self._in_a_row == most:
            raise Diverged(
                f"{fault}, after {pluralize(most, 'step')} skipped in a row (run.max_bad_steps); "
                "the parameters are unchanged; lower optim.lr or check the data"
            )
        self._in_a_row += 1
        self.skipped += 1
        return True

    def roll_back(self, to: int, fault: str) -> None:
        """Count a rollback to the checkpoint of step `to`.

        Raises Diverged if the last `run.max_bad_steps` rollbacks were to the same checkpoint.
        """
        times, most = self._returns.get(to, 0), self._run.max_bad_steps
        if times == most:
            raise Diverged(
                f"{fault}, and the run has gone back to step {to} {most} times "
                "(run.max_bad_steps); lower optim.lr or check the data"
            )
        self._returns = {to: times + 1}
        self.rollbacks += 1

    def counts(self) -> dict[str, int]:
        """Counts of bad steps for the record of a step, without zeros."""
        counts = {"skipped": self.skipped, "rollbacks": self.rollbacks}
        return {name: count for name, count in counts.items() if count}

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers for a checkpoint; a resumed run decides as an uninterrupted one."""
        seen = {name: list(values) for name, values in self._seen.items()}
        return {"seen": seen, "in_a_row": self._in_a_row, **self.counts()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`, if any; a rollback does not undo the counts."""
        for name, values in self._seen.items():
            values.clear()
            values.extend(state.get("seen", {}).get(name, ()))
        self._in_a_row = state.get("in_a_row", 0)
        self.skipped = max(self.skipped, state.get("skipped", 0))
        self.rollbacks = max(self.rollbacks, state.get("rollbacks", 0))

    def _spike(self, value: float, seen: deque[float]) -> str:
        sigma = self._run.skip_spikes
        if not sigma or len(seen) < WINDOW // 2:
            return ""
        mean, spread = statistics.fmean(seen), statistics.stdev(seen)
        if not spread or value <= mean + sigma * spread:
            return ""
        return f"{(value - mean) / spread:.1f} sigma above the last {len(seen)} (run.skip_spikes)"


def datasets(
    cfg: Config, samples: int, carried: dict[str, Any] | None = None
) -> tuple[Samples, Samples | None]:
    """Training set of so many samples, and the validation set if the run validates. Collective.

    Sources go on from positions that are `carried` from a checkpoint of other data.
    """
    if carried:
        return resolve_name(PHASES["rows"])(cfg, samples, carried), None
    run = cfg.run
    valid = run.eval_batches * cfg.data.global_batch if run.eval_interval else 0
    return build_datasets(cfg, cfg.model.vocab_size, samples, valid)


def make_loader(
    cfg: Config, job: Job, dataset: Any, global_batch: int | Sequence[tuple[int, int]]
) -> Loader:
    """Loader of micro-batches; `global_batch` may be `configs.arithmetic.batch_sizes.spans`."""
    data = cfg.data
    return Loader(
        dataset,
        data.micro_batch,
        global_batch,
        job.groups.data_rank,
        job.data_parallel,
        pin=job.runtime.device.type == "cuda",
        documents=data.document_mask,
        places=job.plan.document_slots,
    )


class TrainingData:
    """Micro-batches of the training steps."""

    def __init__(self, cfg: Config, job: Job, dataset: Samples) -> None:
        self._cfg = cfg
        self.loader = make_loader(cfg, job, dataset, spans(cfg.data))
        self._batch = 0  # last one that was reported
        self.carried: dict[str, Any] = {}  # positions of sources since the run reads other samples

    @property
    def contents(self) -> list[list[int | str]]:
        """Documents and tokens of the training part of each source, and the stamp of its files."""
        return [[each.documents, each.tokens, each.stamp] for each in self.loader.dataset.sources]

    def fit(self, step: int) -> None:
        """Fit the dataset to all steps after `step`, if the cursor was moved."""
        loader = self.loader
        left = max(0, self._cfg.run.steps - step)
        wanted = loader.undone_samples + samples_after(self._cfg.data, left, loader.step_samples)
        if wanted != len(loader.dataset) or self.carried:
            loader.dataset, _ = datasets(self._cfg, wanted, self.carried)

    def news(self, before: int) -> Iterator[str]:
        """Lines on what is new in the data of a step, which began at `before` samples."""
        data, sources = self._cfg.data, self.loader.dataset.sources
        length, passed = data.sequence_length, self.loader.consumed_samples
        if (size := passed - before) != self._batch:
            self._batch = size
            if data.batch_warmup:
                yield f"the global batch is {pluralize(size, 'sequence')}"
        for stage in begun(data.stages, passed, length)[-1:]:
            if stage.first(length) >= before:
                yield f"data {stage_line(stage, [s.name for s in sources])}"


class Progress:
    """Steps, data, weights and health of a run."""

    def __init__(
        self, cfg: Config, job: Job, data: TrainingData, checkpoints: Checkpointer
    ) -> None:
        self._cfg, self._job, self._data, self.checkpoints = cfg, job, data, checkpoints
        self.health = Health(cfg.run)
        self.step = 0  # steps done, skipped ones included
        self.skipped_samples = 0  # of the steps so far that were skipped
        self.origin: Place | None = None  # checkpoint from which this run has resumed
        self.lr_change = ""  # line on a next step whose learning rate departs from the checkpoint's
        self._begins: Place | None = None  # checkpoint of another run that this one begins with
        self.imported: dict[str, Any] = {}
        """Fields of an imported model without a knob, which an export of this run needs."""

    @property
    def tokens(self) -> int:
        """Number of tokens of the updates so far: none of a step that was skipped or undone."""
        samples = self._data.loader.step_samples - self.skipped_samples
        before = self._data.carried.get("tokens", 0)
        return int(before + samples * self._cfg.data.sequence_length)

    def state(self) -> dict[str, Any]:
        """State of the loop, which is saved beside weights and optimizer."""
        return {
            "config": redacted(asdict(self._cfg)),
            "step": self.step,
            "data": self._data.loader.state_dict(),
            "sources": self._data.contents,
            "carried": self._data.carried,
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
            never = "run.resume=never" if run.resume == "never" else ""
            over = f"run.start_over={run.start_over}" if start.over else ""
            return f"from scratch ({over or never or 'no checkpoint in the run folder'})"
        self._begins = path if start.begins else None
        state = self._load(path)
        self._data.loader.load_state_dict(state["data"])
        self.origin = path
        if state.get("weights_only"):
            return f"from the weights of {path}"
        if not run.phases:  # which say it
            optim = in_steps(self._cfg.optim, self._cfg.data)
            self.lr_change = change(state.get("config", {}), optim, run.steps, self.step)
        return f"resumed from step {self.step}: {path}"

    def roll_back(self, fault: str) -> Place:
        """Return to the newest checkpoint; the data continues after the bad step.

        Raises Diverged if there is no checkpoint, or after too many rollbacks.
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
        engine, config = self._job.engine, redacted(asdict(self._cfg))
        parts, begins = (engine.optimizer, engine.scheduler), path == self._begins
        state = self.checkpoints.load(path, engine.chunks, *parts, config, begins=begins)
        old, new, sources = state["config"].get("data", {}), config["data"], self._data.contents
        others = any(old.get(knob, new[knob]) != new[knob] for knob in _ROWS)
        if others or state.get("sources", sources) != sources:
            state = resolve_name(PHASES["carried"])(state, self._cfg, self._data.loader.dataset)
        self.step, self._data.carried = state["step"], state.get("carried", {})
        if self._cfg.run.phases:
            engine.scheduler.num_steps = 0
            engine.scheduler.step(self.step - self._cfg.run.schedule_begin)
        self.imported = state.get("huggingface", {})
        self.skipped_samples = state.get("skipped_samples", 0)
        self.health.load_state_dict(state.get("health", {}))
        return state
