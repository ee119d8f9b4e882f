"""Layouts in the order of approximate seconds of a step, in which a search looks at them.

The work of a token is that of one rank with the whole model, but for the weights that experts with
few rows read; its exchange depends on the expert-parallel size, its collectives on tensor and
context ranks. Imbalance of stages is that of their FLOPs, and the bubble that of equal stages whose
weight gradients outside of experts wait for transfers.
"""

import functools
import heapq
import math
from collections.abc import Callable, Iterator

from phalanx.configs.arithmetic.layers import has_experts, mlp_layers
from phalanx.configs.knobs import Changes, changed
from phalanx.configs.layout import micro_batches, stage_shares
from phalanx.configs.schema import Config
from phalanx.configs.tables.machines import Machine
from phalanx.configs.validate import ConfigError
from phalanx.extras.planner.layouts import ALONE, Layout, layouts
from phalanx.moe.plan.cost.exchange import Exchange, own_exchange, shard_seconds
from phalanx.moe.plan.cost.step_time import GAPS, collectives, step_time, update
from phalanx.moe.plan.cost.weights import stage_weights
from phalanx.moe.plan.cost.work import beside_passes, expert_bytes
from phalanx.moe.plan.described import resolved

_WAITING = 2
"""Passes whose weight gradients shorten a bubble: of the transfer, and one that is held longer."""
_WHOLE = Layout(1, 1, 1, 1, 1, 1)


def in_order(cfg: Config, world: int, machine: Machine) -> Iterator[tuple[float, float, Layout]]:
    """Approximate seconds of a step with each layout, the fastest first.

    And what gradients and the update add. All that takes long is computed when its turn has come.
    """
    seconds, once = _ranking(cfg, world, machine)
    every = layouts(cfg, world, machine.node_gpus)
    waiting = [(seconds(layout, False), False, i, layout) for i, layout in enumerate(every)]
    heapq.heapify(waiting)
    while waiting:
        least, known, i, layout = heapq.heappop(waiting)
        if known:
            yield least, once(layout, least), layout
        else:
            heapq.heappush(waiting, (seconds(layout, True), True, i, layout))


def _ranking(
    cfg: Config, world: int, machine: Machine
) -> tuple[Callable[[Layout, bool], float], Callable[[Layout, float], float]]:
    """Functions from a layout to its seconds, or to fewer if these are not known, and to others.

    The second one is of gradients and update, of a step of so many seconds without them.
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
    def exchange(expert: int, overlap: str) -> Exchange | None:
        sizes = _WHOLE._replace(expert=expert, overlap=overlap)
        # Beside another micro-batch weight gradients of stages hide exchanges as well.
        delays: Changes = {"parallel.delay_wgrad": "on"} if overlap == "on" else {}
        trial = changed(base, sizes.changes() | delays)
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

    def once(layout: Layout, rest: float) -> float:
        if rest == math.inf:
            return 0.0
        trial = changed(base, layout.changes())
        weights, count = stage_weights(trial, world), max(1, micro_batches(trial, world))
        exposed = collectives(trial, world, machine, weights, rest / count, experts=0.0)
        # What states in host memory travel depends on what is recomputed.
        return exposed + update(trial, world, machine, weights, copies=False)

    def seconds(layout: Layout, known: bool) -> float:
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
        shared = shards(layout.tensor, layout.context) * length
        exchanged, exposed = sparse * sent.total * length, 0.0
        if count:
            stages = layout.pipeline, layout.chunks
            exposed = sent.exposed(exchanged, sequence + shared, count, *stages) / count
        each = (1 + sent.skew) * sequence + exposed + shared
        stage = busiest(layout.pipeline, layout.chunks) if known else 1 / layout.pipeline
        waits = 1 - _WAITING * step.gemm / 3 / sequence
        bubble = (layout.pipeline - 1) / layout.pipeline / max(1, count * layout.chunks)
        return sequences / world * layout.pipeline * each * (stage + waits * bubble)

    return seconds, once
