"""Layers of pipeline chunks such that no stage has more work than it must.

The output layer of a small model with a large vocabulary is as much work as many layers: of
GPT-OSS-20B with 8 layers it is a third.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, permutations

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
    start, divides = even(len(layers), chunks), len(layers) % chunks == 0
    sums, enough = [0.0, *accumulate(layer_seconds(layers))], 1 + _EVEN_ENOUGH
    mean = (sums[-1] + last) / chunks
    found, loads = start, _chunk_loads(start, sums, last)
    first = _time(loads, mean, pipeline)
    if divides and first <= 100 * enough:  # no deal takes less than 100 %
        return tuple(start)
    least = first, _squares(loads, mean)
    while True:
        trials = [(trial, _chunk_loads(trial, sums, last)) for trial in _moves(found)]
        times = [_time(loads, mean, pipeline) for _, loads in trials]
        shortest = min(times, default=0)
        better = min(
            (
                ((time, _squares(loads, mean)), trial)
                for time, (trial, loads) in zip(times, trials, strict=True)
                if time == shortest
            ),
            default=(least, found),
        )
        if better[0] >= least:
            break
        least, found = better
    return tuple(start if divides and first <= enough * least[0] else found)


def _moves(counts: Sequence[int]) -> list[list[int]]:
    """Counts with a layer moved from one chunk to another; only the last may become empty."""
    trials = []
    for i, j in permutations(range(len(counts)), 2):
        if counts[i] > (i < len(counts) - 1):
            trials.append(list(counts))
            trials[-1][i] -= 1
            trials[-1][j] += 1
    return trials


def _chunk_loads(counts: Sequence[int], sums: Sequence[float], last: float) -> list[float]:
    """Seconds of the chunks; `sums` has those of the first layers, from none to all."""
    loads = [sums[end] - sums[end - n] for end, n in zip(accumulate(counts), counts, strict=True)]
    loads[-1] += last
    return loads


def _time(loads: list[float], mean: float, pipeline: int) -> int:
    """Time of the busiest stage and a part of the largest chunk, which is minimized first.

    Over the means; in percent, so that a fraction of one does not decide over evenness.
    """
    busiest = max([sum(loads[i::pipeline]) for i in range(pipeline)]) * pipeline / len(loads)
    return round(100 * ((busiest + _BUBBLE * max(loads)) / (1 + _BUBBLE) / mean))


def _squares(loads: list[float], mean: float) -> float:
    """Unevenness, which is minimized where times are the same."""
    return sum((load / mean) ** 2 for load in loads)
