"""Parameters, gradients and optimizer state of each pipeline stage, in numbers and bytes.

Sharded as in Megatron-Core: matrices of attention and dense MLPs over tensor ranks, experts over
expert ranks, norms, router and output biases not at all. Its distributed optimizer shards the state
of experts over the expert-data parallel ranks, of all else over data and context parallel ranks.
"""

import functools
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from pkgutil import resolve_name
from typing import NamedTuple, cast

from phalanx.configs.arithmetic.accounting import (
    Parameters,
    expert_weights,
    parameters,
    variant_weights,
)
from phalanx.configs.arithmetic.layers import ATTENTION, is_dense, mixer, mixer_of, mlp_layers
from phalanx.configs.formats import (
    grad_width,
    in_bf16,
    is_resident,
    multiplies_fp8,
    quantized_layer,
    quantizes,
    quantizes_dense,
    width,
)
from phalanx.configs.knobs import changed
from phalanx.configs.layout import expert_parallel_size, optimizer_shards, pipeline_chunks
from phalanx.configs.remembered import SHARDS, STAGES, remembered
from phalanx.configs.schema import Config
from phalanx.configs.tables.activations import ACTIVATIONS
from phalanx.configs.tables.backends import expert_backend
from phalanx.configs.tables.capabilities import SHARDED_WEIGHTS, ZERO3
from phalanx.configs.tables.layers import MIXERS
from phalanx.configs.tables.optimizers import HOST_STATES, MOMENTS, OPTIMIZERS

_FP32 = 4
_UNDIVIDED = {
    "parallel.tensor": 1,
    "parallel.context": 1,
    "parallel.pipeline": 1,
    "parallel.virtual_pipeline": 1,
    "parallel.pipeline_layout": "",
    "parallel.expert": 1,
}


class WholeUpdates(NamedTuple):
    """Matrices of a stage that the optimizer updates as a whole, each on the rank that owns it."""

    dense: int = 0  # elements on a rank before the optimizer shards them
    expert: int = 0  # elements of experts, likewise
    elements: int = 0  # elements that the most loaded rank owns
    padding: int = 0  # elements of gradient and parameter buffers without a parameter
    flops: float = 0.0  # FLOPs of that rank's update
    touched: int = 0  # bytes that these read and write


@dataclass(frozen=True)
class Weights:
    """Weights, gradients and optimizer state of one rank."""

    dense: int  # parameters replicated over data parallel ranks
    expert: int  # parameters of this rank's experts
    parameter_bytes: int
    gradient_bytes: int  # buffers of `parallel.grad_dtype`, one element for each parameter
    whole: "WholeUpdates"  # matrices that the optimizer updates as a whole
    padding_bytes: int  # of both buffers, because ranks own unequal shares of these matrices
    optimizer_bytes: int  # wherever they are
    """This rank's shard: fp32 master weights (bf16 runs), moments, averages of `optim.ema`.

    Two moments of AdamW, one of matrices that are updated as a whole and not split: the largest
    shard. Master weights of a sharded optimizer with bf16 moments are the 16 bits that the weights
    lack."""
    hosted_bytes: int = 0  # of them, in host memory
    device_states: int = 0  # on the device: others, or slots in which hosted ones take turns

    @property
    def device_bytes(self) -> int:
        """Bytes on the device."""
        return self.parameter_bytes + self.gradient_bytes + self.padding_bytes + self.device_states


@remembered(*STAGES, *SHARDS, "precision", "kernels")
def stage_weights(cfg: Config, world: int) -> list[Weights]:
    """Weights of a rank of each pipeline stage."""
    stages = [[0, 0] for _ in range(cfg.parallel.pipeline)]
    held: list[list[Chunk]] = [[] for _ in stages]
    all_layers = parameters(cfg.model)
    known: dict[tuple[object, ...], tuple[int, int]] = {}
    for chunk in chunks(cfg):
        alike = chunk[1:]
        if alike not in known:
            known[alike] = in_chunk(cfg, world, chunk, all_layers)
        dense, expert = known[alike]
        stages[chunk.stage][0] += dense
        stages[chunk.stage][1] += expert
        held[chunk.stage].append(chunk)
    found = [
        _weights(cfg, world, dense, expert, _whole_updates(cfg, world, of_stage))
        for (dense, expert), of_stage in zip(stages, held, strict=True)
    ]
    if cfg.parallel.distributed_optimizer in ZERO3:
        sharded = resolve_name(SHARDED_WEIGHTS)
        return [sharded(cfg, world, *each) for each in zip(found, held, strict=True)]
    return found


def checkpoint_bytes(cfg: Config) -> int:
    """Bytes of a checkpoint: weights, master weights and moments, whatever the layout.

    In fp32 the weights are in it twice, as those of the model and of the optimizer. Descriptions
    of the tensors come on top: 1 % of a model of some millions of parameters, less of larger ones.
    """
    (whole,) = stage_weights(changed(cfg, _UNDIVIDED), 1)
    again = 0 if in_bf16(cfg) else whole.parameter_bytes
    return whole.parameter_bytes + whole.optimizer_bytes + again


