"""Bytes that modules save for the backward pass, and their peaks in it.

For the planner, which imports no Megatron-Core: a function here describes what the module of its
name saves. Tensors that two modules share are counted by one of them. The configuration has
resolved kernels.
"""

from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from phalanx.configs.arithmetic.layers import expert_hidden
from phalanx.configs.formats import fp8_row, is_fp8, width
from phalanx.configs.layout import context_exchange
from phalanx.configs.schema import Config
from phalanx.configs.tables.activations import ACTIVATIONS
from phalanx.configs.tables.backends import attention_backend, expert_backend, norm_backend
from phalanx.configs.tables.capabilities import CONTEXT_EXCHANGES
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec
from phalanx.kernels.quantize.recipe import Fp8Block
from phalanx.moe.model.kernel_facts import activation_of, uses_expert_kernels

SavedTensors = dict[str, int]  # saved bytes of a layer, by group of tensors


@dataclass(frozen=True)
class TokenCounts:
    """Token and row counts of one rank's micro-batch."""

    tokens: int  # tokens before sequence parallelism splits them
    local_tokens: int  # after sequence parallelism has split them; input of the experts
    received: int  # received tokens, with one copy per rank
    rows: int  # budgeted expert rows
    worst_rows: int  # expert rows if all tokens of the expert-parallel group went to this rank


def saves_fp8_inputs(cfg: Config) -> bool:
    """Do linear layers save their inputs in FP8?"""
    return is_fp8(cfg) and cfg.precision.wgrad == "fp8"


def router_saved(cfg: Config, counts: TokenCounts) -> int:
    """Saved bytes of routing: scores and choices of local tokens, choices of received ones."""
    e = cfg.model.moe
    return counts.local_tokens * (8 * e.experts + 16 * e.top_k) + 4 * counts.received * e.top_k


def experts_saved(cfg: Config, counts: TokenCounts, *, fp8: bool) -> SavedTensors:
    """Saved bytes of the experts of a layer in FP8 or not: h, and the plan of the rows.

    The inputs are saved by the dispatcher or by the norm before the router.
    """
    return {"expert_h": hidden_bytes(cfg, counts, fp8=fp8), "moe": 8 * counts.rows}


def hidden_bytes(cfg: Config, counts: TokenCounts, *, fp8: bool) -> int:
    """Bytes of the first projection of all expert rows."""
    e, parts = cfg.model.moe, ACTIVATIONS[cfg.model.moe.activation].halves
    if fp8 and cfg.precision.hidden == "fp8":
        return counts.rows * fp8_row(parts * e.ffn, parts)
    return counts.rows * width(cfg) * parts * e.ffn


def experts_backward(cfg: Config, counts: TokenCounts, local: int) -> int:
    """Peak of the backward pass of `local` experts, over its steps in their order."""
    hidden, e, k = expert_hidden(cfg.model), cfg.model.moe, cfg.kernels
    parts, element = ACTIVATIONS[e.activation].halves, width(cfg)
    row_d, row_f = counts.rows * hidden * element, counts.rows * e.ffn * element
    fused, facts = k.gradient_accumulation_fusion, expert_backend(k.backend)
    grads = 0 if fused and facts.joint_placeholder else local
    w1, w2 = (grads * n * hidden * e.ffn * element for n in (parts, 1))
    dh, tokens = parts * row_f, counts.received * hidden * element
    copies = int(not facts.fuses_gather)  # gathered rows, bf16 weight gradients
    # In FP8 all operands of weight gradients are transposed while x's gradient is live.
    transposed = row_f + row_d if saves_fp8_inputs(cfg) and facts.fuses_gather else 0
    dw2 = 0 if fused else w2
    return max(
        copies * row_d + row_f + dh + row_f * copies,
        copies * (row_d + w2) + dh + row_f,
        copies * (row_d + w1) + dh + dw2,
        dh + row_d + tokens + transposed + (w1 + w2 if dw2 else 0),
        tokens + w1 + w2,  # placeholders for autograd, or gradients
    )


def dense_saved(cfg: Config, counts: TokenCounts, ffn: int, *, fp8: bool) -> int:
    """Saved bytes of a dense MLP or of shared experts of width `ffn`, by the recipe (`fp8`) or not.

    Megatron-Core's MLP saves the projection, the activated gate, its linear part and their product.
    """
    parts, recipe = ACTIVATIONS[cfg.model.moe.activation].halves, Fp8Block() if fp8 else None
    tensor, bias = cfg.parallel.tensor, cfg.model.bias
    spec = MLPSpec(activation_of(cfg.model.moe), cfg.kernels.backend, recipe=recipe)
    if not uses_expert_kernels(spec, ffn=ffn, tensor=tensor, bias=bias):
        parts = 2 * parts + 1
    return counts.tokens * width(cfg) * parts * ffn // tensor


