"""Parameters, FLOPs and peak rates in closed form, from the model's configuration alone.

FLOPs follow the convention of Megatron-LM and Megatron-Bridge, so that rates compare with published
ones: matrix products of forward and backward (a multiply-add is two), the causal half of attention,
sliding windows exact, linear mixers as their recurrence, multi-token prediction counted; no
embedding, router, norms or recompute.
"""

import math
from dataclasses import dataclass, fields

from phalanx.configs.arithmetic.attention import head_dims
from phalanx.configs.arithmetic.layers import (
    expert_hidden,
    has_window,
    is_dense,
    mixer,
    mixer_layers,
    mixer_of,
    mlp_layers,
    of_variants,
)
from phalanx.configs.schema import Config, ModelConfig
from phalanx.configs.tables.activations import ACTIVATIONS


@dataclass(frozen=True)
class Parameters:
    """Parameters by part; multi-token-prediction layers are in the parts they consist of."""

    embedding: int
    attention: int
    dense_mlp: int
    router: int
    routed_experts: int
    shared_experts: int
    norms: int
    mtp_projection: int
    head: int
    variants: int = 0  # of `model.variants`, beside experts of another size

    @property
    def total(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self))


def parameters(model: ModelConfig, *, mtp: bool = True) -> Parameters:
    """Every parameter once; `mtp=False` leaves out the multi-token-prediction layers.

    Published totals leave them out (DeepSeek-V3: 671 B of 683 B).
    """
    return _count(model, mtp=mtp, experts=model.moe.experts)


def active_parameters(model: ModelConfig) -> Parameters:
    """Parameters used by one token: `top_k` experts, and no input embedding (it is looked up).

    DeepSeek (36.6 B, rounded to 37) and OpenAI (3.6 B, 5.1 B) count this way. Qwen3's 3.3 B adds
    the input embedding, Moonlight's 2.24 B leaves out the head as well.
    """
    active = _count(model, mtp=False, experts=model.moe.top_k)
    head = model.vocab_size * model.hidden
    return Parameters(**{**vars(active), "embedding": 0, "head": head})


def flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """FLOPs of forward and backward for one token of a sequence of `sequence_length` tokens."""
    m, h = model, model.hidden
    dense, sparse = mlp_layers(m)
    linear = mixer_products(m)
    for name, layers in mixer_layers(m).items():
        linear += layers * mixer_of(name).weights(m)
    linear += dense * mlp_weights(m, m.dense_ffn)
    linear += sparse * expert_weights(m) * m.moe.top_k
    linear += sparse * (variant_weights(m) + mlp_weights(m, m.moe.shared_ffn))
    linear += (1 + m.mtp_layers) * h * m.vocab_size + m.mtp_layers * 2 * h * h
    backward_twice, multiply_add = 3, 2
    return float(backward_twice * multiply_add * linear + core_flops(m, sequence_length))


def mixer_products(model: ModelConfig) -> int:
    """Multiply-adds of a token in all mixers, beside their projections and core attention."""
    return sum(n * mixer_of(name).products(model) for name, n in mixer_layers(model).items())


def core_flops(model: ModelConfig, sequence_length: int) -> float:
    """FLOPs of a token's core attention, forward and backward, in all layers that have it."""
    a = model.attention
    seen = sum(_keys_seen(model, layer, sequence_length) for layer in core_layers(model))
    return 6.0 * a.heads * sum(head_dims(a)) * seen


def core_layers(model: ModelConfig) -> list[int]:
    """Layers (from 0) with core attention, those of multi-token prediction last."""
    layers = range(model.layers + model.mtp_layers)
    return [layer for layer in layers if mixer_of(mixer(model, layer)).core]


