"""Quick estimate of many layouts, from a few exact ones: their order, not their speed.

The work of a token is that of one rank with the whole model, but for the weights that experts with
few rows read; its exchange depends on the expert-parallel size, its collectives on tensor and
context ranks. Imbalance of stages is that of their FLOPs, and the bubble that of equal stages whose
weight gradients outside of experts wait for transfers.
"""

import functools
import math
from collections.abc import Callable

from phalanx.configs.arithmetic.layers import has_experts, mlp_layers
from phalanx.configs.knobs import changed
from phalanx.configs.layout import stage_shares
from phalanx.configs.schema import Config
from phalanx.configs.tables.machines import Machine
from phalanx.configs.validate import ConfigError
from phalanx.moe.plan.cost.exchange import Exchange, own_exchange
from phalanx.moe.plan.cost.shards import shard_seconds
from phalanx.moe.plan.cost.step_time import GAPS, step_time
from phalanx.moe.plan.cost.work import beside_passes, expert_bytes
from phalanx.moe.plan.described import resolved
from phalanx.moe.plan.search.layouts import ALONE, Layout

_WAITING = 2
"""Passes whose weight gradients shorten a bubble: of the transfer, and one that is held longer."""
_WHOLE = Layout(1, 1, 1, 1, 1, 1, overlap=False)


def ranking(cfg: Config, world: int, machine: Machine) -> Callable[[Layout], float]:
    """A function from a layout to approximate seconds of its step.

    Args:
        cfg: as the user set it.
        world: ranks.
        machine: rates.
    """
    base = changed(cfg, {"run.recompute": [], "run.offload": [], "parallel.delay_wgrad": "off"})
    m, ranks = cfg.model, math.gcd(cfg.model.moe.experts, 64) if has_experts(cfg.model) else 1
    one = _WHOLE._replace(expert=ranks).changes() | ALONE | {"data.global_batch": ranks}
    spread = resolved(changed(base, one), ranks, machine.node_gpus)
    step = step_time(spread, ranks, machine)
    dense = step.gemm + step.attention + step.elementwise
    """Seconds of a sequence in all layers, without its experts."""
    layers, sparse = m.layers + m.mtp_layers, mlp_layers(m)[1]
    sequences, length = cfg.data.global_batch, cfg.data.sequence_length
    reading, summing = (
        sparse * ranks * each / (machine.memory_gbs * 1e9) for each in expert_bytes(spread, ranks)
    )
    """Seconds in which all layers read all experts, and add to their gradients."""
    with_passes = beside_passes(spread)

    @functools.cache
    def exchange(expert: int, overlap: bool) -> Exchange | None:
        sizes = _WHOLE._replace(expert=expert, overlap=overlap)
        trial = changed(base, sizes.changes())
        try:
            return own_exchange(resolved(trial, world, machine.node_gpus), world, machine)
        except ConfigError:
            return None

    @functools.cache
    def shards(tensor: int, context: int) -> float:
        sizes = {"parallel.tensor": tensor, "parallel.context": context}
        shared = shard_seconds(changed(base, sizes), machine)
        mlps = layers if m.moe.shared_ffn else layers - sparse
        return (layers + mlps) * shared.shared + layers * shared.gathered

    @functools.cache
    def busiest(pipeline: int, chunks: int) -> float:
        """Part of the work of all layers that the stage with most of it has."""
        sizes = _WHOLE._replace(pipeline=pipeline, chunks=chunks)
        return max(stage_shares(changed(base, sizes.changes())))

    def seconds(layout: Layout) -> float:
        sent = exchange(layout.expert, layout.overlap)
        if sent is None:
            return float("inf")
        split = layout.tensor * layout.context
        count = sequences * split * layout.pipeline // (world * layout.micro_batch)
        often = split / layout.micro_batch
        """Micro-batches in the time that one rank would take for a sequence."""
        sequence = dense + max(step.experts * 2 / 3, often * reading / layout.expert)
        sequence += with_passes(step.experts / 3, often * summing / layout.expert)
        sequence += often * layers * GAPS
        whole, exposed = sparse * sent.total * length, 0.0
        if count:
            exposed = sent.exposed(whole, sequence, count, layout.pipeline, layout.chunks) / count
        each = (1 + sent.skew) * sequence + exposed + shards(layout.tensor, layout.context) * length
        stage = busiest(layout.pipeline, layout.chunks)
        waits = 1 - _WAITING * step.gemm / 3 / sequence
        bubble = (layout.pipeline - 1) / layout.pipeline / max(1, count * layout.chunks)
        return sequences / world * layout.pipeline * each * (stage + waits * bubble)

    return seconds