def split_masters(cfg: Config) -> bool:
    """Are weights the upper 16 bits of their master copies (parallel.megatron.adam)?"""
    both = in_bf16(cfg) and MOMENTS[cfg.optim.moments].bf16
    return both and bool(cfg.parallel.distributed_optimizer)


class LayerKind(NamedTuple):
    """Properties of a layer that decide its memory and time."""

    dense: bool  # a dense MLP instead of experts
    fp8: bool  # linear layers in the recipe of the run
    mixer: str = ATTENTION  # name of the mixer (`configs.tables.layers`)
    resident: bool = False  # FP8 copies of its weights last from one update to the next


class Chunk(NamedTuple):
    """Layers of one model chunk."""

    stage: int  # pipeline stage of the chunk
    letters: str  # contents, in the letters of `parallel.pipeline_layout`
    kinds: tuple[LayerKind, ...]  # kinds of decoder layers, then of prediction layers

    @property
    def mtp(self) -> int:
        """Number of prediction layers."""
        return self.letters.count("m")

    @property
    def heads(self) -> int:
        """Number of output layers."""
        return self.letters.count("L")

    @property
    def dense(self) -> int:
        """Number of layers with a dense MLP."""
        return sum(kind.dense for kind in self.kinds)

    @property
    def sparse(self) -> int:
        """Number of layers with experts."""
        return len(self.kinds) - self.dense

    @property
    def mixers(self) -> Counter[str]:
        """Number of layers with each mixer; not to be changed."""
        return _mixers(self.kinds)


@functools.lru_cache
def _mixers(kinds: tuple[LayerKind, ...]) -> Counter[str]:
    return Counter(kind.mixer for kind in kinds)


@remembered(*STAGES, "precision")
def chunks(cfg: Config) -> tuple[Chunk, ...]:
    """All model chunks, in the order of their layers."""
    kinds = all_kinds(cfg)
    decoder, predicting = iter(kinds[: cfg.model.layers]), kinds[cfg.model.layers :]
    return tuple(
        Chunk(
            i % cfg.parallel.pipeline,
            letters,
            (*islice(decoder, letters.count("t")), *predicting[: letters.count("m")]),
        )
        for i, letters in enumerate(pipeline_chunks(cfg))
    )


@remembered("model", "precision")
def all_kinds(cfg: Config) -> list[LayerKind]:
    """Kinds of all layers, in order."""
    m = cfg.model
    return _kinds(cfg, [*range(m.layers), *[m.layers] * m.mtp_layers])


def _kinds(cfg: Config, layers: list[int]) -> list[LayerKind]:
    m, fp8 = cfg.model, quantizes(cfg)
    found = []
    for i in layers:
        recipe = fp8 and quantized_layer(cfg, i)
        found.append(LayerKind(is_dense(m, i), recipe, mixer(m, i), recipe and is_resident(cfg, i)))
    return found