def layer_flops(model: ModelConfig, sequence_length: int) -> list[float]:
    """FLOPs of forward and backward of each layer for one token, as in `flops_per_token`.

    Layers of multi-token prediction come last, without their input projections.
    """
    m, a, e = model, model.attention, model.moe
    sparse = expert_weights(m) * e.top_k + mlp_weights(m, e.shared_ffn) + variant_weights(m)
    dense, channels = mlp_weights(m, m.dense_ffn), a.heads * sum(head_dims(a))

    def products(layer: int) -> float:
        mlp = dense if is_dense(m, layer) else sparse
        kind = mixer_of(mixer(m, layer))
        core = channels * _keys_seen(m, layer, sequence_length) if kind.core else 0.0
        return kind.weights(m) + kind.products(m) + core + mlp

    return [6.0 * products(layer) for layer in range(m.layers + m.mtp_layers)]


def head_flops(model: ModelConfig) -> float:
    """FLOPs of forward and backward of the output layer, of all losses, for one token."""
    return 6.0 * (1 + model.mtp_layers) * model.hidden * model.vocab_size


def flops_note(cfg: Config) -> str:
    """Text after a FLOP count, if document masks make attention cheaper than counted."""
    return ", upper bound: attention over full sequences" if cfg.data.document_mask else ""


def bf16_peak(name: str) -> float | None:
    """Dense BF16 peak in TFLOP/s of a GPU by its name; None for an unknown one."""
    return next((peak for part, peak in _BF16_PEAKS if part in name), None)


def fp8_peak(name: str) -> float | None:
    """Dense FP8 peak in TFLOP/s: twice that of bf16 on GPUs that have FP8; None for others."""
    peak = bf16_peak(name)
    return None if peak is None or "A100" in name else 2 * peak


# Data sheets, without sparsity. The first match counts: variants stand before their family.
_BF16_PEAKS: tuple[tuple[str, float], ...] = (
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("GH200", 989.0),
    ("H200", 989.0),
    ("H100", 989.0),
    ("H800", 989.0),
    ("H20", 148.0),
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("A100", 312.0),
)


def _count(m: ModelConfig, *, mtp: bool, experts: int) -> Parameters:
    h, e, mtp_layers = m.hidden, m.moe, m.mtp_layers if mtp else 0
    dense, sparse = mlp_layers(m, mtp=mtp)
    up, bias, inner = ACTIVATIONS[e.activation].halves, int(m.bias), expert_hidden(m)
    mixers = [(mixer_of(name), layers) for name, layers in mixer_layers(m, mtp=mtp).items()]
    return Parameters(
        embedding=m.vocab_size * h,
        attention=sum(layers * each.parameters(m) for each, layers in mixers),
        dense_mlp=dense * (mlp_weights(m, m.dense_ffn) + bias * (up * m.dense_ffn + h)),
        router=sparse * e.experts * (h + bias),
        routed_experts=sparse * experts * (expert_weights(m) + bias * (up * e.ffn + inner)),
        shared_experts=sparse * (mlp_weights(m, e.shared_ffn) + e.shared_gate * h),
        # Two per layer (before attention and MLP) and a final one; a prediction layer has a final
        # norm of its own, and one for each of its two inputs.
        norms=(dense + sparse) * 2 * h
        + sum(layers * each.norms(m) for each, layers in mixers)
        + (h + mtp_layers * 3 * h),
        mtp_projection=mtp_layers * 2 * h * h,
        head=0 if m.tie_embeddings else m.vocab_size * h,
        variants=sparse * variant_weights(m),
    )


def variant_weights(m: ModelConfig) -> int:
    """Matrix elements that `model.variants` add to a layer with experts."""
    return sum(math.prod(matrix) for v in of_variants(m) for matrix in v.matrices(m))


def expert_weights(m: ModelConfig) -> int:
    """Matrix elements of one routed expert."""
    return mlp_weights(m, m.moe.ffn) // m.hidden * expert_hidden(m)


def mlp_weights(m: ModelConfig, ffn: int) -> int:
    """Matrix elements of one MLP or expert."""
    return (ACTIVATIONS[m.moe.activation].halves + 1) * m.hidden * ffn


def _keys_seen(m: ModelConfig, layer: int, length: int) -> float:
    a = m.attention
    if not has_window(a, layer) or a.window >= length:
        return length / 2 * mixer_of(mixer(m, layer)).core_share(m, length)
    return a.window - a.window * (a.window - 1) / (2 * length)
