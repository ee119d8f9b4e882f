"""Memory of one rank of each pipeline stage, as torch's allocator counts it at its peak.

That of expert rows, at `parallel.capacity_factor` and at worst, is the difference from a rank
without them, and from one that sends no tokens and has no replicas.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from phalanx.configs.arithmetic.layers import expert_hidden
from phalanx.configs.capture import CAPTURED
from phalanx.configs.formats import multiplies_fp8, resident_layers
from phalanx.configs.knobs import changed
from phalanx.configs.layout import document_places, key_ranks, may_be_uneven
from phalanx.configs.remembered import STEP, remembered
from phalanx.configs.schema import Config
from phalanx.configs.tables.backends import attention_backend, expert_backend
from phalanx.configs.tables.machines import Machine
from phalanx.moe.plan.cost.activations import Activations, LayerMemory, sizes
from phalanx.moe.plan.cost.delayed_wgrad import (
    OFF,
    expert_operands,
    head_operands,
    held_passes,
    layer_operands,
    pairs,
    waits,
)
from phalanx.moe.plan.cost.pipeline import in_flight_bytes
from phalanx.moe.plan.cost.traffic import costs
from phalanx.moe.plan.cost.weights import (
    Weights,
    all_kinds,
    cached_gradient_bytes,
    chunks,
    fp8_copy_bytes,
    stage_weights,
)
from phalanx.parallel.dispatcher.capacity import ROW_MULTIPLE

_WORKSPACES = 128 * 2**20  # approximate bytes that cuBLAS and Transformer Engine allocate
_NONE = LayerMemory(0, 0)  # of a stage of the embedding alone


@dataclass(frozen=True)
class StageMemory:
    """Bytes of a rank of one stage."""

    stage: int
    weights: Weights
    cached: int  # placeholders of weight gradients, FP8 copies of weights, and workspaces
    saved: int  # activations saved for backward passes, of all micro-batches in flight
    backward: int  # peak of the largest backward pass on top of that
    validation: int  # bytes of a validation, which cannot use the memory of a captured step
    host: int  # bytes in host memory: states of the optimizer, and of all micro-batches in flight
    waiting: int = 0  # operands of weight gradients that wait (`parallel.delay_wgrad`)
    held: int = 0  # number of backward passes whose weight gradients wait beyond a transfer

    @property
    def peak(self) -> int:
        """Peak of allocated bytes."""
        step = self.saved + self.backward + self.waiting
        return self.weights.device_bytes + self.cached + step + self.validation


class _ChunkMemory(NamedTuple):
    """Bytes of the layers of a chunk, output layer included."""

    saved: int
    offloaded: int
    layers: frozenset[LayerMemory]  # one of each kind


@remembered(*STEP, "parallel.delay_wgrad")
def stage_memory(cfg: Config, world: int, rows: int | None = None) -> list[StageMemory]:
    """Memory of a rank of each stage, in order, with resolved kernels and graph.

    Expert `rows` of a rank are the budget of `parallel.capacity_factor` by default.
    """
    memory, together = _at_once(cfg, world, rows), pairs(cfg, world)
    if not (together or waits(cfg)):
        return memory
    counts, kinds = Activations(cfg, world, rows).sizes, set(all_kinds(cfg))
    operands = {kind: layer_operands(cfg, world, counts, kind) for kind in kinds}
    routed = {kind: expert_operands(cfg, counts, kind) for kind in kinds}
    of_head = head_operands(cfg, counts)
    waiting: list[list[int]] = [[] for _ in range(cfg.parallel.pipeline)]
    alone = [0] * cfg.parallel.pipeline
    for chunk in chunks(cfg):
        of_layers = sum([operands[kind] for kind in chunk.kinds])
        waiting[chunk.stage].append(of_layers + chunk.heads * of_head)
        alone[chunk.stage] += sum([routed[kind] for kind in chunk.kinds])
    if together:
        memory = [replace(m, waiting=size) for m, size in zip(memory, alone, strict=True)]
    return _delayed(memory, [max(each) for each in waiting]) if waits(cfg) else memory


@remembered(*STEP)
def _at_once(cfg: Config, world: int, rows: int | None) -> list[StageMemory]:
    """Memory of each stage if no weight gradient waits."""
    act = Activations(cfg, world, rows)
    head, per_layer_kind = act.head(), act.per_layer_kind()
    stages: list[list[_ChunkMemory]] = [[] for _ in range(cfg.parallel.pipeline)]
    known: dict[tuple[object, ...], _ChunkMemory] = {}
    for chunk in chunks(cfg):
        if chunk[1:] not in known:  # most chunks have the same layers
            layers = [per_layer_kind[kind] for kind in chunk.kinds]
            if chunk.mtp:
                decoder, extra = len(layers) - chunk.mtp, act.prediction_extra()
                layers[decoder:] = [replace(x, saved=x.saved + extra) for x in layers[decoder:]]
            layers += [head] * chunk.heads
            saved, offloaded = sum(x.saved for x in layers), sum(x.offloaded for x in layers)
            known[chunk[1:]] = _ChunkMemory(saved, offloaded, frozenset(layers or [_NONE]))
        stages[chunk.stage].append(known[chunk[1:]])
    scratch = _WORKSPACES + _document_scratch(cfg)
    weights, cached = stage_weights(cfg, world), cached_gradient_bytes(cfg, world)
    copies = fp8_copy_bytes(cfg, world)
    return [
        StageMemory(
            stage=i,
            weights=weights[i],
            cached=cached[i] + copies[i] + scratch,
            saved=in_flight_bytes(cfg, world, i, [c.saved for c in held]),
            backward=_backward(kinds := frozenset().union(*(c.layers for c in held)), head),
            validation=_validation(cfg, kinds),
            host=in_flight_bytes(cfg, world, i, [c.offloaded for c in held])
            + weights[i].hosted_bytes,
        )
        for i, held in enumerate(stages)
    ]


def _delayed(memory: list[StageMemory], operands: list[int]) -> list[StageMemory]:
    """Memory with weight gradients that wait, whose operands take so many bytes in a pass."""
    most, delayed = max(m.peak for m in memory), []
    for m, size in zip(memory, operands, strict=True):
        held = held_passes(m.stage, most - m.peak, size)
        delayed.append(replace(m, held=held, waiting=m.waiting + (held + 1) * size))
    return delayed


def _document_scratch(cfg: Config) -> int:
    """Scratch bytes of flash-attn-4's backward pass for document slots.

    128 fp32 rows for each slot, of the gradients of queries, and of keys and values that query
    heads share.
    """
    d, a = cfg.data, cfg.model.attention
    if not d.document_mask or not attention_backend(cfg.kernels.attention).document_bounds:
        return 0
    if a.kind == "mla":
        channels = a.heads * (a.qk_nope_dim + a.qk_rope_dim)
    else:
        shared = 2 * a.kv_heads if a.kv_heads < a.heads else 0
        channels = (a.heads + shared) * a.head_dim
    p = cfg.parallel
    ranks = p.tensor * p.context // key_ranks(cfg)  # that share out heads
    return document_places(d) * d.micro_batch * 128 * 4 * channels // ranks


def _backward(layers: frozenset[LayerMemory], head: LayerMemory) -> int:
    """Peak of the backward passes, in which logits are freed before those of the layers.

    Of offloaded bytes those of two layers are on the GPU: the layer in use, and the next one.
    """
    freed = head.saved if head in layers else 0
    copies = 2 * max([layer.offloaded for layer in layers])
    return copies + max([x.backward if x == head else x.backward - freed for x in layers])


def _validation(cfg: Config, layers: frozenset[LayerMemory]) -> int:
    """Bytes of a forward pass without gradients, which holds one layer at a time.

    Eager steps have freed their memory by then; a CUDA graph keeps its own pool.
    """
    run = cfg.run
    forward = run.eval_interval > 0 or run.sample_every > 0 or bool(run.record_routing or run.tasks)
    separate = run.graph == CAPTURED and forward
    return max(layer.saved + layer.offloaded for layer in layers) if separate else 0


def exchange_bytes(cfg: Config, world: int) -> int:
    """Receive buffers and replica slots of one-sided exchanges, with any load.

    They are outside of torch's allocator. Where passes of two micro-batches run beside each other,
    each kind of pass has buffers.
    """
    row, buffers = 2 * expert_hidden(cfg.model) + 8 * cfg.model.moe.top_k, costs(cfg, world).buffers
    buffers *= 2 if cfg.parallel.overlap_microbatches == "on" else 1
    return buffers * row + (Activations(cfg, world).replica_slot_bytes() if buffers else 0)


def needed(cfg: Config, world: int) -> int:
    """Bytes of the worst rank: torch's allocations and exchange buffers."""
    return max(m.peak for m in stage_memory(cfg, world)) + exchange_bytes(cfg, world)


