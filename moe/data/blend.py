"""The .bin/.idx pairs of a run, checked before anything is built: weights, split, ids, lengths.

They also give a model its vocabulary (`model.vocab_size=0`). Imports neither torch nor
Megatron-Core, so that checking a command line is fast.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import NamedTuple

import numpy as np

from phalanx.configs.addresses import is_address
from phalanx.configs.arithmetic.data_stages import parse as parse_stage
from phalanx.configs.knobs import overrides, pluralize
from phalanx.configs.schema import Config, DataConfig
from phalanx.configs.tables.capabilities import MASK_CHECK
from phalanx.moe.data.host_cache import DataError, cache_folder
from phalanx.moe.data.remote_files import beside
from phalanx.moe.data.token_files import Corpus, Sidecar, open_corpus

PARTS = ("training", "validation")

PADDING = 128
"""Multiple to which the rows of the embedding are padded. Unlike elsewhere not times
`parallel.tensor`: the model would depend on the layout, and a checkpoint would fit one only."""


@dataclass(frozen=True)
class SplitPart:
    """Training or validation part of one pair."""

    documents: int
    tokens: int


class Span(NamedTuple):
    """Samples that are mixed by the same weights, up to the first of the next span."""

    first: int  # number of its first sample
    weights: Sequence[float]  # weight of each pair; 0 for a pair that it does not read


def spans_within(spans: Sequence[Span], samples: int) -> Iterator[tuple[int, int, Sequence[float]]]:
    """First sample, end and weights of each span that begins within the first `samples`."""
    for span, after in itertools.zip_longest(spans, spans[1:]):
        end = samples if after is None else min(after.first, samples)
        if span.first < end:
            yield span.first, end, span.weights


@dataclass(frozen=True)
class Blend:
    """Checked pairs and their weights."""

    corpora: list[Corpus]
    parts: list[list[SplitPart]]  # training and validation part of each pair
    weights: list[float] | None
    """Weight of each pair; its training tokens if data.blend has none. None for a single pair."""
    split: str  # weights of the parts, as Megatron-Core reads them
    sequence: int  # tokens of a sample
    stages: list[Span]  # later weights of training (`data.stages`)

    def spans(self, part: int) -> list[Span]:
        """Weights of the samples of a part: 0 training, 1 validation."""
        return [Span(0, self.weights or [1.0]), *(self.stages if part == 0 else ())]

    def read(self, part: int, samples: int) -> list[float]:
        """Samples of each pair among the first `samples` of a part."""
        total = [0.0] * len(self.corpora)
        for first, end, weights in spans_within(self.spans(part), samples):
            for number, weight in enumerate(weights):
                total[number] += (end - first) * weight / sum(weights)
        return total

    def epochs(self, tokens: int) -> list[float]:
        """Epochs of each training part in a run of `tokens` tokens."""
        read = self.read(0, tokens // self.sequence)
        return [
            samples * self.sequence / training.tokens
            for samples, (training, _) in zip(read, self.parts, strict=True)
        ]


def open_blend(
    prefixes: Sequence[str],
    weights: list[float] | None,
    cfg: DataConfig,
    vocab_size: int,
    sizes: Sequence[int],
    trained_on: Sequence[Corpus] = (),
) -> Blend:
    """Open and check the pairs of a run.

    Args:
        weights: of each pair; None takes their numbers of tokens.
        vocab_size: upper bound of the ids.
        sizes: samples needed of each part.
        trained_on: pairs whose tokenizer these must have.

    Raises:
        DataError: a pair is missing, damaged, too short, or prepared for another vocabulary.
    """
    corpora = [opened(prefix, cfg) for prefix in prefixes]
    for corpus in corpora:
        if cfg.loss_mask and corpus.sidecar is not None and corpus.sidecar.labels:
            resolve_name(MASK_CHECK)(corpus, cfg)
    both = [*trained_on, *corpora]
    described = [(c.prefix, c.sidecar) for c in both if c.sidecar is not None]
    check_tokenizers(described, vocab_size)
    split = parse_split(cfg.split, sizes)
    parts = [_check_length(corpus, cfg, split, sizes) for corpus in corpora]
    if len(prefixes) > 1 and weights is None:
        weights = [float(training.tokens) for training, _ in parts]
    length = cfg.sequence_length
    stages = [Span(s.first(length), s.weights) for s in map(parse_stage, cfg.stages)]
    return Blend(corpora, parts, weights, split, length, stages)


def held_out(cfg: DataConfig) -> DataConfig:
    """Settings whose training part is the data of `data.validation`."""
    return replace(cfg, blend=cfg.validation, validation=[], stages=[], split="1")


def open_held_out(blend: Blend, cfg: DataConfig, vocab_size: int, samples: int) -> Blend:
    """Open and check the pairs of `data.validation`, which have the tokenizer of `blend`."""
    own = held_out(cfg)
    try:
        return open_blend(*parse_blend(own), own, vocab_size, (samples, 0), blend.corpora)
    except DataError as error:  # of files, which are those of another knob here
        raise DataError(str(error).replace("data.blend", "data.validation")) from None


def opened(prefix: str, cfg: DataConfig) -> Corpus:
    """One pair, checked. Raises DataError."""
    try:
        return open_corpus(prefix, cache_folder(cfg.cache))
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{error.filename} cannot be read (data.blend): {reason}") from None


def parse_blend(cfg: DataConfig) -> tuple[list[str], list[float] | None]:
    """-> prefixes, and weights if there are any (megatron.core.datasets.utils checks nothing)."""
    entries = [str(entry).strip() for entry in cfg.blend]
    numbers = [_number(entry) for entry in entries]
    if not entries:
        raise DataError("data.source=indexed needs data.blend, the prefixes of .bin/.idx files")
    if all(number is None for number in numbers):
        return [_located(entry) for entry in entries], None
    weights = [number for number in numbers[::2] if number is not None]
    paths = [entry for entry, number in zip(entries, numbers, strict=True) if number is None]
    if len(weights) != len(paths) or paths != entries[1::2]:
        shown = ",".join(entries)
        raise DataError(
            f"data.blend=[{shown}] must be prefixes, or weight,prefix,weight,prefix,..."
        )
    for weight, path in zip(weights, paths, strict=True):
        if not (math.isfinite(weight) and (weight > 0 or (weight == 0 and cfg.stages))):
            raise DataError(f"data.blend gives {path} the weight {weight}; it must be positive")
    return [_located(path) for path in paths], weights


def _located(entry: str) -> str:
    return entry.rstrip("/") if is_address(entry) else str(Path(entry).expanduser())


def parse_split(split: str, sizes: Sequence[int]) -> str:
    """data.split in the form that Megatron-Core reads."""
    parts = [_number(part) for part in split.split(",")]
    weights = [part for part in parts if part is not None and math.isfinite(part) and part >= 0]
    if len(weights) != len(parts) or not 1 <= len(parts) <= 3 or weights[0] <= 0:
        example = overrides({"data.split": "98,2"})
        raise DataError(f"data.split={split} must be one to three weights, as in {example}")
    if sizes[1] and (len(weights) < 2 or weights[1] == 0):
        example = overrides({"data.split": "98,2"})
        raise DataError(
            f"data.split={split} leaves nothing to validate on; set {example} or "
            "run.eval_interval=0"
        )
    return ",".join(f"{weight:.9f}" for weight in weights)


def bounds(split: str) -> list[tuple[float, float]]:
    """Bounds of training and validation part in [0, 1]: Megatron-Core's `split_matrix`."""
    weights = np.array([float(part) for part in split.split(",")] + [0.0, 0.0])[:3]
    ends = [0.0]
    for weight in (weights / weights.sum()).tolist():
        ends.append(ends[-1] + weight)
    return [(ends[0], ends[1]), (ends[1], ends[2])]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def check_tokenizers(described: Sequence[tuple[str, Sidecar]], vocab_size: int) -> None:
    """Check that pairs have one tokenizer, with ids below `vocab_size`. Raises DataError."""
    for prefix, sidecar in described:
        first, other = described[0]
        if not sidecar.same_tokenizer(other):
            raise DataError(
                f"data.blend mixes tokenizers: {other.tokenizer} in {first}.json, "
                f"{sidecar.tokenizer} in {prefix}.json; prepare all with one"
            )
    largest = max((sidecar.vocab_size for _, sidecar in described), default=0)
    for prefix, sidecar in described:
        if sidecar.vocab_size > vocab_size:
            raise DataError(
                f"{prefix}.json: ids of tokenizer {sidecar.tokenizer} go up to "
                f"{sidecar.vocab_size - 1}, but model.vocab_size={vocab_size}; "
                f"set model.vocab_size={-(-largest // PADDING) * PADDING}"
            )


