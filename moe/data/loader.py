"""The trainer's interface to data: datasets indexed by sample, and a loader with one cursor.

Row i of a dataset is S + 1 tokens. Invariants: row i depends on the data and on data.*, never on
the number of steps, ranks or hosts; each global batch is the same multiset of rows for every data
parallel size. Hence `consumed_samples` is the complete cursor.
Legend: B sequences of a micro-batch, S tokens of a sequence.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pkgutil import resolve_name
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from phalanx.configs.arithmetic.batch_sizes import ALWAYS, size_at
from phalanx.configs.schema import Config, DataConfig
from phalanx.configs.tables.capabilities import MASKED_ROWS
from phalanx.moe.data import datasets
from phalanx.moe.data.host_cache import DataError, digest
from phalanx.moe.data.packing import Packing, packing
from phalanx.moe.data.sources import Source
from phalanx.parallel.fault.agreement import Failed, agree, gather
from phalanx.parallel.fault.same_settings import differences, settings_of

Batch = dict[str, torch.Tensor]


class Samples(Protocol):
    """A dataset. Row i is int64 [S + 1], ids below the vocabulary, the same for every layout."""

    fingerprint: str  # digest of all that determines the rows
    sources: Sequence[Source]  # sources of the rows; empty for random tokens

    def source(self, index: int) -> int:
        """Index in `sources` of the source of a row."""
        ...

    def positions(self, index: int) -> np.ndarray:
        """int64 [S + 1]: positions of the tokens of row i in their pieces of documents."""
        ...

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> np.ndarray: ...


def build_datasets(
    cfg: Config, vocab_size: int, train_samples: int, valid_samples: int
) -> tuple[Samples, Samples | None]:
    """Datasets for training and, unless `valid_samples` is 0, validation.

    A dataset starts over, in another order, when its source is exhausted. Every rank must call
    this: one process of a host builds missing files in data.cache, and an error or different data
    on one rank raises the same DataError on all.
    """
    data, sizes = cfg.data, (train_samples, valid_samples)
    if train_samples < 1:
        raise DataError(
            "there are no training samples: run.steps x data.global_batch is not positive"
        )
    if data.source == "synthetic":
        train, valid = (Synthetic(vocab_size, data, size, part) for part, size in enumerate(sizes))
        return train, valid if valid_samples else None
    if data.source not in ("embedded", "indexed"):
        raise DataError(f"data.source={data.source} is not embedded, indexed or synthetic")
    plan = agreed(lambda: datasets.plan(data, vocab_size, sizes), lambda plan: plan.fingerprint)
    built = agreed(lambda: datasets.build(plan, vocab_size, sizes), lambda _: "")

    def build(data: DataConfig) -> Sequence[Samples]:
        return datasets.build(datasets.plan(data, vocab_size, sizes), vocab_size, sizes)

    parts = with_masks(data, build, built)
    return parts[0], parts[1] if valid_samples else None


def with_masks(
    data: DataConfig, build: Callable[[DataConfig], Sequence[Samples]], rows: Sequence[Samples]
) -> Sequence[Samples]:
    """Rows that `build` has made of `data`, with their loss mask if a source has one. Collective.

    Raises DataError on all ranks.
    """
    if all(source.labels == 1 for part in rows for source in part.sources):
        return rows
    return agreed(
        lambda: resolve_name(MASKED_ROWS)(data, build, rows), lambda rows: rows[0].fingerprint
    )


class Synthetic:
    """Uniform random tokens, a function of data.seed, part (0 training, 1 validation) and index."""

    sources: Sequence[Source] = ()

    def __init__(self, vocab_size: int, cfg: DataConfig, samples: int, part: int) -> None:
        self._vocab, self._row = vocab_size, cfg.sequence_length + 1
        self._samples, self._seed = samples, (cfg.seed, part)
        self.fingerprint = digest(["synthetic", vocab_size, cfg.sequence_length, *self._seed])

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> np.ndarray:
        return np.random.default_rng([*self._seed, index]).integers(self._vocab, size=self._row)

    def source(self, index: int) -> int:
        raise LookupError("random tokens have no source")

    def positions(self, index: int) -> np.ndarray:
        raise LookupError("random tokens have no documents")


def agreed[T](work: Callable[[], T], mark: Callable[[T], str]) -> T:
    """Run `work` on every rank; if one fails, or marks differ, all raise the same DataError."""
    error, result = None, None
    try:
        result = work()
    except DataError as failure:
        error = failure
    if dist.is_initialized():
        try:
            agree(None if error is None else str(error))
        except Failed as failed:
            raise DataError(str(failed)) from error
    if error is not None:
        raise error
    assert result is not None
    data = {"data": mark(result)}
    differing = differences(gather(settings_of(data, data))) if dist.is_initialized() else []
    if differing:
        raise DataError(
            f"hosts differ: {differing[0]}: copy the files of data.blend to every host, or use one "
            "Python everywhere for data.source=embedded"
        )
    return result


class Loader:
    """Micro-batches of one data parallel rank, read ahead by a thread.

    The next micro-batches of the ranks are rows consumed + dp_rank * B + [0, B), so the rows of a
    step are the same for every data parallel size, in another order. A batch is {tokens, labels,
    position_ids}, int64 [B, S], on the CPU (pinned if `pin`). With `documents` positions count from
    the start of each piece of a document, and there is a loss_mask, bool [B, S]: true if the label
    belongs to the token's document. A dataset with a method `counted`, bool [S + 1] of a row, also
    says which labels count. A row of more pieces than `places`, unless that is 0, is a DataError.
    `dataset` may be replaced by a longer one with the same rows. `global_batch` is a
    size, or sizes by the samples of the steps so far (`configs.arithmetic.batch_sizes.spans`),
    without those that rollbacks have undone: a step has its size however often it is computed.
    Raises DataError for batch sizes that do not divide, StopIteration after the last full one.
    """

    def __init__(
        self,
        dataset: Samples,
        micro_batch: int,
        global_batch: int | Sequence[tuple[int, int]],
        dp_rank: int,
        dp_size: int,
        consumed: int = 0,
        *,
        pin: bool = False,
        documents: bool = False,
        places: int = 0,
    ) -> None:
        self._sizes = [(ALWAYS, global_batch)] if isinstance(global_batch, int) else global_batch
        for _, size in self._sizes:
            if micro_batch < 1 or size < 1 or size % (micro_batch * dp_size):
                raise DataError(
                    f"data.global_batch={size} is not a multiple of data.micro_batch="
                    f"{micro_batch} x {dp_size} data parallel ranks"
                )
        assert 0 <= dp_rank < dp_size
        self.dataset, self._micro_batch = dataset, micro_batch
        self._stride, self._first = micro_batch * dp_size, micro_batch * dp_rank
        self._pin = pin
        self.documents, self._places = documents, places
        # One thread for files; more for an object store, which has a high latency.
        self._thread = ThreadPoolExecutor(getattr(dataset, "readers", 1), "loader")
        self._ahead: deque[Future[dict[str, np.ndarray]]] = deque()
        self._positions: torch.Tensor | None = None
        self.consumed_samples = consumed
        self.undone_samples = 0  # before the cursor; a rollback has undone their steps

    @property
    def step_samples(self) -> int:
        """Samples of the steps so far, without those that were undone."""
        return self.consumed_samples - self.undone_samples

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches of the next step."""
        return size_at(self._sizes, self.step_samples) // self._stride

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> Batch:
        if self.consumed_samples + self._stride > len(self.dataset):
            raise StopIteration
        self._fetch()
        batch = self._finish(self._ahead[0].result())
        self._ahead.popleft()
        self.consumed_samples += self._stride
        self._fetch()
        return batch

    def next_step(self) -> list[Batch]:
        """All micro-batches of one optimizer step, which may be rerun."""
        count = self.micro_batches
        if self.consumed_samples + count * self._stride > len(self.dataset):
            raise IndexError(f"the dataset ends at sample {len(self.dataset)}")
        return [next(self) for _ in range(count)]

    def next_rows(self) -> list[int]:
        """Row numbers of this rank's samples in the next step."""
        first = self.consumed_samples + self._first
        starts = [first + i * self._stride for i in range(self.micro_batches)]
        return [start + j for start in starts for j in range(self._micro_batch)]

    def state_dict(self) -> dict[str, int]:
        """The cursor: samples consumed by all ranks together, and how many of them are undone."""
        undone = {"undone_samples": self.undone_samples} if self.undone_samples else {}
        return {"consumed_samples": self.consumed_samples} | undone

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a cursor, which may be of another data parallel size."""
        self._drop()
        self.consumed_samples = int(state["consumed_samples"])
        self.undone_samples = int(state.get("undone_samples", 0))

    def roll_back(self, state: dict[str, int]) -> None:
        """Undo the steps after `state`; the cursor stays, so that their samples do not return."""
        before = int(state["consumed_samples"]) - int(state.get("undone_samples", 0))
        self.undone_samples = self.consumed_samples - before

    def close(self) -> None:
        """Stop reading ahead."""
        self._drop()
        self._thread.shutdown()

    def _drop(self) -> None:
        while self._ahead:
            self._ahead.pop().cancel()

    def _fetch(self) -> None:
        """Keep reads of one step, but at least two micro-batches, in flight."""
        while len(self._ahead) < max(2, self.micro_batches):
            start = self.consumed_samples + len(self._ahead) * self._stride
            if start + self._stride > len(self.dataset):
                return
            self._ahead.append(self._thread.submit(self._rows, start + self._first))

    def packing(self, sequences: int = 256) -> Packing:
        """Packing of the first sequences of the dataset, equal on every rank and after a resume."""
        numbers = range(min(sequences, len(self.dataset)))
        return packing(self.dataset.positions(i)[:-1] for i in numbers)

    def _rows(self, start: int) -> dict[str, np.ndarray]:
        """A batch, without positions that start at 0 in every row."""
        numbers = range(start, start + self._micro_batch)
        row = np.stack([self.dataset[i] for i in numbers])
        batch = {"tokens": row[:, :-1], "labels": row[:, 1:]}
        if counted := getattr(self.dataset, "counted", None):
            batch["loss_mask"] = np.stack([counted(i) for i in numbers])[:, 1:]
        if self.documents:
            position = np.stack([self._positions_of(i) for i in numbers])
            batch["position_ids"] = position[:, :-1]
            batch["loss_mask"] = (position[:, 1:] != 0) & batch.get("loss_mask", True)
        return {name: np.ascontiguousarray(array) for name, array in batch.items()}

    def _positions_of(self, number: int) -> np.ndarray:
        position = self.dataset.positions(number)
        pieces = int((position[:-1] == 0).sum())
        if 0 < self._places < pieces:
            raise DataError(
                f"sample {number} has {pieces} documents, and attention has slots for "
                f"{self._places}; set data.max_documents={pieces}, or kernels.attention=flex, "
                "which has no such limit"
            )
        return position

    def _finish(self, rows: dict[str, np.ndarray]) -> Batch:
        """Build a batch from its arrays.

        Pins in the caller's thread: a CUDA call of another thread would break a graph capture, and
        would use device 0.
        """
        batch = {name: self._pinned(torch.from_numpy(array)) for name, array in rows.items()}
        if self.documents:
            return batch
        if self._positions is None:
            tokens = batch["tokens"]
            self._positions = torch.arange(tokens.shape[1]).expand_as(tokens).contiguous()
            self._positions = self._pinned(self._positions)
        return {**batch, "position_ids": self._positions}

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory() if self._pin else tensor
