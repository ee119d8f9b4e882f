"""Validation after every `run.eval_interval` steps: loss, perplexity, bits per byte, by source.

A loss is the mean over the labels that count, so that the losses of the sources, weighted by their
labels, add up to the total. Losses come from the last pipeline stage and are summed by source on
the device, and over the ranks once a validation: they are the same on every layout up to rounding.

Legend: N samples of a rank in one step, P data sources.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from phalanx.configs.schema import Config
from phalanx.moe.data.loader import Samples
from phalanx.moe.data.sources import Source
from phalanx.moe.job import Job
from phalanx.moe.report.metrics import Metrics
from phalanx.moe.router import balance
from phalanx.moe.run.callbacks.callback import Callback
from phalanx.moe.run.progress import Progress, make_loader
from phalanx.moe.run.step import Step
from phalanx.parallel.engine import sum_over_world
from phalanx.parallel.fault.activity import set_activity


class SourceSums(NamedTuple):
    """Sums over the samples of a source."""

    loss: float
    labels: int  # number of labels that count
    samples: int  # number of samples, counted once by each context rank


class SourceLosses:
    """Sums of losses of P sources."""

    def __init__(self, sources: int, device: torch.device) -> None:
        self._sums_3P = torch.zeros(3, sources, dtype=torch.float64, device=device)

    def add(self, sources_N: Sequence[int], samples_2N: Tensor | None) -> None:
        """Add the samples of a step.

        The `samples_2N` have the sum of the losses and number of labels of each sample on this
        rank; None if another rank has the same samples.
        """
        if samples_2N is None:
            return
        numbers_N = torch.tensor(sources_N, device=samples_2N.device)
        onehot_NP = torch.nn.functional.one_hot(numbers_N, self._sums_3P.shape[1]).double()
        # A product, whose sums have a fixed order; those of index_add_ have none on a GPU.
        sums_3N = torch.cat((samples_2N, torch.ones_like(samples_2N[:1])))
        self._sums_3P += sums_3N.double() @ onehot_NP

    def totals(self) -> list[SourceSums]:
        """Sums by source over all ranks. Collective."""
        sums_P3 = sum_over_world(self._sums_3P).t().tolist()
        return [SourceSums(loss, round(labels), round(n)) for loss, labels, n in sums_P3]


def scores(
    steps: Sequence[tuple[float, int]], sources: Sequence[Source], totals: Sequence[SourceSums]
) -> dict[str, float]:
    """Scores of a validation, by their names in a log record.

    Args:
        steps: mean loss of each step in nats per label, and number of labels that count.
        sources: sources of the validation data; empty for random tokens.
        totals: result of `SourceLosses.totals`, for several sources.

    Returns:
        `valid_loss`, `valid_perplexity` and `valid_labels`, and `valid_bits_per_byte` if the bytes
        of text are known. With several sources also the scores of each source that had samples,
        named with / and its name, and only its labels if it had none. Bits per byte are bits per
        token over the mean bytes per token of the source. Empty without any label.
    """
    most = max(labels for _, labels in steps)
    if not most:
        return {}
    # Weights relative to the largest step: equal steps have weight 1, and the plain mean's bits.
    shares = [(loss, labels / most) for loss, labels in steps if labels]
    mean = sum(loss * share for loss, share in shares) / sum(share for _, share in shares)
    count = sum(labels for _, labels in steps)
    if len(sources) < 2:
        return _scores(mean, count, sources[0].bytes_per_token if sources else None)
    read = [(s, *of) for s, of in zip(sources, totals, strict=True) if of.samples]
    sizes = [s.bytes_per_token for s, _, labels, _ in read if labels]
    known = [size for size in sizes if size is not None]
    weights = [labels for _, _, labels, _ in read if labels]
    bytes_per_token = None
    if len(known) == len(sizes):
        total = sum(size * n for size, n in zip(known, weights, strict=True))
        bytes_per_token = total / sum(weights)
    record = _scores(mean, count, bytes_per_token)
    for source, loss, labels, _ in read:
        of_source: dict[str, float] = {"valid_labels": 0}
        if labels:
            of_source = _scores(loss / labels, labels, source.bytes_per_token)
        record |= {f"{key}/{source.name}": value for key, value in of_source.items()}
    return record


def _scores(loss: float, labels: int, bytes_per_token: float | None) -> dict[str, float]:
    perplexity = math.exp(loss) if loss < 700 else math.inf
    record = {"valid_loss": loss, "valid_perplexity": perplexity, "valid_labels": labels}
    if bytes_per_token:
        record["valid_bits_per_byte"] = loss / math.log(2) / bytes_per_token
    return record


class Validation(Callback):
    """Scores of the validation batches."""

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
        """Scores by name (`moe.run.callbacks.validation`); empty if none of the labels counts."""
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
