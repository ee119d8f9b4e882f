"""Positions of sources in a run that reads other samples than its checkpoint did.

A checkpoint has one cursor, the samples that were read. With another blend, split, seed or length
of sequences the samples are others, so a position is kept for each source: the tokens that were
read of it, its earlier epochs included. It goes on with the first sample that begins at that token
or after it; a new source begins with its first one. A source is known by its path in `data.blend`.

Samples are read in a random order within an epoch. If they are cut and ordered as before, a source
so goes on with exactly what it has not read. Otherwise some text of its present epoch comes again,
and some is left out; the number of epochs stays right.

The state of a checkpoint has, under `carried`, `first` (sample of the run at which this began),
`tokens` (of the run, less those that cursor and length of sequences give), `rows` (first row of
each source, in the order of the blend) and `gone` (tokens read of other sources, by path). Under
`sources` it has documents and tokens of each, and the stamp of its files (none in a checkpoint of
an older version), by which files that were written anew are noticed.
Legend: S tokens of a sequence.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch.distributed as dist
from megatron.core.datasets.utils import Split

from phalanx.configs.arithmetic.data_stages import begun, parse
from phalanx.configs.knobs import pluralize
from phalanx.configs.schema import Config, DataConfig
from phalanx.moe.data import datasets
from phalanx.moe.data.blend import Span, open_blend, parse_blend, spans_within
from phalanx.moe.data.datasets import Indexed
from phalanx.moe.data.host_cache import DataError
from phalanx.moe.data.loader import Samples, agreed, build_datasets, with_masks
from phalanx.moe.data.sources import Source
from phalanx.moe.text import count
from phalanx.parallel.checkpoint.saved_knobs import understood
from phalanx.parallel.checkpoint.trained_tokens import trained_tokens
from phalanx.parallel.fault.agreement import gather

State = dict[str, Any]


def carried(state: State, cfg: Config, dataset: Samples) -> State:
    """State of a checkpoint as a run of other data goes on from it. Collective.

    Args:
        state: what all ranks share of the checkpoint.
        cfg: configuration of this run.
        dataset: training data of this run, for the names of its sources.
    """
    old, passed = _data_of(state["config"]), state["data"]["consumed_samples"]
    if not passed or _same_rows(old, cfg.data, passed):
        if passed and _is_rank_0():
            for line in _rewritten(state, dataset.sources):
                print(f"-- warning: data: {line}", flush=True)
        return state
    found = _on_rank_0(lambda: _carried(state, cfg))
    told = [
        f"{source.name} goes on after {count(row * cfg.data.sequence_length)} tokens"
        if row
        else f"{source.name} begins"
        for source, row in zip(dataset.sources, found["carried"]["rows"], strict=True)
    ]
    if told and _is_rank_0():
        print(f"-- data: {', '.join(told)}", flush=True)
    return state | found


def _rewritten(state: State, sources: Sequence[Source]) -> Iterator[str]:
    """Lines on sources whose files are others than those of the checkpoint."""
    for source, (documents, tokens, *stamp) in zip(sources, state.get("sources", ()), strict=False):
        before, has = _sized(documents, tokens), _sized(source.documents, source.tokens)
        if has != before:
            said = f"has {has}, and had {before}"
        elif stamp and stamp != [source.stamp]:
            said = f"has {has} as before, and other contents than it had"
        else:
            continue
        yield (
            f"{source.name} {said} when the checkpoint was written: its samples are others from "
            "here on, and some of its text comes again"
        )


def _sized(documents: int, tokens: int) -> str:
    named = pluralize(f"{tokens:,}", "token")
    return f"{named} in {pluralize(f'{documents:,}', 'document')}"


def _is_rank_0() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _on_rank_0(work: Callable[[], State]) -> State:
    """Result of work that rank 0 does, which has the paths of the checkpoint's configuration."""
    found, error = State(), ""
    if _is_rank_0():
        try:
            found = work()
        except DataError as failure:
            error = f"{failure}; the positions of the checkpoint's sources need its data once more"
    found, error = gather((found, error))[0]
    if error:
        raise DataError(error)
    return found


def _same_rows(old: DataConfig, new: DataConfig, passed: int) -> bool:
    """Return whether all differ in at most stages that begin after the samples passed."""
    knobs = ("source", "blend", "split", "seed", "sequence_length")
    if any(getattr(old, knob) != getattr(new, knob) for knob in knobs):
        return False
    one, other = (begun(data.stages, passed, new.sequence_length) for data in (old, new))
    return one == other


