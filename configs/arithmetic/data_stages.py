"""Blends that change on the way: the texts of `data.stages`, as in `80e9:0.5/0.5`.

A stage begins at a number of tokens, so that a longer run starts with the same samples. The weights
of `data.blend` hold before the first.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phalanx.configs.knobs import pluralize, repair, visible
from phalanx.configs.schema import Config

_KNOB = "data.stages"


@dataclass(frozen=True)
class Stage:
    """Weights of the sources from a number of tokens on."""

    tokens: int  # tokens of the run before the stage; it begins with the next whole sample
    weights: tuple[float, ...]  # weight of each source; a source with 0 is not read

    def first(self, sequence: int) -> int:
        return -(-self.tokens // sequence)


def parse(text: str) -> Stage:
    """The stage of a text, as in `80e9:0.5/0.5`, or ValueError with a reason to follow the text."""
    start, _, rest = text.partition(":")
    words = [start, *rest.split("/")]
    if not all(map(is_number, words)):
        raise ValueError("is not <tokens>:<weight>/<weight>/..., as in 80e9:0.5/0.5")
    tokens, *weights = map(float, words)
    if not 1 <= tokens < 2**53:
        raise ValueError("begins at no number of tokens above 0")
    if not math.isfinite(sum(weights)) or not any(weights):
        raise ValueError("gives no source a weight above 0")
    return Stage(round(tokens), tuple(weights))


def begun(texts: Sequence[str], samples: int, sequence: int) -> list[Stage]:
    """Stages that begin within the first `samples` samples of `sequence` tokens."""
    stages = map(parse, texts)
    return [stage for stage in stages if stage.first(sequence) < samples]


def stage_problems(cfg: Config) -> Iterator[str]:
    """Yield the problems of `data.stages`."""
    data = cfg.data
    if not data.stages:
        return
    sources = sum(not is_number(entry) for entry in data.blend)
    if data.source != "indexed" or sources < 2:
        yield repair(cfg, _KNOB, "changes the weights of two or more sources of data.blend", [])
        return
    last, kept = 0, list[str]()
    for text in data.stages:
        try:
            stage = parse(text)
            reason = _misfit(stage, sources, last, data.sequence_length)
        except ValueError as error:
            reason = str(error)
        if reason:
            left = [other for other in data.stages if other != text]
            yield repair(cfg, _KNOB, f"has {visible(text)!r}, which {reason}", left)
            continue
        last = stage.first(data.sequence_length)
        kept.append(text)
    of_blend = [float(entry) for entry in data.blend if is_number(entry)]
    read = [of_blend, *(parse(text).weights for text in kept)] if of_blend else []
    for number, weights in enumerate(zip(*read, strict=True)):
        if not any(weights):
            reason = f"has {visible(data.blend[2 * number + 1])}, which no stage reads"
            blend = [*data.blend[: 2 * number], "1", *data.blend[2 * number + 1 :]]
            yield repair(cfg, "data.blend", reason, blend)


def _misfit(stage: Stage, sources: int, last: int, sequence: int) -> str:
    if len(stage.weights) != sources:
        given = pluralize(len(stage.weights), "weight")
        return f"has {given} for {pluralize(sources, 'source')} of data.blend"
    if stage.first(sequence) <= last:
        return "does not begin after the stage before it"
    return ""


def is_number(text: str) -> bool:
    """Return whether an entry of a list is a number above or equal to 0, not a prefix."""
    return re.fullmatch(r"(\d+\.?\d*|\.\d+)(e-?\d+)?", text.strip()) is not None
