"""Memory of a rank with sharded parameters."""

from collections.abc import Sequence
from dataclasses import replace

from phalanx.configs.arithmetic.accounting import parameters
from phalanx.configs.arithmetic.layers import has_experts
from phalanx.configs.formats import grad_width, width
from phalanx.configs.layout import expert_parallel_size, micro_batches, optimizer_shards
from phalanx.configs.schema import Config
from phalanx.configs.tables.machines import machine_named
from phalanx.moe.plan.cost.weights import Chunk, Weights, in_chunk

_PLACES = 2  # `ring.PLACES`, without torch


def sharded(cfg: Config, world: int, whole: Weights, chunks: Sequence[Chunk]) -> Weights:
    """Weights of a rank of a stage with these chunks, whose layers are sharded.

    Vectors, which stay whole, are counted as if they were sharded.
    """
    of_model = parameters(cfg.model)
    alone = [Chunk(c.stage, "t", (kind,)) for c in chunks for kind in c.kinds]
    if not alone:  # a stage of the embedding or of the output layer
        return whole
    layers = zip(*(in_chunk(cfg, world, layer, of_model) for layer in alone), strict=True)
    weights = grads = 0
    for sizes, ranks in zip(layers, _ranks(cfg, world), strict=True):
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


def line(cfg: Config, world: int) -> str:
    """Line of the dry run: over how many ranks there is something to shard."""
    dense, experts = _ranks(cfg, world)
    kinds = [("layers", dense)]
    if has_experts(cfg.model):
        kinds = [("experts", experts), ("all else of layers", dense)]
    over = [f"{kind} over {ranks} ranks" for kind, ranks in kinds if ranks > 1]
    whole = [kind for kind, ranks in kinds if ranks == 1]
    kept = [f"no two ranks have the same {' and '.join(whole)}, which stay whole"] if whole else []
    return f"sharded: {'; '.join([*over, *kept])}"


def _ranks(cfg: Config, world: int) -> tuple[int, int]:
    """Number of ranks over which layers and experts are sharded."""
    dense, experts = optimizer_shards(cfg, world)
    if cfg.parallel.distributed_optimizer == "zero3":
        return dense, experts
    # Those of a node; ranks of a tensor, or an expert parallel, group are side by side.
    node = machine_named(cfg.run.machine).node_gpus
    apart = cfg.parallel.tensor, expert_parallel_size(cfg, world)
    inside = [max(1, node // size) for size in apart]
    return min(dense, inside[0]), min(experts, inside[1])
