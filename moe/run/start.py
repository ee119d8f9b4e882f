"""Start of a run: checks, data, model, checkpoint and reports, in this order.

Every check comes before the first record of an earlier launch is replaced.
"""

from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
import torch.distributed as dist

from phalanx.configs.arithmetic.batch_sizes import samples_after
from phalanx.configs.schema import Config
from phalanx.configs.tables.capabilities import TASKS
from phalanx.moe.data.loader import Samples as Dataset
from phalanx.moe.plan.plan import Plan
from phalanx.moe.report.goodput import slow_start
from phalanx.moe.report.metrics import Metrics
from phalanx.moe.report.profiler import Profiler
from phalanx.moe.report.start_page import describe, device, title_facts, versions
from phalanx.moe.report.step_records import Pace, StepRecords
from phalanx.moe.run.callbacks.callback import Callback, Save
from phalanx.moe.run.callbacks.samples import Samples, SampleText
from phalanx.moe.run.callbacks.validation import Validation
from phalanx.moe.run.faults import Faults
from phalanx.moe.run.launch import Launch
from phalanx.moe.run.preflight import checkpoint_root, preflight
from phalanx.moe.run.progress import Progress, TrainingData, datasets
from phalanx.moe.run.setup import setup
from phalanx.moe.run.step import Step
from phalanx.moe.run.trainer import Trainer
from phalanx.parallel.checkpoint.checkpointer import Checkpointer
from phalanx.parallel.checkpoint.saved_config import NoneValid
from phalanx.parallel.fault.activity import set_activity, startup_times
from phalanx.parallel.fault.agreement import Failed, failing_together
from phalanx.parallel.fault.signals import StopSignal
from phalanx.parallel.folder_lock import FolderLock
from phalanx.parallel.runtime import Runtime


def make_trainer(
    cfg: Config,
    runtime: Runtime,
    stop: StopSignal,
    launch: Launch | None = None,
    held: FolderLock | None = None,
    plan: Plan | None = None,
) -> Trainer:
    """Trainer of a run on this rank, at its first step. Collective.

    Args:
        launch: record of this start for the run folder; None records nothing.
        held: lock of the run folder, for the rank that writes there.
        plan: plan of the run; by default the ranks make one.

    Raises:
        ConfigError, DataError, CheckpointMismatch, CheckpointError: findings of
            `moe.run.preflight`, before a model is built.
    """
    folder = Path(cfg.run.dir) / cfg.run.name
    set_activity("start: checks")
    notes = _checked(cfg, runtime)
    set_activity("start: data")
    train_set, valid_set = datasets(cfg, samples_after(cfg.data, cfg.run.steps))
    if runtime.is_main:
        for note in notes:
            print(f"-- {note}", flush=True)
    set_activity("start: model")
    job = setup(cfg, runtime, plan)
    data = TrainingData(cfg, job, train_set)
    compute = Step(cfg, job)
    samples = _samples(cfg, compute, train_set) if cfg.run.sample_every else None
    may_write = held.check if held is not None else lambda: None
    background = job.plan.cfg.run.async_save == "on"
    checkpoints = Checkpointer(
        checkpoint_root(cfg),
        keep_last=cfg.run.keep_last,
        keep_every=cfg.run.keep_every,
        keep_steps=[phase.first for phase in cfg.run.phases],
        async_save=background,
        dp_cp_group=job.groups.pg.dp_cp,
        may_write=may_write,
        staging=folder / "uploads",
    )
    progress = Progress(cfg, job, data, checkpoints)
    faults = Faults(cfg.run, runtime.rank, folder)
    set_activity("start: checkpoint")
    start = checkpoints.start(cfg.run)
    resumed = progress.resume(start)
    data.fit(progress.step)
    # Every check has passed: only then records of earlier launches are replaced.
    if launch is not None:
        launch.keep(cfg, folder, device(runtime.device), versions(runtime.device))
    if cfg.run.save_interval >= 0:  # else the checkpoints stay as they are
        checkpoints.started(start)
    metrics = _metrics(cfg, runtime, folder, progress.step)
    pace = Pace(cfg, runtime, lambda: data.loader.consumed_samples)
    facts = title_facts(job)

    saves = Save(cfg.run.save_interval, progress, metrics, background)
    callbacks = list[Callback]()
    if valid_set is not None:
        callbacks.append(Validation(cfg, job, compute, valid_set, progress, metrics))
    if cfg.run.tasks:
        callbacks.append(resolve_name(TASKS).TaskScores(cfg, compute, progress, metrics))
    if samples is not None:
        callbacks.append(SampleText(cfg.run.sample_every, samples, metrics))

    def page() -> None:
        if not runtime.is_main:
            return
        metrics.text(describe(job, resumed, data.loader, valid_set))
        phases = launch.phases[-1].run.phases if launch is not None else []
        after = [each.name for each in phases[len(cfg.run.phases) :]]
        metrics.start(facts | {"start_parts": startup_times(), "phases_after": after})
        begun = [f"phase {each.name} from step {each.first + 1} on" for each in cfg.run.phases]
        lines = (*begun[-1:], slow_start(), progress.lr_change, faults.summary())
        for line in filter(None, lines):
            metrics.event(line)

    window = cfg.run.profile if runtime.is_main else []
    return Trainer(
        cfg=cfg,
        job=job,
        stop=stop,
        data=data,
        compute=compute,
        progress=progress,
        metrics=metrics,
        pace=pace,
        records=StepRecords(job, compute.collector, metrics, pace, progress.step),
        faults=faults,
        callbacks=[*callbacks, saves],
        saves=saves,
        profiler=Profiler(window, folder, facts, progress.step, metrics.event),
        page=page,
        may_write=may_write,
    )


def _checked(cfg: Config, runtime: Runtime) -> list[str]:
    """Notes of `preflight` by rank 0, whose first error is raised on every rank."""
    findings: list[Any] = [preflight(cfg) if runtime.is_main else None]
    dist.broadcast_object_list(findings, src=0)
    for error in findings[0].errors:
        # If no checkpoint of the run is complete, all ranks verify them and set them aside.
        if not isinstance(error, NoneValid):
            raise error
    notes: list[str] = findings[0].notes
    return notes


def _samples(cfg: Config, compute: Step, dataset: Dataset) -> Samples:
    row = torch.from_numpy(dataset[0]).long()
    return Samples(cfg, compute, row, dataset.positions(0) if cfg.data.document_mask else None)


def _metrics(cfg: Config, runtime: Runtime, folder: Path, step: int) -> Metrics:
    """Reports of the run; ValueError on every rank if rank 0 cannot write them."""
    try:
        with failing_together(ValueError):
            return Metrics(folder, cfg, runtime.is_main, step=step)
    except Failed as failed:
        raise ValueError(str(failed)) from None
