"""Facts of a config and a machine that the choice of kernels depends on: dtype, recipes, sizes.

Also the kernels of flash-attn-4 and QuACK that a run launches on Hopper GPUs: these libraries
compile for head sizes, groups of heads and widths of norms, so that `scripts/build_kernels.py
--run` must know them before the model exists.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any, Literal

import torch

from phalanx.configs.arithmetic.attention import head_dims, qk_norms
from phalanx.configs.arithmetic.batch_sizes import model_input
from phalanx.configs.arithmetic.layers import (
    expert_hidden,
    has_experts,
    has_window,
    mixer,
    mixer_of,
)
from phalanx.configs.formats import in_bf16, is_fp8, quantized_layer, recipe_facts
from phalanx.configs.layout import expert_parallel_size, key_ranks, logit_interval
from phalanx.configs.schema import Config, ModelConfig, MoEConfig
from phalanx.configs.tables.backends import ATTENTION_BACKENDS, NORM_BACKENDS, Implementation
from phalanx.kernels.core_attention.fa4 import AttentionLayer
from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec
from phalanx.kernels.quantize.recipe import Recipe
from phalanx.kernels.registry import Facts, resolve
from phalanx.kernels.rms_norm.quack_library import Rows
from phalanx.moe.router.token_rounding import slots


def compute_dtype(cfg: Config) -> torch.dtype:
    """Dtype of activations, and of weights before they are multiplied or quantized."""
    return torch.bfloat16 if in_bf16(cfg) else torch.float32


def recipe(cfg: Config, layer: int) -> Recipe | None:
    """Quantization recipe of a layer's linear layers; None for layers that are not quantized.

    The `layer` counts from 0 over all pipeline stages; prediction layers follow the decoder's.
    """
    if not quantized_layer(cfg, layer):
        return None
    built: Recipe = resolve_name(recipe_facts(cfg).build)(cfg.precision)
    return built


HOPPER_PACKAGES = frozenset({"flash_attn_4", "quack", "triton", "nvidia_cutlass_dsl"})
"""Optional packages of our kernels on Hopper."""


def hopper_facts(cfg: Config, world: int, *, also: Iterable[str] = ()) -> Facts:
    """Facts of `cfg` on Hopper GPUs with the packages of our kernels, and with others."""
    packages = HOPPER_PACKAGES.union(also)
    return facts(cfg, world, device="cuda", capability=(9, 0), packages=packages, compiles=True)


def facts(
    cfg: Config, world: int, *, device: str, capability: tuple[int, int] | None, **machine: Any
) -> Facts:
    """Facts of `cfg` on `world` ranks; `machine` has more facts of a machine that is not this."""
    a, e = cfg.model.attention, cfg.model.moe
    key, value = head_dims(a)
    routed = has_experts(cfg.model)  # else the kernels run one MLP, of all tokens
    return Facts(
        device=device,
        capability=capability,
        dtype=compute_dtype(cfg),
        fp8=is_fp8(cfg),
        recipe=cfg.precision.recipe,
        wgrad=cfg.precision.wgrad,
        hidden=expert_hidden(cfg.model),
        ffn=e.ffn if routed else cfg.model.dense_ffn,
        experts=e.experts // expert_parallel_size(cfg, world) if routed else 1,
        slots=slots(e.router, experts=e.experts, top_k=e.top_k).width if routed else 1,
        activation=e.activation,
        activation_alpha=e.activation_alpha,
        activation_limit=e.activation_limit,
        activation_offset=e.activation_offset,
        sinks=a.sinks,
        window=a.window,
        head_dim=key,
        v_dim=value,
        norms=_norms(cfg),
        documents=cfg.data.document_mask,
        context=key_ranks(cfg),
        shares_heads=key_ranks(cfg) < cfg.parallel.context,
        max_logits=logit_interval(cfg.optim) > 0,
        **machine,
    )


def _norms(cfg: Config) -> tuple[int, ...]:
    a = cfg.model.attention
    latents = [a.q_lora_rank, a.kv_lora_rank] if a.kind == "mla" else []
    return tuple(width for width in (cfg.model.hidden, *qk_norms(a), *latents) if width)


_STEPS: tuple[Literal["forward", "backward"], ...] = ("forward", "backward")


def attention_layers(cfg: Config) -> tuple[AttentionLayer, ...]:
    """Keys of the kernels of flash-attn-4 that a run launches; none if it has another attention.

    Raises KernelUnavailable if the config names flash-attn-4, which cannot run its model.
    """
    a, facts = cfg.model.attention, _facts(cfg)
    if not _chosen("attention", cfg.kernels.attention, ATTENTION_BACKENDS, facts):
        return ()
    return tuple(
        AttentionLayer(
            _group(cfg),
            facts.head_dim,
            facts.v_dim,
            window=window,
            sinks=a.sinks,
            deterministic=cfg.run.deterministic,
            documents=cfg.data.document_mask,
        )
        for window in sorted(_windows(cfg))
    )


def norm_rows(cfg: Config) -> tuple[Rows, ...]:
    """Keys of the kernels of QuACK that a run launches; none if it has other norms.

    Raises KernelUnavailable if the config names QuACK, which cannot run its model.
    """
    if not _chosen("norm", cfg.kernels.norm, NORM_BACKENDS, _facts(cfg)):
        return ()
    m = cfg.model
    # The norm before attention adds nothing forward and the gradient of the residual backward, that
    # before the MLP adds in both, the final norm and those of multi-token prediction in neither.
    keys = [(m.hidden, step, adds) for step in _STEPS for adds in (False, True)]
    keys += [(width, step, False) for width in _inner_norms(cfg) for step in _STEPS]
    return tuple(Rows(*key, fp32_weight=m.norm_zero_centered) for key in dict.fromkeys(keys))


def _facts(cfg: Config) -> Facts:
    # Without Transformer Engine, which `auto` prefers where context ranks share sequences: the
    # machine of the run may lack it.
    on_hopper = hopper_facts(cfg, cfg.parallel.world_size or 1)
    on_cpu = cfg.run.device == "cpu"
    return replace(on_hopper, device="cpu", capability=None) if on_cpu else on_hopper


def _chosen(op: str, wanted: str, backends: Mapping[str, Implementation], facts: Facts) -> bool:
    """True if an operation runs by kernels that are compiled for a model's sizes."""
    if wanted in backends and not backends[wanted].per_model:
        return False  # whatever else that implementation needs
    return backends[resolve(op, wanted, facts).backend].per_model


