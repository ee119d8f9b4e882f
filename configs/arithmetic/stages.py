"""Layers of pipeline chunks such that no stage has more work than it must.

The output layer of a small model with a large vocabulary is as much work as many layers: of
GPT-OSS-20B with 8 layers it is a third.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

_LAYER_COST = 1.3
"""Seconds of a FLOP in a layer, relative to the output layer: a layer has norms, attention,
exchanges too. From the dry run of GPT-OSS-20B, Moonlight and Qwen3-30B."""
_BUBBLE = 0.2  # chunks during which a stage waits in a step, for one during which it works: some
_EVEN_ENOUGH = 0.02  # most cost of an even deal that is taken for it: stages then need like memory


def layer_seconds(flops: Sequence[float]) -> tuple[float, ...]:
    """Times of layers by their FLOPs, in units of the time of a FLOP in the output layer."""
    return tuple(_LAYER_COST * each for each in flops)


def even(layers: int, chunks: int) -> list[int]:
    """Numbers of layers of the chunks, the first ones one more where they do not divide."""
    each, more = divmod(layers, chunks)
    return [each + (i < more) for i in range(chunks)]


@lru_cache(maxsize=1024)
def balanced(layers: tuple[float, ...], last: float, pipeline: int, chunks: int) -> tuple[int, ...]:
    """Numbers of layers of the chunks, chunk i on stage i % pipeline.

    Args:
        layers: FLOPs of each layer.
        last: FLOPs of the last chunk besides: output layer and multi-token prediction.
        chunks: at most the number of layers; a multiple of `pipeline`.
    """
    costs = layer_seconds(layers)
    start = even(len(layers), chunks)
    found, least = start, _loads(start, costs, last, pipeline)
    while True:
        better = min(
            ((_loads(trial, costs, last, pipeline), trial) for trial in _moves(found)),
            default=(least, found),
        )
        if better[0] >= least:
            break
        least, found = better
    divides = len(layers) % chunks == 0
    near = _loads(start, costs, last, pipeline)[0] <= (1 + _EVEN_ENOUGH) * least[0]
    return tuple(start if divides and near else found)


def _moves(counts: Sequence[int]) -> list[list[int]]:
    """Counts with a layer moved from one chunk to another; only the last may become empty."""
    trials = []
    for i in range(len(counts)):
        if counts[i] <= (i < len(counts) - 1):
            continue
        for j in range(len(counts)):
            if i != j:
                trial = list(counts)
                trial[i] -= 1
                trial[j] += 1
                trials.append(trial)
    return trials


def _loads(
    counts: Sequence[int], costs: Sequence[float], last: float, pipeline: int
) -> tuple[int, float]:
    """Values to minimize, in order: time, and the sum of squares.

    Time is that of the busiest stage and a part of the largest chunk, over the means; in percent,
    so that a fraction of one does not decide over evenness.
    """
    ends = list(accumulate(counts))
    sums = [0.0, *accumulate(costs)]
    chunks = [sums[end] - sums[end - count] for end, count in zip(ends, counts, strict=True)]
    chunks[-1] += last
    mean = (sums[-1] + last) / len(chunks)
    stages = [sum(chunks[i::pipeline]) for i in range(pipeline)]
    busiest = max(stages) * pipeline / len(chunks)
    time = (busiest + _BUBBLE * max(chunks)) / (1 + _BUBBLE) / mean
    return round(100 * time), sum((load / mean) ** 2 for load in chunks)
