"""Data of a run: datasets that are as long as its steps, and the micro-batches of this rank."""

from collections.abc import Iterator, Sequence
from typing import Any

from phalanx.configs.arithmetic.batch_sizes import samples_after, spans
from phalanx.configs.arithmetic.data_stages import begun
from phalanx.configs.knobs import pluralize
from phalanx.configs.schema import Config
from phalanx.moe.data.loader import Loader, Samples, build_datasets
from phalanx.moe.data.sources import stage_line
from phalanx.moe.job import Job


def datasets(cfg: Config, samples: int) -> tuple[Samples, Samples | None]:
    """Training set of so many samples, and the validation set if the run validates. Collective."""
    run = cfg.run
    valid = run.eval_batches * cfg.data.global_batch if run.eval_interval else 0
    return build_datasets(cfg, cfg.model.vocab_size, samples, valid)


def make_loader(
    cfg: Config, job: Job, dataset: Any, global_batch: int | Sequence[tuple[int, int]]
) -> Loader:
    """Loader of this rank's micro-batches.

    Args:
        cfg, job: configuration and job of the run.
        dataset: samples.
        global_batch: samples of a step; or `configs.arithmetic.batch_sizes.spans`.
    """
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
    """Micro-batches of the training steps.

    Args:
        cfg, job: configuration and job of the run.
        dataset: samples of all steps.
    """

    def __init__(self, cfg: Config, job: Job, dataset: Samples) -> None:
        self._cfg = cfg
        self.loader = make_loader(cfg, job, dataset, spans(cfg.data))
        self._batch = 0
        """Size of the last global batch that was reported."""

    def fit(self, step: int) -> None:
        """Fit the dataset to all steps after `step`, if the cursor was moved."""
        loader = self.loader
        left = max(0, self._cfg.run.steps - step)
        wanted = loader.undone_samples + samples_after(self._cfg.data, left, loader.step_samples)
        if wanted != len(loader.dataset):
            loader.dataset, _ = datasets(self._cfg, wanted)

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
