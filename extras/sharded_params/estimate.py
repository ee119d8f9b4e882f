"""Memory of a rank with sharded parameters."""

from collections.abc import Sequence
from dataclasses import replace

from phalanx.configs.arithmetic.accounting import parameters
from phalanx.configs.formats import grad_width, width
from phalanx.configs.layout import micro_batches, optimizer_shards
from phalanx.configs.schema import Config
from phalanx.moe.plan.cost.weights import Chunk, Weights, in_chunk

_PLACES = 2  # `ring.PLACES`, without torch


def sharded(cfg: Config, world: int, whole: Weights, chunks: Sequence[Chunk]) -> Weights:
    """Weights of a rank of a stage with these chunks, whose layers are sharded.

    Vectors, which stay whole, are counted as if they were sharded.
    """
    of_model = parameters(cfg.model)
    alone = [Chunk(c.stage, "t", (kind,)) for c in chunks for kind in c.kinds]
    layers = zip(*(in_chunk(cfg, world, layer, of_model) for layer in alone), strict=True)
    weights = grads = 0
    for sizes, ranks in zip(layers, optimizer_shards(cfg, world), strict=True):
        units = [size for size in sizes if size]
        if ranks == 1 or not units:
            continue
        places = sum(max(units[i::_PLACES]) for i in range(min(_PLACES, len(units))))
        spared = sum(units) - (places - (-sum(units) // ranks))
        # Sums of a later micro-batch arrive beside those before it.
        beside = -(-max(units) // ranks) if micro_batches(cfg, world) > 1 else 0
        weights += spared
        grads += spared - beside
    return replace(
        whole,
        parameter_bytes=whole.parameter_bytes - weights * width(cfg),
        gradient_bytes=whole.gradient_bytes - grads * grad_width(cfg),
    )