def dense_backward(cfg: Config, counts: TokenCounts) -> int:
    """Peak of a dense MLP's backward pass: gradients of the projection and the product."""
    return counts.tokens * width(cfg) * 3 * cfg.model.dense_ffn // cfg.parallel.tensor


def attention_saved(cfg: Config, counts: TokenCounts) -> SavedTensors:
    """Saved bytes of the model's core attention with its projections, of either kind."""
    of_kind = _latent_attention if cfg.model.attention.kind == "mla" else _grouped_attention
    return of_kind(cfg, counts)


def _grouped_attention(cfg: Config, counts: TokenCounts) -> SavedTensors:
    """Saved bytes: query, key and value as core attention reads them, its output and statistics."""
    a, k = cfg.model.attention, cfg.kernels
    q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    kernel_inputs, projected, whole_groups = q + 2 * kv, 0, a.kv_heads >= cfg.parallel.tensor
    if a.output_gate:
        projected += 2 * q  # the gate, and the output of core attention before it
    if a.qk_norm and a.qk_norm_over == "projection":
        projected += q + kv  # copies of query and key, saved by the norms
    elif 0 < a.rotary_dim < a.head_dim:
        # Unfused rotary embedding: the full projection, of which values are a view, and with norms
        # the query sliced out of it.
        projected += q + kv + (q + kv if a.qk_norm else 0)
    elif a.qk_norm and whole_groups:
        # The full projection, of which values may be a view.
        if attention_backend(k.attention).copies_heads:
            projected += q + 2 * kv
        else:
            kernel_inputs += q + kv
    elif a.qk_norm and norm_backend(k.norm).copies_heads:
        projected += q + kv  # copies of query and key, saved by the norm
    elif a.qk_norm:
        projected += 2 * q + 2 * kv  # the full projection, and the query sliced out of it
    elif not whole_groups and attention_backend(k.attention).reads_projection:
        kernel_inputs += q + kv  # values are a view that keeps the full projection alive
    return _core_attention(cfg, counts, kernel_inputs, q, projected=projected)


def _latent_attention(cfg: Config, counts: TokenCounts) -> SavedTensors:
    """Saved bytes of latent attention: kernel inputs, output, statistics and latents."""
    a = cfg.model.attention
    qk, out = a.heads * (a.qk_nope_dim + a.qk_rope_dim), a.heads * a.v_dim
    # Down-projections and their norms' outputs, split along the sequence.
    latents = a.q_lora_rank + a.kv_lora_rank
    down = latents + a.qk_rope_dim
    return _core_attention(cfg, counts, 2 * qk + out, out, projected=down, latents=latents)


def _core_attention(
    cfg: Config,
    counts: TokenCounts,
    kernel_inputs: int,
    out: int,
    *,
    projected: int = 0,
    latents: int = 0,
) -> SavedTensors:
    """Saved bytes of an attention around core attention.

    Channels of a token: of queries, keys and values, of the output, of what is `projected` and
    saved before core attention, and of `latents` of latent attention.
    """
    element, heads, exchanged = width(cfg), cfg.model.attention.heads, _exchange(cfg)
    sizes = {
        "queries_keys_values": element * kernel_inputs,
        "latents": element * latents,
        "out": element * out + 4 * heads,  # with the fp32 statistics of the softmax
        "exchanged": exchanged.saved(cfg) if exchanged else 0,
        "projected": element * projected,
    }
    return {name: counts.tokens * size // cfg.parallel.tensor for name, size in sizes.items()}


def attention_backward(cfg: Config, counts: TokenCounts) -> int:
    """Bytes of gradients around core attention, where ranks share sequences; else 0."""
    exchanged = _exchange(cfg)
    return counts.tokens * exchanged.backward(cfg) // cfg.parallel.tensor if exchanged else 0


def _exchange(cfg: Config) -> Any:
    """The `extras.context.facts.Exchange` of ranks that share sequences, or None."""
    if cfg.parallel.context == 1 or attention_backend(cfg.kernels.attention).layer:
        return None  # another library's layer passes keys on, and keeps its own
    return resolve_name(CONTEXT_EXCHANGES[context_exchange(cfg)].facts)