def _group(cfg: Config) -> int:
    a, p = cfg.model.attention, cfg.parallel
    ranks = p.tensor * p.context // key_ranks(cfg)
    if a.kind == "mla":
        return 1
    # With more ranks than key-value heads, ranks that share one divide its query heads.
    return a.heads // ranks // max(1, a.kv_heads // ranks)


def _attention_layers(m: ModelConfig) -> list[int]:
    """Layers with softmax attention, from 0; those of multi-token prediction from 0 again."""
    decoder = [layer for layer in range(m.layers) if mixer_of(mixer(m, layer)).core]
    return decoder + list(range(m.mtp_layers))


def _windows(cfg: Config) -> set[bool]:
    """Whether a window hides keys; both answers where layers or chunks of a sequence differ."""
    a, ranks = cfg.model.attention, key_ranks(cfg)
    tokens, _ = model_input(cfg.data)
    first_chunk = tokens if ranks == 1 else tokens // (2 * ranks)
    return {
        has_window(a, layer) and a.window < keys
        for layer in _attention_layers(cfg.model)
        for keys in (first_chunk, tokens)
    }


def _inner_norms(cfg: Config) -> tuple[int, ...]:
    """Widths of norms inside attention that are no part of another kernel."""
    m, a = cfg.model, cfg.model.attention
    if not _attention_layers(m):
        return ()
    if a.kind == "mla":
        return tuple(rank for rank in (a.q_lora_rank, a.kv_lora_rank) if rank)
    # Norms of heads are fused with the rotary embedding (kernels.core_attention.qkv), except for
    # those that `moe.model.grouped_attention` computes before it.
    shared_heads = cfg.parallel.tensor > a.kv_heads
    together = a.qk_norm_over == "projection"
    return qk_norms(a) if shared_heads or together or m.norm_zero_centered else ()


def activation_of(moe: MoEConfig) -> Activation:
    """Activation of all MLPs of a model."""
    return Activation(
        moe.activation, moe.activation_alpha, moe.activation_limit, moe.activation_offset
    )


def uses_expert_kernels(spec: MLPSpec, *, ffn: int, tensor: int, bias: bool) -> bool:
    """True if a dense MLP of activation width `ffn` runs by the kernels of the routed experts."""
    multiple = spec.facts.dense_multiple
    ours = (multiple > 0 and ffn % multiple == 0) or spec.recipe is not None
    return ours and tensor == 1 and not bias
