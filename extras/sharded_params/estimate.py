"""Memory of a rank with sharded parameters."""

from collections.abc import Sequence

from phalanx.configs.formats import grad_width, width
from phalanx.configs.layout import micro_batches, optimizer_shards
from phalanx.configs.schema import Config

_PLACES = 2  # `ring.PLACES`, without torch


def spared(cfg: Config, world: int, layers: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Bytes of weights and of gradients that a rank of a stage has less than of whole layers.

    Args:
        layers: (dense, expert) parameters of each layer in order. Vectors, which stay whole, are
            counted as if they were sharded.
    """
    weights = grads = 0
    for sizes, ranks in zip(zip(*layers, strict=True), optimizer_shards(cfg, world), strict=True):
        units = [size for size in sizes if size]
        if ranks == 1 or not units:
            continue
        places = sum(max(units[i::_PLACES]) for i in range(min(_PLACES, len(units))))
        kept = places - (-sum(units) // ranks)
        # Sums of a later micro-batch arrive beside those before it.
        beside = -(-max(units) // ranks) if micro_batches(cfg, world) > 1 else 0
        weights += sum(units) - kept
        grads += sum(units) - kept - beside
    return weights * width(cfg), grads * grad_width(cfg)