def _check_length(
    corpus: Corpus, cfg: DataConfig, split: str, sizes: Sequence[int]
) -> list[SplitPart]:
    """Training and validation part; every part in use must have at least one sequence."""
    parts = []
    for name, size, within in zip(PARTS, sizes, bounds(split), strict=True):
        total = len(corpus.lengths)
        low, high = (round(bound * float(total)) for bound in within)
        tokens = int(corpus.lengths[low:high].sum(dtype=np.int64))
        parts.append(SplitPart(high - low, tokens))
        if size and tokens <= cfg.sequence_length:
            raise DataError(
                f"data.sequence_length={cfg.sequence_length} is longer than the data: the {name} "
                f"part of {corpus.prefix}.bin (data.split={cfg.split}) has "
                f"{pluralize(tokens, 'token')} in {pluralize(high - low, 'document')}, and a "
                "sequence takes one more than its length"
            )
    return parts


def fill(cfg: Config) -> None:
    """Set a `model.vocab_size` of 0 to that of the tokenizer of `data.blend`.

    Raises:
        DataError: the data has no description, or cannot be read.
    """
    if cfg.model.vocab_size:
        return
    prefixes, _ = parse_blend(cfg.data)
    described = _described(cfg, prefixes)
    if not described:
        for prefix in prefixes:
            opened(prefix, cfg.data)  # its errors matter more
        raise DataError(
            f"the vocabulary of {prefixes[0]}.bin is unknown, as {prefixes[0]}.json is missing; "
            "set model.vocab_size to the number of ids of its tokenizer"
        )
    multiple = math.lcm(PADDING, max(1, cfg.parallel.tensor))
    cfg.model.vocab_size = -(-_ids(described) // multiple) * multiple


def shown(cfg: Config) -> str:
    """`512, of which 400 are ids of wiki/tokenizer.json`; empty if the data has no description.

    Raises DataError if the data has more ids, or several tokenizers.
    """
    if cfg.data.source != "indexed":
        return ""
    described = _described(cfg, parse_blend(cfg.data)[0])
    if not described:
        return ""
    check_tokenizers(described, cfg.model.vocab_size)
    name = described[0][1].tokenizer
    return f"{cfg.model.vocab_size:,}, of which {_ids(described):,} are ids of {name}"


def _ids(described: list[tuple[str, Sidecar]]) -> int:
    return max(sidecar.vocab_size for _, sidecar in described)


def _described(cfg: Config, prefixes: list[str]) -> list[tuple[str, Sidecar]]:
    paths = [(prefix, Path(f"{beside(prefix, cfg.data.cache)}.json")) for prefix in prefixes]
    return [(prefix, Sidecar.read(path)) for prefix, path in paths if path.is_file()]
