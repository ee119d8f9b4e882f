"""Layers of pipeline chunks such that no stage has more work than it must.

The output layer of a small model with a large vocabulary is as much work as many layers: of
GPT-OSS-20B with 8 layers it is a third.

Legend: N deals, C chunks, P stages.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

type Floats = NDArray[np.float64]

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
    import numpy as np  # a tenth of a second that most command lines can do without

    start, divides = even(len(layers), chunks), len(layers) % chunks == 0
    sums, enough = np.array([0.0, *accumulate(layer_seconds(layers))]), 1 + _EVEN_ENOUGH
    mean, found = float(sums[-1] + last) / chunks, np.array(start)
    loads_NC = _chunk_loads(found[None], sums, last)
    (first,) = _times(loads_NC, mean, pipeline)
    if divides and first <= 100 * enough:  # no deal takes less than 100 %
        return tuple(start)
    least, one = (first, _squares(loads_NC[0], mean)), np.eye(chunks, dtype=int)
    moves_NC = (one - one[:, None]).reshape(-1, chunks)  # of a layer from one chunk to another
    while True:
        deals_NC = found + moves_NC
        deals_NC = deals_NC[(deals_NC[:, :-1] > 0).all(1) & (deals_NC[:, -1] >= 0)]
        loads_NC = _chunk_loads(deals_NC, sums, last)
        times_N = _times(loads_NC, mean, pipeline)
        short_N = np.flatnonzero(times_N == times_N.min())
        better, deal = min(
            ((times_N[i], _squares(loads_NC[i], mean)), deals_NC[i].tolist()) for i in short_N
        )
        if better >= least:
            break
        least, found = better, np.array(deal)
    return tuple(start if divides and first <= enough * least[0] else found.tolist())


def _chunk_loads(deals_NC: "NDArray[np.int64]", sums: Floats, last: float) -> Floats:
    """Seconds of the chunks; `sums` has those of the first layers, from none to all."""
    ends_NC = deals_NC.cumsum(1)
    loads_NC: Floats = sums[ends_NC] - sums[ends_NC - deals_NC]
    loads_NC[:, -1] += last
    return loads_NC


def _times(loads_NC: Floats, mean: float, pipeline: int) -> Floats:
    """Times of the busiest stage and a part of the largest chunk, which are minimized first.

    Over the means; in percent, so that a fraction of one does not decide over evenness.
    """
    stages_NP = loads_NC.reshape(len(loads_NC), -1, pipeline).sum(1)
    busiest_N = stages_NP.max(1) * pipeline / loads_NC.shape[1]
    return (100 * ((busiest_N + _BUBBLE * loads_NC.max(1)) / (1 + _BUBBLE) / mean)).round()


def _squares(loads_C: Floats, mean: float) -> float:
    """Unevenness, which is minimized where times are the same; `sum` rounds less than NumPy."""
    return sum((load / mean) ** 2 for load in loads_C.tolist())