def in_chunk(cfg: Config, world: int, chunk: Chunk, p: Parameters) -> tuple[int, int]:
    """(dense, expert) parameters of a rank in one chunk; `p` has those of all layers."""
    m, tensor = cfg.model, cfg.parallel.tensor
    h, bias = m.hidden, int(m.bias)
    letters, layers, mtp = chunk.letters, len(chunk.kinds), chunk.mtp
    without_experts, sparse = chunk.dense, chunk.sparse
    all_dense, all_sparse = mlp_layers(m)

    unsharded = bias * h  # the output bias of a mixer, and of a dense MLP
    mlp = _share(p.dense_mlp, all_dense)
    gate = m.moe.shared_gate * h
    shared = _share(p.shared_experts, all_sparse) - gate
    dense = layers * 2 * h
    for name, count in chunk.mixers.items():
        kind = mixer_of(name)
        cut = (kind.parameters(m) - unsharded) // tensor
        dense += count * (cut + unsharded + kind.norms(m))
    dense += sparse * variant_weights(m)
    dense += without_experts * ((mlp - unsharded) // tensor + unsharded)
    dense += sparse * (shared // tensor + gate + _share(p.router, all_sparse))
    dense += mtp * (2 * h * h // tensor + 3 * h)
    table = m.vocab_size * h // tensor
    if "E" in letters or mtp:
        dense += table
    if "L" in letters:
        dense += h + (0 if m.tie_embeddings and ("E" in letters or mtp) else table)
    experts = _share(p.routed_experts, all_sparse) // expert_parallel_size(cfg, world)
    return dense, sparse * experts


def _share(total: int, layers: int) -> int:
    return total // layers if layers else 0


def _whole_updates(cfg: Config, world: int, held: list[Chunk]) -> WholeUpdates:
    path = OPTIMIZERS[cfg.optim.kind].estimate
    return cast(WholeUpdates, resolve_name(path)(cfg, world, held)) if path else WholeUpdates()


def _weights(cfg: Config, world: int, dense: int, expert: int, whole: WholeUpdates) -> Weights:
    p = cfg.parallel
    elements = dense + expert
    grad = grad_width(cfg)
    moments = OPTIMIZERS[cfg.optim.kind].moments
    where = MOMENTS[cfg.optim.moments]
    moment = 2 if where.bf16 else _FP32
    master = 2 if split_masters(cfg) else _FP32
    if not in_bf16(cfg):
        master = 0  # the fp32 parameters are the master weights
    if cfg.optim.ema:
        master += _FP32
    of_dense, of_experts = optimizer_shards(cfg, world)
    left = -(-(dense - whole.dense) // of_dense) - (-(expert - whole.expert) // of_experts)
    state = (master + moments * moment) * left
    state += (master + moment) * whole.elements
    padding = whole.padding * (width(cfg) + grad) if p.distributed_optimizer else 0
    device = resolve_name(HOST_STATES).slot_bytes(cfg, state) if where.hosted else state
    return Weights(
        dense,
        expert,
        parameter_bytes=elements * width(cfg),
        gradient_bytes=elements * grad,
        whole=whole,
        padding_bytes=padding,
        optimizer_bytes=state,
        hosted_bytes=state if where.hosted else 0,
        device_states=device,
    )


@remembered(*STAGES, "parallel.tensor", "precision", "kernels")
def cached_gradient_bytes(cfg: Config, world: int) -> list[int]:
    """Bytes on each stage of bf16 placeholders that Transformer Engine caches, one per shape.

    When linear layers add weight gradients directly to the buffers, Megatron-Core passes autograd
    an unused tensor of the weight's shape, which comes from that cache.
    """
    m, t = cfg.model, cfg.parallel.tensor
    if not (cfg.kernels.gradient_accumulation_fusion and in_bf16(cfg)):
        return [0] * cfg.parallel.pipeline
    if not expert_backend(cfg.kernels.backend).placeholder_grads:
        return [0] * cfg.parallel.pipeline
    h, up = m.hidden, ACTIVATIONS[m.moe.activation].halves
    stages: list[set[tuple[int, int]]] = [set() for _ in range(cfg.parallel.pipeline)]
    for chunk in chunks(cfg):
        shapes, sparse = stages[chunk.stage], chunk.sparse
        for name in chunk.mixers:
            *inner, (inputs, outputs) = mixer_of(name).matrices(m)
            shapes |= {(rows // t, columns) for columns, rows in inner}
            shapes.add((outputs, inputs // t))
        if chunk.dense:
            shapes |= {(up * m.dense_ffn // t, h), (h, m.dense_ffn // t)}
        if sparse and m.moe.shared_ffn:
            shapes |= {(up * m.moe.shared_ffn // t, h), (h, m.moe.shared_ffn // t)}
        if chunk.mtp:
            shapes.add((h // t, 2 * h))
        if chunk.heads:
            shapes.add((m.vocab_size // t, h))
    return [sum(2 * rows * columns for rows, columns in shapes) for shapes in stages]


class Fp8Weights(NamedTuple):
    """Numbers of a layer's weights on a rank that products in FP8 read."""

    experts: int
    dense: int


def fp8_weights_by_kind(cfg: Config, world: int) -> dict[LayerKind, Fp8Weights]:
    """Weights of a layer of each kind of which FP8 copies are made; `cfg` has resolved kernels."""
    m, found = cfg.model, dict.fromkeys(all_kinds(cfg), Fp8Weights(0, 0))
    if not multiplies_fp8(cfg):
        return found
    matrices = (ACTIVATIONS[m.moe.activation].halves + 1) * m.hidden
    of_experts = expert_weights(m) * (m.moe.experts // expert_parallel_size(cfg, world))
    for kind in (kind for kind in found if kind.fp8):
        dense = matrices * (m.dense_ffn if kind.dense else m.moe.shared_ffn)
        dense += mixer_of(kind.mixer).weights(m) if MIXERS[kind.mixer].quantized else 0
        dense = dense // cfg.parallel.tensor if quantizes_dense(cfg) else 0
        found[kind] = Fp8Weights(0 if kind.dense else of_experts, dense)
    return found


@remembered(*STAGES, "parallel.tensor", "parallel.expert", "precision", "kernels")
def fp8_copy_bytes(cfg: Config, world: int) -> list[int]:
    """Bytes on each stage of FP8 copies of weights.

    They are those of its resident layers in both layouts, and one of another layer's experts;
    `precision.weights=auto` counts as `resident`.
    """
    by_kind = fp8_weights_by_kind(cfg, world)
    kept, scratch = [0] * cfg.parallel.pipeline, [0] * cfg.parallel.pipeline
    for chunk in chunks(cfg):
        i = chunk.stage
        for kind in chunk.kinds:
            if kind.resident:
                kept[i] += 2 * sum(by_kind[kind])
            else:
                scratch[i] = max(scratch[i], by_kind[kind].experts)
    return [sum(each) for each in zip(kept, scratch, strict=True)]
