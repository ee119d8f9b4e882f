"""The .bin/.idx pairs of a run, checked before anything is built: weights, split, ids, lengths.

Between `moe.data.token_files`, which opens one pair, and `moe.data.datasets`, which makes rows of
all. Imports neither torch nor Megatron-Core, so that checking a command line is fast.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from phalanx.configs.addresses import is_address
from phalanx.configs.knobs import overrides
from phalanx.configs.schema import DataConfig
from phalanx.moe.data.host_cache import DataError, cache_folder
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


@dataclass(frozen=True)
class Blend:
    """Checked pairs and their weights."""

    corpora: list[Corpus]
    parts: list[list[SplitPart]]
    """Training and validation part of each pair."""
    weights: list[float] | None
    """Weight of each pair; its training tokens if data.blend has none. None for a single pair."""
    split: str
    """Weights of the parts, as Megatron-Core reads them."""

    @property
    def shares(self) -> list[float]:
        """Fraction of the samples of each pair."""
        weights = self.weights or [1.0]
        return [weight / sum(weights) for weight in weights]

    def epochs(self, tokens: int) -> list[float]:
        """Epochs of each training part in a run of `tokens` tokens."""
        return [
            tokens * share / training.tokens
            for share, (training, _) in zip(self.shares, self.parts, strict=True)
        ]


def open_blend(
    prefixes: Sequence[str],
    weights: list[float] | None,
    cfg: DataConfig,
    vocab_size: int,
    sizes: Sequence[int],
) -> Blend:
    """Open and check the pairs of a run.

    Args:
        prefixes: of the pairs.
        weights: of each pair; None takes their numbers of tokens.
        cfg: split and sequence length.
        vocab_size: upper bound of the ids.
        sizes: samples needed of each part.

    Raises:
        DataError: a pair is missing, damaged, too short, or prepared for another vocabulary.
    """
    corpora = [opened(prefix, cfg) for prefix in prefixes]
    described = [(c.prefix, c.sidecar) for c in corpora if c.sidecar is not None]
    check_tokenizers(described, vocab_size)
    split = parse_split(cfg.split, sizes)
    parts = [_check_length(corpus, cfg, split, sizes) for corpus in corpora]
    if len(prefixes) > 1 and weights is None:
        weights = [float(training.tokens) for training, _ in parts]
    return Blend(corpora, parts, weights, split)


def opened(prefix: str, cfg: DataConfig) -> Corpus:
    """One pair, checked. Raises DataError."""
    try:
        return open_corpus(prefix, cache_folder(cfg.cache))
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{error.filename} cannot be read (data.blend): {reason}") from None


def parse_blend(blend: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """-> prefixes, and weights if there are any (megatron.core.datasets.utils checks nothing)."""
    entries = [str(entry).strip() for entry in blend]
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
        if not (math.isfinite(weight) and weight > 0):
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
    largest = max((sidecar.vocab_size for _, sidecar in described), default=0)
    for prefix, sidecar in described:
        if sidecar.vocab_size > vocab_size:
            raise DataError(
                f"{prefix}.json: ids of tokenizer {sidecar.tokenizer} go up to "
                f"{sidecar.vocab_size - 1}, but model.vocab_size={vocab_size}; "
                f"set model.vocab_size={-(-largest // PADDING) * PADDING}"
            )
        first, other = described[0]
        if sidecar.tokenizer_sha256 != other.tokenizer_sha256:
            raise DataError(
                f"data.blend mixes tokenizers: {other.tokenizer} in {first}.json, "
                f"{sidecar.tokenizer} in {prefix}.json; prepare all with one"
            )


def _check_length(
    corpus: Corpus, cfg: DataConfig, split: str, sizes: Sequence[int]
) -> list[SplitPart]:
    """Check that every part in use has at least one sequence. -> training and validation part."""
    parts = []
    for name, size, within in zip(PARTS, sizes, bounds(split), strict=True):
        total = len(corpus.lengths)
        low, high = (round(bound * float(total)) for bound in within)
        tokens = int(corpus.lengths[low:high].sum(dtype=np.int64))
        parts.append(SplitPart(high - low, tokens))
        if size and tokens <= cfg.sequence_length:
            raise DataError(
                f"data.sequence_length={cfg.sequence_length} is longer than the data: the {name} "
                f"part of {corpus.prefix}.bin (data.split={cfg.split}) has {tokens} tokens in "
                f"{high - low} documents, and a sequence takes one more than its length"
            )
    return parts
