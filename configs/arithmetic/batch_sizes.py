"""Sizes of the global batch over a run, and what steps and tokens are by them.

`data.batch_warmup` has texts such as `64:1e9`: 64 sequences a step up to 1 billion tokens. The size
of a step follows from the samples of the steps before it alone, so that a run that was resumed or
rolled back has the sizes of one that went on.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from phalanx.configs.arithmetic.data_stages import is_number
from phalanx.configs.knobs import repair, visible
from phalanx.configs.schema import Config, DataConfig, OptimConfig

_KNOB = "data.batch_warmup"
ALWAYS = 2**62  # number of samples that no run reaches


@dataclass(frozen=True)
class BatchSize:
    """Size of the global batch up to a number of tokens."""

    size: int  # sequences in a step
    tokens: int  # tokens of the run before which steps of this size begin


def parse(text: str) -> BatchSize:
    """The size of a text, as in `64:1e9`, or ValueError with a reason to follow the text."""
    size, _, tokens = text.partition(":")
    if not (size.isascii() and size.isdecimal() and is_number(tokens)):
        raise ValueError("is not <sequences>:<tokens>, as in 64:1e9")
    if not (0 < int(size) < 2**31 and 1 <= float(tokens) < 2**53):
        raise ValueError("has no size, or no number of tokens, above 0")
    return BatchSize(int(size), round(float(tokens)))


def problems(cfg: Config) -> Iterator[str]:
    """Yield the problems of `data.batch_warmup` by itself."""
    last = 0
    for text in cfg.data.batch_warmup:
        try:
            reason, until = "", parse(text).tokens
            if until <= last:
                reason = "does not end after the size before it"
        except ValueError as error:
            reason = str(error)
        if reason:
            left = [other for other in cfg.data.batch_warmup if other != text]
            yield repair(cfg, _KNOB, f"has {visible(text)!r}, which {reason}", left)
        else:
            last = until


def spans(data: DataConfig) -> list[tuple[int, int]]:
    """(samples before which steps begin, size of their global batch), in the order of a run."""
    warmup = map(parse, data.batch_warmup)
    ends = [(-(-each.tokens // data.sequence_length), each.size) for each in warmup]
    return [*ends, (ALWAYS, data.global_batch)]


def model_input(data: DataConfig) -> tuple[int, int]:
    """(tokens of a sequence, sequences) of a micro-batch for the model; packed ones are one."""
    if data.document_mask:
        return data.sequence_length * data.micro_batch, 1
    return data.sequence_length, data.micro_batch


def size_at(sizes: Sequence[tuple[int, int]], samples: int) -> int:
    """Size of the global batch of the step that begins after so many samples, from `spans`."""
    return next(size for end, size in sizes if samples < end)


def samples_after(data: DataConfig, steps: int, samples: int = 0) -> int:
    """Data cursor after `steps` further steps from one of `samples` samples."""
    for end, size in spans(data):
        in_span = min(steps, max(0, -(-(end - samples) // size)))
        samples += in_span * size
        steps -= in_span
    return samples


def steps_to(data: DataConfig, tokens: float) -> int:
    """Number of steps after which a run from its start has read at least so many tokens."""
    samples = steps = 0
    for end, size in spans(data):
        upto = min(end, -(-round(tokens) // data.sequence_length))
        in_span = max(0, -(-(upto - samples) // size))
        samples += in_span * size
        steps += in_span
    return steps


def in_steps(optim: OptimConfig, data: DataConfig) -> OptimConfig:
    """The optimizer with warm-up and decay in steps, where they are given in tokens."""
    ends: dict[str, Any] = {}
    if optim.warmup_tokens:
        ends["warmup_steps"] = steps_to(data, optim.warmup_tokens)
    if optim.decay_tokens:
        ends["decay_steps"] = steps_to(data, optim.decay_tokens)
    return replace(optim, **ends)
