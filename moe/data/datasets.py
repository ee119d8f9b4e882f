"""Rows of .bin/.idx pairs: Megatron-Core's datasets, checked before and indexed once per host.

Splits, blends, shuffling and sample indices are Megatron-Core's; endless epochs and the cache of
the index are added here. Invariant: row i depends on the data and on data.*, never on the number
of steps, ranks or hosts.
Legend: S tokens of a sequence.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import megatron.core
import numpy as np
from megatron.core.datasets import helpers
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.utils import Split

from phalanx.configs.redact import redacted
from phalanx.configs.schema import DataConfig
from phalanx.moe.data.blend import (
    PARTS,
    Blend,
    Span,
    SplitPart,
    held_out,
    open_blend,
    open_held_out,
    parse_blend,
    spans_within,
)
from phalanx.moe.data.host_cache import DataError, cache_folder, digest, shared_arrays
from phalanx.moe.data.packing import positions
from phalanx.moe.data.remote_files import READERS
from phalanx.moe.data.sources import Source
from phalanx.moe.data.token_files import BYTES, Corpus, embedded
from phalanx.moe.text import short_names


class Indexed:
    """Rows of .bin/.idx pairs, each checked against the vocabulary before it is used."""

    def __init__(
        self,
        rows: Any,
        samples: int,
        vocab_size: int,
        fingerprint: str,
        sources: list[Source],
        readers: int = 1,
    ) -> None:
        self._rows, self._samples, self._vocab = rows, samples, vocab_size
        self.fingerprint, self.readers = fingerprint, readers
        self.sources: Sequence[Source] = sources

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> np.ndarray:
        if not 0 <= index < self._samples:
            raise IndexError(f"sample {index} of {self._samples}")
        item = self._rows[index]
        row = item["text"]
        if row.min() < 0 or row.max() >= self._vocab:
            wrong = row[(row < 0) | (row >= self._vocab)][0]
            raise DataError(
                f"sample {index}, from {item['prefix']}.bin, has token id {wrong}, but "
                f"model.vocab_size={self._vocab}; set model.vocab_size or prepare the data again"
            )
        return row

    def positions(self, index: int) -> np.ndarray:
        """int64 [S + 1]: positions of the tokens of a row in their pieces of documents."""
        return positions(self._rows.pieces(index))

    @property
    def parts(self) -> list[Any]:
        """Rows of each source."""
        return list(getattr(self._rows, "datasets", [self._rows]))

    def source(self, index: int) -> int:
        """Number in `sources` of the one that a row comes from."""
        return int(self._rows.dataset_index[index]) if isinstance(self._rows, _Blend) else 0


@dataclass
class _IndexConfig(GPTDatasetConfig):
    """Megatron-Core's settings.

    Its own index cache stays off (`path_to_cache` empty): only global rank 0 writes it, so that a
    host without a shared cache would find nothing.
    """

    index_folder: Path = Path()
    corpora: dict[str, Corpus] = field(default_factory=dict)  # corpus by local prefix
    spans: dict[Split, list[Span]] = field(default_factory=dict)
    """Weights of the samples of each part."""


class _Tokens:
    """Tokenizer attributes that GPTDataset reads; unused without resets and masks."""

    eod = 0
    vocab_size = None
    unique_identifiers: dict[str, str] = {}  # noqa: RUF012


@dataclass
class Plan:
    """Checked sources of a run."""

    config: _IndexConfig
    fingerprint: str  # digest of data and settings
    sources: list[list[Source]]  # sources of each part; empty for a part that is not read
    held_out: "Plan | None" = None  # its training part is the validation data of `data.validation`


def plan(cfg: DataConfig, vocab_size: int, sizes: Sequence[int]) -> Plan:
    """Find and check the sources; `sizes` are the samples needed of each part. Raises DataError."""
    cache = cache_folder(cfg.cache)
    if cfg.source == "embedded":
        prefixes, weights = [embedded(cache)], None
    else:
        prefixes, weights = parse_blend(cfg)
    own = (sizes[0], 0) if cfg.validation else sizes
    blend = open_blend(prefixes, weights, cfg, vocab_size, own)
    training = _planned(cfg, blend, own)
    if not cfg.validation or not sizes[1]:
        return training
    held = open_held_out(blend, cfg, vocab_size, sizes[1])
    validation = _planned(held_out(cfg), held, (sizes[1], 0))
    marks = [training.fingerprint, validation.fingerprint]
    sources = [training.sources[0], validation.sources[0]]
    return Plan(training.config, digest(marks), sources, validation)


def _planned(cfg: DataConfig, blend: Blend, sizes: Sequence[int]) -> Plan:
    config = _IndexConfig(
        random_seed=cfg.seed,
        sequence_length=cfg.sequence_length,
        # Megatron-Core takes no weight of 0; `_Blend` mixes by the spans where there is one.
        blend=(
            [corpus.local for corpus in blend.corpora],
            blend.weights and [weight or 1.0 for weight in blend.weights],
        ),
        split=blend.split,
        path_to_cache="",
        tokenizer=_Tokens(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        index_folder=cache_folder(cfg.cache) / "index",
        corpora={corpus.local: corpus for corpus in blend.corpora},
        spans={Split.train: blend.spans(0), Split.valid: blend.spans(1)},
    )
    names = short_names(redacted([corpus.prefix for corpus in blend.corpora]))
    names = ["embedded"] if cfg.source == "embedded" else names
    sources = [
        [
            _source(name, corpus, parts[part], samples, samples / size, cfg)
            for name, corpus, parts, samples in zip(
                names, blend.corpora, blend.parts, blend.read(part, size), strict=True
            )
        ]
        if size
        else []
        for part, size in enumerate(sizes)
    ]
    stamps = [corpus.stamp for corpus in blend.corpora]
    content = [stamps, blend.weights, config.split, cfg.sequence_length, cfg.seed]
    mark = digest([*content, *([blend.stages] if blend.stages else [])])
    return Plan(config, mark, sources)


def _source(
    name: str, corpus: Corpus, part: SplitPart, samples: float, share: float, cfg: DataConfig
) -> Source:
    sidecar = corpus.sidecar if cfg.loss_mask else None
    return Source(
        name=name,
        weight=share,
        documents=part.documents,
        tokens=part.tokens,
        epoch_samples=(part.tokens - 1) // cfg.sequence_length,
        samples=samples,
        bytes_per_token=_bytes_per_token(corpus, part),
        labels=sidecar.labels / sidecar.tokens if sidecar and sidecar.labels else 1.0,
        stamp=corpus.stamp,
    )


def _bytes_per_token(corpus: Corpus, part: SplitPart) -> float | None:
    """UTF-8 bytes per token; exact if ids are bytes, since all but the end tokens are text."""
    sidecar = corpus.sidecar
    if sidecar is None:
        return None
    if sidecar.tokenizer == BYTES and not sidecar.tokenizer_sha256:
        return 1 - part.documents / part.tokens
    return sidecar.text_bytes / sidecar.tokens if sidecar.text_bytes > 0 else None


def build(checked: Plan, vocab_size: int, sizes: Sequence[int]) -> list[Indexed]:
    """Training and validation rows. Raises DataError if data.cache cannot hold the index."""
    if checked.held_out is not None:
        plans = (replace(checked, held_out=None), sizes[0]), (checked.held_out, sizes[1])
        return [build(each, vocab_size, (size, 0))[0] for each, size in plans]
    built = _Builder(_Endless, [*sizes, 0], lambda: True, checked.config).build()
    views = []
    readers = READERS if any(corpus.remote for corpus in checked.config.corpora.values()) else 1
    parts = zip(PARTS, built, sizes, checked.sources, strict=False)
    for part, rows, size, sources in parts:
        mark = digest([checked.fingerprint, part])
        views.append(Indexed(rows, size, vocab_size, mark, sources, readers))
        for source in getattr(rows, "datasets", [rows]) if size else ():
            source[0]  # builds the index here, where a failure can be reported on every rank
    return views


class _Builder(BlendedMegatronDatasetBuilder):
    """Splits and blends as Megatron-Core does, but builds on every rank (see `shared_arrays`)."""

    @staticmethod
    def build_generic_dataset(
        cls: type, is_built_on_rank: Callable[[], bool], synchronize_ranks: bool, *args: Any
    ) -> Any:
        """Build a dataset; None for a part without samples, which may be empty."""
        if cls is BlendedDataset:
            return _Blend(*args) if args[2] else None
        return cls(*args) if args[3] else None


class _Endless(MegatronDataset):
    """Endless epochs of a part of a pair, each shuffled with its own seed.

    GPTDataset would shuffle all epochs together, so that the order would depend on run.steps.
    """

    first = 0  # row that is read as the first one

    def __init__(
        self,
        dataset: IndexedDataset,
        dataset_path: str,
        indices: np.ndarray,
        num_samples: int,
        index_split: Split,
        config: _IndexConfig,
    ) -> None:
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)
        tokens = int(dataset.sequence_lengths[indices].sum(dtype=np.int64))
        self._epoch_samples = (tokens - 1) // config.sequence_length
        self._current: tuple[int, _Epoch] | None = None

    numel_low_level_dataset = staticmethod(GPTDataset.numel_low_level_dataset)

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: _IndexConfig) -> IndexedDataset:
        corpus = config.corpora[dataset_path]
        if corpus.remote is not None:
            dataset = IndexedDataset(dataset_path, mmap=False)
            dataset.bin_reader = corpus.remote.reader()
        else:
            dataset = GPTDataset.build_low_level_dataset(dataset_path, config)
            dataset.bin_reader = BinReader(Path(f"{dataset_path}.bin"))
        if corpus.joined:
            dataset.index = WholeDocuments(dataset.index, corpus.lengths)
        return dataset

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> dict[str, Any]:
        epoch, offset = self._locate(index)
        return {"text": epoch.row(offset), "prefix": self.config.corpora[self.dataset_path].prefix}

    def pieces(self, index: int) -> np.ndarray:
        """int64 [P]: tokens of the pieces of documents in a row, in their order."""
        epoch, offset = self._locate(index)
        return epoch.pieces(offset)

    def _locate(self, index: int) -> "tuple[_Epoch, int]":
        number, offset = divmod(int(index) + self.first, self._epoch_samples)
        current = self._current  # another loader's thread may replace it concurrently
        if current is None or current[0] != number:
            current = self._current = (number, self._epoch(number))
        return current[1], offset

    def _epoch(self, number: int) -> "_Epoch":
        config = replace(self.config, random_seed=self.config.random_seed + number)
        args = (self.dataset, self.dataset_path, self.indices, None, self.index_split)
        return _Epoch(*args, config)


class _Epoch(GPTDataset):
    """One epoch; its index is built once and mapped by the ranks of a host."""

    def _build_document_sample_shuffle_indices(self) -> tuple[np.ndarray, ...]:
        config = self.config
        key = {
            "megatron-core": megatron.core.__version__,
            "data": config.corpora[self.dataset_path].stamp,
            "documents": [int(self.indices[0]), int(self.indices[-1]) + 1],
            "sequence_length": config.sequence_length,
            "seed": config.random_seed,
        }
        with _without_cache_warning():
            build = super()._build_document_sample_shuffle_indices
            return shared_arrays(config.index_folder, "epoch", key, build)

    def row(self, index: int) -> np.ndarray:
        """Tokens of a row, int64 [S + 1]."""
        return self._query_document_sample_shuffle_indices(index)[0]

    def pieces(self, index: int) -> np.ndarray:
        """int64 [P]: tokens of each document in the row, in their order."""
        sample = self.shuffle_index[index]
        # For the documents of the row's first and last token: number in the order of the epoch,
        # and offset of the token in the document.
        (first, skipped), (last, before) = self.sample_index[sample : sample + 2].tolist()
        documents = self.document_index[first : last + 1]
        lengths_P = self.dataset.sequence_lengths[documents].astype(np.int64)
        lengths_P[-1] = before + 1  # a row has one token more than its sequence
        lengths_P[0] -= skipped
        return lengths_P


class _Blend(BlendedDataset):
    """Source of each row, by weight alone, so that a longer run starts with the same rows."""

    def pieces(self, index: int) -> np.ndarray:
        """int64 [P]: tokens of the pieces of documents in a row."""
        source, row = self.dataset_index[index], self.dataset_sample_index[index]
        return self.datasets[source].pieces(row)  # type: ignore[no-any-return]

    def _build_indices(self) -> tuple[np.ndarray, ...]:
        key: dict[str, Any] = {"megatron-core": megatron.core.__version__, "size": self.size}
        spans, build = self.config.spans[self.split], super()._build_indices
        if len(spans) == 1 and all(spans[0].weights):
            key["weights"] = self.weights
        else:
            key["spans"], build = spans, partial(mixed, spans, self.size)
        with _without_cache_warning():
            return shared_arrays(self.config.index_folder, "blend", key, build)


def mixed(spans: Sequence[Span], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Source of each of the first `size` rows, int16, and its number in the source, int64."""
    sources, rows = np.zeros(size, np.int16), np.zeros(size, np.int64)
    taken = np.zeros(len(spans[0].weights), np.int64)
    for first, end, weights in spans_within(spans, size):
        read = np.flatnonzero(weights)
        shares = [weight / sum(weights) for weight in weights if weight]
        own, row = np.zeros(end - first, np.int16), np.zeros(end - first, np.int64)
        helpers.build_blending_indices(own, row, shares, len(read), end - first, False)
        sources[first:end] = read[own]
        rows[first:end] = row + taken[read[own]]
        taken += np.bincount(sources[first:end], minlength=len(taken))
    return sources, rows