def host_needed(cfg: Config, world: int) -> int:
    """Bytes of host memory of the worst rank, without those of checkpoints."""
    return max(m.host for m in stage_memory(cfg, world))


def fits(cfg: Config, world: int, machine: Machine) -> bool:
    """True if GPU and host memory of the worst rank suffice; `cfg` has resolved kernels."""
    return needed(cfg, world) <= machine.room and host_needed(cfg, world) <= machine.host_room


USABLE = 0.97
"""Part of free memory that FP8 copies may fill up. Between blocks of the allocator 1.6 to 4.7 GiB
of an H200 were left in seven runs in FP8 (docs/measured/training/four_h200s.md)."""
_GROWTH = 2
"""Growth of the row budget for which FP8 copies leave room, as layers do not give them back.
Natural routing of Qwen3-30B-A3B from scratch needed 2.96 x the balanced rows in its first step,
with a budget of 2 x (docs/measured/training/four_h200s.md)."""


def chooses_fp8_weights(cfg: Config) -> bool:
    """`precision.weights` is `auto`, and there are copies of ours."""
    copied = multiplies_fp8(cfg) and not expert_backend(cfg.kernels.backend).own_fp8
    return cfg.precision.weights == "auto" and copied


def fp8_weights(cfg: Config, world: int, free: int) -> int | str:
    """Value of `precision.weights` on ranks with so many bytes free.

    A choice is the largest number of layers that fits into `USABLE` of them, `with_growth`.
    """
    if not chooses_fp8_weights(cfg):
        return cfg.precision.weights
    cfg, available = with_growth(cfg, world), int(USABLE * free)
    kept, layers = resident_layers(cfg)
    most, least = (needed(changed(cfg, {"precision.weights": n}), world) for n in (kept, 0))
    if most > max(least, available):
        kept = int(layers * max(0, available - least) / (most - least))
        while kept and needed(changed(cfg, {"precision.weights": kept}), world) > available:
            kept -= 1  # layers differ, and so do stages
    return kept


