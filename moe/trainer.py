"""The training loop: data -> forward and backward -> update -> report -> checkpoint.

The host reads from the device after the backward only: loss, whether any rank was asked to stop,
and overflow of the expert row budget. A step that overflowed is run again with more rows; a step
that is not finite ends the run before the parameters are touched.
"""

import gc
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.utils import get_batch_on_this_cp_rank
from torch.profiler import record_function

from configs.schema import Config
from configs.validate import ConfigError
from moe import balance
from moe.data import Loader, build_datasets
from moe.failure import give_up
from moe.metrics import Metrics
from moe.pace import Pace
from moe.profile import Profiler
from moe.setup import Job, setup
from moe.start import describe
from parallel.agreement import Failed, agree
from parallel.checkpoint import Checkpointer
from parallel.engine import Diverged, sum_over_world
from parallel.runtime import Runtime, StopSignal, start
from parallel.runtime import stop as stop_runtime

Batch = dict[str, torch.Tensor]


class Trainer:
    """One run on this rank.

    Args:
        cfg: validated config.
        runtime: this process.
        stop: tells whether a signal asked this process to stop.
    """

    def __init__(self, cfg: Config, runtime: Runtime, stop: StopSignal) -> None:
        self.cfg, self.runtime, self.stop = cfg, runtime, stop
        self.folder = Path(cfg.run.dir) / cfg.run.name
        self.job: Job = setup(cfg, runtime)
        MTPLossLoggingHelper.clean_metrics_in_tracker()  # kept by Megatron-Core for the process
        train_set, self.valid_set = build_datasets(
            cfg,
            cfg.model.vocab_size,
            cfg.run.steps * cfg.data.global_batch,
            cfg.run.eval_batches * cfg.data.global_batch if cfg.run.eval_interval else 0,
        )
        self.loader = self._loader(train_set)
        self.step = 0
        self.checkpoints = Checkpointer(
            self.folder / "checkpoints",
            keep=cfg.run.keep,
            async_save=cfg.run.async_save,
            dp_cp_group=self.job.groups.pg.dp_cp,
        )
        self.resumed = self._resume()
        self.metrics = self._metrics()
        self.pace = Pace(cfg, runtime)

    # --- the loop ---------------------------------------------------------------------------------

    def fit(self) -> None:
        """Train to `run.steps`, or to the step at which a signal arrives.

        Raises:
            Diverged: a step was not finite; the checkpoints before it are there.
            CheckpointError: one could not be written.
            DataError: on this rank alone, a sample could not be used.
        """
        if self.runtime.is_main:
            self.metrics.text(describe(self.job, self.resumed, self.loader))
        self.job.engine.train()
        try:
            run, main = self.cfg.run, self.runtime.is_main
            profiled = Profiler(run.profile, self.folder, main, self.step, self.metrics.event)
            with _no_gc(), profiled as profiler:
                self.pace.restart(self.step)
                saved = self._steps(profiler)
        except Diverged:
            self.checkpoints.close()  # one may be on its way
            self.metrics.close(ended="diverged")
            raise
        if self.step > saved and self.cfg.run.save_interval >= 0:
            self._save()
        self.checkpoints.close()
        self.metrics.close(ended="done" if self.step >= self.cfg.run.steps else "stopped")
        self.loader.close()

    def _steps(self, profiler: Profiler) -> int:
        """All steps and what is due between them; the last step that was saved."""
        run, saved = self.cfg.run, self.step
        if self.step >= run.steps:
            more = "raise run.steps, or set another run.name"
            self.metrics.event(f"all {run.steps} steps of this run are done: {more}")
        while self.step < run.steps:
            stopping = self._train_step()
            profiler.step(self.step)
            self.checkpoints.poll()
            if self.step % 500 == 0:
                gc.collect()
            if run.eval_interval and self.step % run.eval_interval == 0:
                self.metrics.log({"step": self.step, "valid_loss": self.validate()})
                self.pace.restart(self.step)
            if run.save_interval > 0 and self.step % run.save_interval == 0:
                self._save()
                saved = self.step
                self.pace.restart(self.step)
            if stopping:
                self.metrics.event(f"stopping after step {self.step}: a signal asked for it")
                break
        return saved

    def _train_step(self) -> bool:
        """One optimizer step; True if a rank was asked to stop."""
        engine = self.job.engine
        began = time.perf_counter()
        with record_function("data"):
            batches = self.loader.next_step()
        waited = time.perf_counter() - began
        loss, mtp_loss, stopping = self._run_until_it_fits(batches)
        if not math.isfinite(loss):
            raise Diverged(
                f"the loss of step {self.step + 1} is {loss}; the parameters are unchanged"
            )
        with record_function("optimizer"):
            norm = engine.step()
        self.step += 1
        if self.step % self.cfg.run.log_interval == 0 or self.step == self.cfg.run.steps:
            record = {"loss": loss, "grad_norm": norm, "lr": engine.lr, "data_time": waited}
            if self.cfg.model.mtp_layers:
                record["mtp_loss"] = mtp_loss
            self._log(record)
        return stopping

    def _run_until_it_fits(
        self, batches: list[Batch], forward_only: bool = False
    ) -> tuple[float, float, bool]:
        """Forward and backward of a step, again while experts need more rows than they have."""
        engine, budget = self.job.engine, self.job.budget
        before = balance.snapshot(engine.modules)
        while True:
            if not forward_only:
                engine.zero_grad()
            totals = self._totals(self._forward_backward(batches, forward_only))
            if not budget.overflowed(torch.distributed.group.WORLD):
                return totals
            budget.grow()
            balance.restore(engine.modules, before)

    def _forward_backward(self, batches: list[Batch], forward_only: bool = False) -> list[Any]:
        data = self.cfg.data
        return self.job.engine.forward_backward(
            self._forward_step,
            [iter(batches) for _ in self.job.engine.chunks],
            microbatches=len(batches),
            sequence=data.sequence_length,
            micro_batch=data.micro_batch,
            forward_only=forward_only,
        )

    def _forward_step(self, batches: Iterator[Batch], chunk: torch.nn.Module) -> tuple[Any, Any]:
        batch = {k: v.to(self.runtime.device, non_blocking=True) for k, v in next(batches).items()}
        if self.cfg.parallel.context > 1:
            batch = get_batch_on_this_cp_rank(batch, False, self.job.groups.pg.cp)
        output = chunk(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        return output, _mean_loss

    def _totals(self, reports: list[dict[str, torch.Tensor]]) -> tuple[float, float, bool]:
        """(loss, MTP loss, stop) over all ranks; the one host read of the step."""
        totals = torch.zeros(4, device=self.runtime.device)
        if reports:  # last pipeline stage
            totals[0] = torch.stack([r["loss"] for r in reports]).mean()
            totals[1] = 1
            mtp = MTPLossLoggingHelper.tracker.get("loss_values")
            if mtp is not None:
                totals[2] = mtp.mean() / len(reports) * self.job.mtp_weight
                MTPLossLoggingHelper.clean_metrics_in_tracker()
        totals[3] = float(self.stop.received is not None)
        loss, ranks, mtp_loss, stop = sum_over_world(totals).tolist()
        return loss / ranks, mtp_loss / ranks, stop > 0

    # --- around the loop --------------------------------------------------------------------------

    def validate(self) -> float:
        """Mean loss over the validation batches, in nats per token."""
        engine, loader = self.job.engine, self._loader(self.valid_set)
        engine.eval()
        losses = []
        with torch.no_grad(), record_function("validation"):
            for _ in range(self.cfg.run.eval_batches):
                losses.append(self._run_until_it_fits(loader.next_step(), forward_only=True)[0])
        engine.train()
        loader.close()
        return sum(losses) / len(losses)

    def _loader(self, dataset: Any) -> Loader:
        data, job = self.cfg.data, self.job
        return Loader(
            dataset,
            data.micro_batch,
            data.global_batch,
            job.groups.data_rank,
            job.data_parallel,
            pin=self.runtime.device.type == "cuda",
        )

    def _log(self, record: dict[str, Any]) -> None:
        engine = self.job.engine
        # Reads from the device: the clock below has seen the whole of every step until here.
        load = balance.collect(engine.modules, engine.config, self.job.groups.pg)
        balance.reset(engine.modules)
        record |= {"step": self.step, "reruns": self.job.budget.reruns}
        record |= self.pace.rates(self.step)
        record |= {"load_max": load.worst, "load_p95": load.p95, "dead_experts": load.dead}
        record |= {f"balance/{name}": value for name, value in load.losses.items() if value}
        self.metrics.log(record)

    def _metrics(self) -> Metrics:
        """The reports of the run; ValueError on every rank if the main one cannot write them."""
        metrics, problem = None, None
        try:
            metrics = Metrics(self.folder, self.cfg, self.runtime.is_main, step=self.step)
        except ValueError as error:
            problem = str(error)
        try:
            agree(problem)
        except Failed as failed:
            raise ValueError(str(failed)) from None
        assert metrics is not None
        return metrics

    def _state(self) -> dict[str, Any]:
        return {"config": asdict(self.cfg), "step": self.step, "data": self.loader.state_dict()}

    def _save(self) -> None:
        engine = self.job.engine
        with record_function("checkpoint"):
            self.checkpoints.save(
                self.step, engine.chunks, engine.optimizer, engine.scheduler, self._state()
            )
        how = "saving in the background" if self.cfg.run.async_save else "saved"
        self.metrics.event(f"{how}: checkpoint of step {self.step} in {self.checkpoints.folder}")
        gc.collect()

    def _resume(self) -> str:
        how = self.cfg.run.resume
        if how == "never":
            return "from scratch (run.resume=never)"
        path = self.checkpoints.newest() if how == "auto" else Path(how)
        if path is None:
            return "from scratch (no checkpoint in the run folder)"
        engine = self.job.engine
        state = self.checkpoints.load(
            path, engine.chunks, engine.optimizer, engine.scheduler, asdict(self.cfg)
        )
        self.step = state["step"]
        self.loader.load_state_dict(state["data"])
        return f"resumed step {self.step} from {path}"


@contextmanager
def _no_gc() -> Iterator[None]:
    """Garbage is collected at checkpoints and every 500 steps only, on all ranks at once."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def _mean_loss(loss_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum, count and report of a micro-batch; Megatron-Core divides the sum by the count."""
    total = loss_BS.float().sum()
    count = torch.full((), loss_BS.numel(), dtype=torch.int32, device=loss_BS.device)
    return total, count, {"loss": total.detach() / loss_BS.numel()}


def run(cfg: Config) -> int:
    """Train; the process's exit code (see train.py)."""
    trainer = None
    with StopSignal() as stop:
        try:
            runtime = start(
                seed=cfg.run.seed, timeout=cfg.parallel.timeout, deterministic=cfg.run.deterministic
            )
            if cfg.run.device == "cuda" and runtime.device.type != "cuda":
                raise ConfigError("run.device=cuda: torch sees no GPU here; set run.device=auto")
            trainer = Trainer(cfg, runtime, stop)
            trainer.fit()
        except Exception as error:
            rank = int(os.environ.get("RANK", "0"))
            return give_up(error, stop, rank=rank, training=trainer is not None)
    stop_runtime()
    return 0
