"""Memory of one rank of each pipeline stage, as torch's allocator counts it at its peak."""

from dataclasses import dataclass, replace

from phalanx.configs.capture import CAPTURED
from phalanx.configs.layout import document_places, pipeline_chunks
from phalanx.configs.schema import Config
from phalanx.kernels.core_attention.documents import BOUNDED
from phalanx.moe.estimate.activations import Activations, Layer
from phalanx.moe.estimate.pipeline import held
from phalanx.moe.estimate.traffic import costs
from phalanx.moe.estimate.weights import (
    Weights,
    cached_gradient_bytes,
    fp8_copy_bytes,
    layer_kinds,
    stage_weights,
)

_WORKSPACES = 128 * 2**20
"""cuBLAS and Transformer Engine keep about this much."""


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank of one stage."""

    stage: int
    weights: Weights
    cached: int
    """Placeholders of weight gradients, FP8 copies of expert weights, and workspaces."""
    saved: int
    """Kept for backward passes, of all micro-batches in flight."""
    backward: int
    """What the largest backward pass needs on top."""
    validation: int
    """What a validation needs beside a captured step, whose memory it cannot use."""
    host: int
    """In host memory, of all micro-batches in flight (`run.offload`)."""

    @property
    def states(self) -> int:
        """Parameters, gradients, what pads their buffers, and optimizer."""
        w = self.weights
        return w.parameter_bytes + w.gradient_bytes + w.padding_bytes + w.optimizer_bytes

    @property
    def peak(self) -> int:
        """Largest allocation."""
        return self.states + self.cached + self.saved + self.backward + self.validation


def stage_memory(cfg: Config, world: int, rows: int | None = None) -> list[Memory]:
    """Of each stage, in order.

    Args:
        cfg: valid, with resolved kernels and graph (`moe.estimate.resolved`).
        world: ranks.
        rows: expert rows of a rank; the budget of `parallel.capacity_factor` by default.
    """
    act = Activations(cfg, world, rows)
    head, of_kind = act.head(), act.by_kind()
    stages: list[list[list[Layer]]] = [[] for _ in range(cfg.parallel.pipeline)]
    first = 0
    for i, letters in enumerate(pipeline_chunks(cfg)):
        kinds, decoder = layer_kinds(cfg, letters, first), letters.count("t")
        parts = [of_kind[kind] for kind in kinds]
        parts[decoder:] = [
            replace(part, saved=part.saved + act.prediction_extra()) for part in parts[decoder:]
        ]
        first += decoder
        stages[i % cfg.parallel.pipeline].append(parts + [head] * letters.count("L"))
    weights, cached = stage_weights(cfg, world), cached_gradient_bytes(cfg, world)
    copies = fp8_copy_bytes(cfg, world)
    return [
        Memory(
            stage=i,
            weights=weights[i],
            cached=cached[i] + copies[i] + _WORKSPACES + _documents(cfg),
            saved=held(cfg, world, i, [sum(part.saved for part in c) for c in chunks]),
            backward=_backward([part for c in chunks for part in c], head),
            validation=_validation(cfg, [part for c in chunks for part in c]),
            host=held(cfg, world, i, [sum(part.moved for part in c) for c in chunks]),
        )
        for i, chunks in enumerate(stages)
    ]


def _documents(cfg: Config) -> int:
    """Scratch of flash-attn-4's backward pass for places of documents: 128 rows of fp32 for each,
    of the gradients of queries, and of keys and values that query heads share."""
    d, a = cfg.data, cfg.model.attention
    if not d.document_mask or cfg.kernels.attention not in BOUNDED:
        return 0
    if a.kind == "mla":
        channels = a.heads * (a.qk_nope_dim + a.qk_rope_dim)
    else:
        shared = 2 * a.kv_heads if a.kv_heads < a.heads else 0
        channels = (a.heads + shared) * a.head_dim
    return document_places(d) * d.micro_batch * 128 * 4 * channels // cfg.parallel.tensor


def _backward(parts: list[Layer], head: Layer) -> int:
    """Logits are gone when the layers' backward passes begin.

    Of what is in host memory two layers' are here: that which leaves or is used, and the next.
    """
    freed, moving = head.saved if head in parts else 0, 2 * max(part.moved for part in parts)
    return moving + max(part.backward if part is head else part.backward - freed for part in parts)


def _validation(cfg: Config, parts: list[Layer]) -> int:
    """A forward pass without gradients, also of a sample, holds one part of the model at a time.

    Eager steps have given their memory back by then; a CUDA graph keeps its own.
    """
    run = cfg.run
    forward = run.eval_interval > 0 or run.sample_every > 0 or bool(run.record_routing)
    beside = run.graph == CAPTURED and forward
    return max(part.saved + part.moved for part in parts) if beside else 0


def exchange_bytes(cfg: Config, world: int) -> int:
    """Receive buffers and replica slots of one-sided exchanges, outside torch's allocator, whatever
    the load."""
    row, buffers = 2 * cfg.model.hidden + 8 * cfg.model.moe.top_k, costs(cfg, world).buffers
    return buffers * row + (Activations(cfg, world).replica_bytes() if buffers else 0)


def needed(cfg: Config, world: int) -> int:
    """Bytes of the worst rank: torch's allocations and exchange buffers."""
    return max(m.peak for m in stage_memory(cfg, world)) + exchange_bytes(cfg, world)


def host_needed(cfg: Config, world: int) -> int:
    """Bytes of host memory of the worst rank, beside those of checkpoints."""
    return max(m.host for m in stage_memory(cfg, world))


def fp8_weights(cfg: Config, world: int, room: int) -> str:
    """What `precision.weights` comes to on ranks that may need `room` bytes: `auto` is `resident`
    where that fits."""
    if cfg.precision.weights != "auto":
        return cfg.precision.weights
    kept = replace(cfg, precision=replace(cfg.precision, weights="resident"))
    return "resident" if needed(kept, world) <= room else "scratch"
