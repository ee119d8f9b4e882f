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
from phalanx.configs.knobs import changed
from phalanx.configs.layout import stage_shares
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
_WHOLE = Layout(1, 1, 1, 1, 1, 1, overlap=False)


def in_order(cfg: Config, world: int, machine: Machine) -> Iterator[tuple[float, Layout]]:
    """Approximate seconds of a step with each layout, the fastest first.

    What takes long to compute is added to them when their turn has come.
    """
    seconds, every = _ranking(cfg, world, machine), layouts(cfg, world, machine.node_gpus)
    waiting = [(seconds(layout, False), False, i, layout) for i, layout in enumerate(every)]
    heapq.heapify(waiting)
    while waiting:
        least, known, i, layout = heapq.heappop(waiting)
        if known:
            yield least, layout
        else:
            heapq.heappush(waiting, (seconds(layout, True), True, i, layout))


def _ranking(cfg: Config, world: int, machine: Machine) -> Callable[[Layout, bool], float]:
    """A function from a layout to its seconds, and to fewer if it may not take long itself."""
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
        sizes = _WHOLE._replace(expert=expert).changes()
        trial = changed(base, sizes | {"parallel.overlap_microbatches": overlap})
        try:
            return own_exchange(resolved(trial, world, machine.node_gpus), world, machine)
        except ConfigError:
            return None

    def exchanges(layout: Layout) -> list[Exchange]:
        """The exchange of a layout, or those with and without overlap where `auto` decides."""
        wanted = "on" if layout.overlap else cfg.parallel.overlap_microbatches
        alone = layout.tensor * layout.context == 1
        values = [wanted] if wanted != "auto" else ["off", "on"] if alone else ["off"]
        return [sent for each in values if (sent := exchange(layout.expert, each)) is not None]

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

    def once(layout: Layout, busy: float, experts: float) -> float:
        """Seconds of gradients and update, of which a micro-batch hides some."""
        trial = changed(base, layout.changes())
        weights = stage_weights(trial, world)
        exposed = collectives(trial, world, machine, weights, busy, experts)
        return exposed + update(trial, world, machine, weights)

    def seconds(layout: Layout, known: bool) -> float:
        ways = exchanges(layout)
        if not ways:
            return float("inf")
        split = layout.tensor * layout.context
        count = sequences * split * layout.pipeline // (world * layout.micro_batch)
        often = split / layout.micro_batch
        """Micro-batches in the time that one rank would take for a sequence."""
        experts = max(step.experts * 2 / 3, often * reading / layout.expert)
        experts += with_passes(step.experts / 3, often * summing / layout.expert)
        sequence = dense + experts + often * layers * GAPS
        exchanged = [sparse * sent.total * length for sent in ways]
        exposed = 0.0
        if count:
            of_step = sequence, count, layout.pipeline, layout.chunks
            every = zip(ways, exchanged, strict=True)
            exposed = min(sent.exposed(whole, *of_step) for sent, whole in every) / count
        split_seconds = shards(layout.tensor, layout.context) * length
        each = (1 + ways[0].skew) * sequence + exposed + split_seconds
        stage = busiest(layout.pipeline, layout.chunks) if known else 1 / layout.pipeline
        waits = 1 - _WAITING * step.gemm / 3 / sequence
        bubble = (layout.pipeline - 1) / layout.pipeline / max(1, count * layout.chunks)
        total = sequences / world * layout.pipeline * each * (stage + waits * bubble)
        part = stage * layout.micro_batch / split
        busy = part * (sequence + max(exchanged) + split_seconds)
        return total + once(layout, busy, part * experts) if known else total

    return seconds