def with_growth(cfg: Config, world: int) -> Config:
    """The configuration with the row budget that natural routing over ranks may come to need."""
    if not may_be_uneven(cfg, world):
        return cfg
    return changed(cfg, {"parallel.capacity_factor": _GROWTH * cfg.parallel.capacity_factor})


def fp8_place(cfg: Config) -> str:
    """`precision.weights` in words; `auto` counts as `resident`."""
    kept, layers = resident_layers(cfg)
    named = {0: "scratch", layers: "resident"}
    return named.get(kept, f"resident in {kept} of {layers} layers")


@dataclass(frozen=True)
class RowMemory:
    """Bytes of a number of expert rows, on a rank of the pipeline stage with most."""

    rows: int  # S
    layer: int  # bytes that experts save for the backward pass; 0 if it recomputes them
    rank: int  # saved by all layers and micro-batches in flight, and one layer's backward


def row_memory(cfg: Config, world: int) -> tuple[RowMemory, RowMemory]:
    """Memory of the budgeted rows, and of the rows if all tokens of a group meet on one rank.

    Kernels of `cfg` are resolved (`moe.plan.described`).
    """
    s = sizes(cfg, world)
    return _row_memory(cfg, world, s.rows), _row_memory(cfg, world, s.worst_rows)


def largest_factor(cfg: Config, world: int, available: int) -> float | None:
    """Largest `parallel.capacity_factor` that fits: expert rows over the balanced load.

    The `available` bytes are for everything in `stage_memory` and `exchange_bytes`. The factor is
    rounded down to hundredths; infinity if the worst routing fits, None if not even balanced
    experts do.
    """
    s, exchange = sizes(cfg, world), exchange_bytes(cfg, world)
    balanced = s.local_tokens * cfg.model.moe.top_k

    def fits(rows: int) -> bool:
        return max(m.peak for m in stage_memory(cfg, world, rows)) + exchange <= available

    if fits(s.worst_rows):
        return math.inf
    fit, too_many = -(-balanced // ROW_MULTIPLE), -(-s.worst_rows // ROW_MULTIPLE)
    if not fits(min(fit * ROW_MULTIPLE, s.worst_rows)):
        return None
    while too_many - fit > 1:
        middle = (fit + too_many) // 2
        fit, too_many = (middle, too_many) if fits(middle * ROW_MULTIPLE) else (fit, middle)
    return fit * ROW_MULTIPLE * 100 // balanced / 100


def buffer_bytes(cfg: Config, world: int) -> int:
    """Bytes of dispatch buffers at the peak, on the stage with most, under the worst routing."""
    most = sizes(cfg, world).worst_rows
    sent = changed(cfg, {"parallel.delay_wgrad": OFF})  # operands depend on the transport
    local = changed(sent, {"parallel.dispatch": "local", "parallel.expert_replication": 0})
    stages = zip(stage_memory(sent, world, most), stage_memory(local, world, most), strict=True)
    return exchange_bytes(cfg, world) + max(a.peak - b.peak for a, b in stages)


def _row_memory(cfg: Config, world: int, rows: int) -> RowMemory:
    some, none = (Activations(cfg, world, n).moe_layer() for n in (rows, 0))
    stages = zip(stage_memory(cfg, world, rows), stage_memory(cfg, world, 0), strict=True)
    saved = max(a.saved - b.saved for a, b in stages)
    return RowMemory(rows, some.saved - none.saved, saved + some.backward - none.backward)