@contextlib.contextmanager
def _without_cache_warning() -> Iterator[None]:
    """Suppress Megatron-Core's warning that it writes no index cache of its own, as intended."""
    names = ("gpt_dataset", "blended_dataset")
    loggers = [logging.getLogger(f"megatron.core.datasets.{name}") for name in names]

    def other(record: logging.LogRecord) -> bool:
        return "path_to_cache is None" not in record.getMessage()

    for logger in loggers:
        logger.addFilter(other)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(other)


class BinReader:
    """An open .bin file, as `bin_reader` of IndexedDataset. Threads may share it.

    Replaces Megatron-Core's memory map, whose reader is killed by SIGBUS when the file is
    truncated: a read returns fewer bytes, which can be reported.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("rb", buffering=0)
        self._mark = self._seen()

    def read(self, dtype: type[np.number], count: int, offset: int) -> np.ndarray:
        """`count` ids from byte `offset`; a DataError if the file is unreadable or has changed."""
        size = count * np.dtype(dtype).itemsize
        try:
            raw = os.pread(self._file.fileno(), size, offset)
            if len(raw) == size and self._seen() == self._mark:
                return np.frombuffer(raw, dtype)
        except OSError as error:
            raise DataError(f"{self._path} cannot be read: {error}") from None
        raise DataError(
            f"{self._path} was changed while this run reads it; restore or rebuild the data, and "
            "restart the run: it continues from its newest checkpoint"
        )

    def _seen(self) -> tuple[int, int]:
        status = os.fstat(self._file.fileno())
        return status.st_size, status.st_mtime_ns


class WholeDocuments:
    """The index of an IndexedDataset, with document i in place of sequence i.

    Megatron-Core's datasets split, shuffle and cut by sequence. The sequences of a document are
    contiguous in the .bin, so that a document is a range of it too. The `lengths` are int32
    [documents], in tokens.
    """

    sequence_modes = None

    def __init__(self, index: Any, lengths: np.ndarray) -> None:
        self._index, self.sequence_lengths = index, lengths
        self.dtype = index.dtype

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __getitem__(self, number: int) -> tuple[np.int64, np.int32, None]:
        first, pointers = self._index.document_indices[number], self._index.sequence_pointers
        # Documents after the last sequence are empty.
        pointer = pointers[first] if first < len(pointers) else np.int64(0)
        return pointer, self.sequence_lengths[number], None