def _carried(state: State, cfg: Config) -> State:
    old, before, cursor = _data_of(state["config"]), state.get("carried", {}), state["data"]
    S = cfg.data.sequence_length
    steps = cursor["consumed_samples"] - cursor.get("undone_samples", 0)
    read = tokens_read(old, before, cursor["consumed_samples"], cfg.model.vocab_size)
    first = -(-steps * old.sequence_length // S)
    tokens = trained_tokens(state, old.sequence_length) - first * S
    first_rows = [-(-read.pop(source, 0) // S) for source in _sources(cfg.data)]
    health = {"seen": {}, "in_a_row": 0}  # losses of other data
    return {
        "data": {"consumed_samples": first},
        "carried": {"first": first, "tokens": tokens, "rows": first_rows, "gone": read},
        "skipped_samples": 0,
        "health": state.get("health", {}) | health,
    }


def tokens_read(old: DataConfig, before: State, consumed: int, vocab_size: int) -> dict[str, int]:
    """Tokens read of each source that a run has had, by its path."""
    sources, first = _sources(old), before.get("first", 0)
    rows = np.array(before.get("rows", [0] * len(sources)), np.int64)
    if len(sources) == 1:
        rows += consumed - first
    elif sources:
        prefixes, weights = parse_blend(old)
        if weights is None:
            weights = open_blend(prefixes, None, old, vocab_size, (1, 0)).weights
        spans = _spans(old, weights or [], first)
        chosen, _ = datasets.mixed(spans, consumed - first)
        rows += np.bincount(chosen, minlength=len(sources))
    tokens = (int(row) * old.sequence_length for row in rows)
    return before.get("gone", {}) | dict(zip(sources, tokens, strict=True))


def rows(cfg: Config, samples: int, carried: State) -> Samples:
    """The first `samples` rows of a run, from `carried["first"]` on those of its own data.

    Collective. Raises DataError as `build_datasets` does.
    """
    if not carried["rows"]:
        return build_datasets(cfg, cfg.model.vocab_size, samples, 0)[0]
    size = max(1, samples - carried["first"])
    data = replace(cfg.data, validation=[])

    def build(data: DataConfig) -> list[Indexed]:
        return [_own_rows(data, cfg.model.vocab_size, size, carried)]

    own = agreed(lambda: build(data), lambda built: built[0].fingerprint)
    (masked,) = with_masks(data, build, own)
    return Later(masked, samples, carried["first"])


def _own_rows(data: DataConfig, vocab_size: int, size: int, carried: State) -> Indexed:
    first_rows = carried["rows"]
    plan = datasets.plan(data, vocab_size, (size, 0))
    weights = plan.config.spans[Split.train][0].weights
    spans = _spans(data, weights, carried["first"])
    plan.config.spans[Split.train] = spans
    built = datasets.build(plan, vocab_size, (size, 0))[0]
    parts = built.parts
    for part, row in zip(parts, first_rows, strict=True):
        part.first = row
        part[0]  # builds the index here, where a failure can be reported on every rank
    read = np.zeros(len(parts))
    for begin, end, shares in spans_within(spans, size):
        read += (end - begin) * np.array(shares) / sum(shares)
    built.sources = [
        _with(source, row, float(own), size)
        for source, row, own in zip(built.sources, first_rows, read, strict=True)
    ]
    return built


def _with(source: Source, row: int, own: float, size: int) -> Source:
    return replace(source, weight=own / size, samples=row + own)


class Later:
    """Rows of a run whose data begins at row `first`, of which those before are not read again."""

    def __init__(self, own: Samples, samples: int, first: int) -> None:
        self._own, self._samples, self._first = own, samples, first
        self.fingerprint, self.readers = own.fingerprint, getattr(own, "readers", 1)
        self.sources: Sequence[Source] = own.sources
        if counted := getattr(own, "counted", None):
            self.counted = lambda index: counted(self._place(index))

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> np.ndarray:
        return self._own[self._place(index)]

    def source(self, index: int) -> int:
        """Number in `sources` of the one that a row comes from."""
        return self._own.source(self._place(index))

    def positions(self, index: int) -> np.ndarray:
        """int64 [S + 1]: positions of the tokens of a row in their pieces of documents."""
        return self._own.positions(self._place(index))

    def _place(self, index: int) -> int:
        """Row of the data; rows before its first one, which describe it, are some of its own."""
        if index >= self._samples:
            raise IndexError(f"sample {index} of {self._samples}")
        return (index - self._first) % len(self._own)


def _data_of(config: State) -> DataConfig:
    values = understood(config).values
    known = {f.name: values.get(f"data.{f.name}") for f in fields(DataConfig)}
    return DataConfig(**{name: value for name, value in known.items() if value is not None})


def _sources(data: DataConfig) -> list[str]:
    """Paths of the sources of a blend; random tokens have none."""
    if data.source == "indexed":
        return parse_blend(data)[0]
    return ["embedded"] * (data.source == "embedded")


def _spans(data: DataConfig, weights: Sequence[float], first: int) -> list[Span]:
    """Weights of the samples from `first` on, counted from there."""
    stages = map(parse, data.stages)
    later = [Span(max(0, s.first(data.sequence_length) - first), s.weights) for s in stages]
    return [Span(0, weights), *later]
