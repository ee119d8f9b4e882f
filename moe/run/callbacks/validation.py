"""Validation: losses of held-out batches after every `run.eval_interval` steps."""

import torch
from torch.profiler import record_function

from phalanx.configs.schema import Config
from phalanx.moe.data.loader import Samples
from phalanx.moe.job import Job
from phalanx.moe.report.metrics import Metrics
from phalanx.moe.router import balance
from phalanx.moe.run.callbacks.callback import Callback
from phalanx.moe.run.callbacks.scores import SourceLosses, scores
from phalanx.moe.run.data import make_loader
from phalanx.moe.run.progress import Progress
from phalanx.moe.run.step import Step
from phalanx.parallel.fault.activity import set_activity


class Validation(Callback):
    """Scores of the validation batches.

    Args:
        cfg, job, compute: configuration, job and step of the run.
        dataset: validation samples.
        progress: step and tokens of a record.
        metrics: sink of the scores.
    """

    def __init__(
        self,
        cfg: Config,
        job: Job,
        compute: Step,
        dataset: Samples,
        progress: Progress,
        metrics: Metrics,
    ) -> None:
        super().__init__(cfg.run.eval_interval)
        self._cfg, self._job, self._compute, self._dataset = cfg, job, compute, dataset
        self._progress, self._metrics = progress, metrics

    def __call__(self, step: int) -> None:
        if record := self.scores(step):
            self._metrics.log({"step": step, "tokens": self._progress.tokens} | record)
        else:
            self._metrics.event(
                f"the validation after step {step} has no loss: none of its labels counts; "
                "raise run.eval_batches or check the documents of the validation data"
            )
        self._metrics.clock.lap("validation")

    def scores(self, step: int) -> dict[str, float]:
        """Scores by name (`moe.run.callbacks.scores`); empty if none of the labels counts."""
        rows, sources = self._dataset, self._dataset.sources
        engine, data = self._job.engine, self._cfg.data
        loader = make_loader(self._cfg, self._job, rows, data.global_batch)
        set_activity(f"step {step}: validation")
        engine.eval()
        steps, before = list[tuple[float, int]](), balance.snapshot(engine.modules)
        device = self._job.runtime.device
        by_source = SourceLosses(len(sources), device) if len(sources) > 1 else None
        with torch.no_grad(), record_function("validation"):
            for _ in range(self._cfg.run.eval_batches):
                numbers = loader.next_rows()
                totals = self._compute(loader.next_step(), before, forward_only=True)
                self._metrics.reruns(totals.reruns, f"the validation after step {step}")
                steps.append((totals.loss, totals.labels))
                if by_source is not None:
                    by_source.add([rows.source(n) for n in numbers], self._compute.sample_losses)
        engine.train()
        loader.close()
        return scores(steps, sources, [] if by_source is None else by_source.totals())
