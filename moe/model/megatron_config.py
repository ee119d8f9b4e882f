"""From a typed config to Megatron-Core's TransformerConfig, section by section.

It has every MoE field too, so that Megatron-Core's own MoELayer builds from it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from phalanx.configs.arithmetic.layers import expert_hidden, has_experts, mixer_layers, mixer_of
from phalanx.configs.formats import in_bf16
from phalanx.configs.layout import pipeline_chunks
from phalanx.configs.schema import AttentionConfig, Config, ModelConfig, MoEConfig
from phalanx.configs.tables.activations import ACTIVATIONS
from phalanx.configs.tables.backends import expert_backend
from phalanx.kernels.expert_mlp.activation import formula
from phalanx.moe.model.kernel_facts import activation_of, compute_dtype

QUICK_GELU_SLOPE = 1.702  # slope of Megatron-Core's quick_gelu
_AUX_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")  # Megatron-Core's router has them


@dataclass
class _YarnConfig(TransformerConfig):
    """TransformerConfig with the YaRN fields that GPTModel reads but 0.19.2 does not declare."""

    yarn_rotary_scaling_factor: float = 1.0
    yarn_original_max_position_embeddings: int = 4096
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_mscale: float = 1.0
    yarn_mscale_all_dim: float = 0.0
    yarn_correction_range_round_to_int: bool = True


def _activation(moe: MoEConfig) -> Callable[..., torch.Tensor]:
    act = activation_of(moe)
    # Megatron-Core's fused paths recognise functions by identity, torch's and its own.
    if act.kind == "quick_geglu" and act.alpha == QUICK_GELU_SLOPE:
        return quick_gelu
    if act.facts.torch:
        torch_function: Callable[..., Tensor] = getattr(F, act.facts.torch)
        return torch_function
    value = formula(act).value
    return lambda x: value(x, act)


@dataclass(frozen=True)
class Layout:
    """The part of the layout that shapes a model chunk."""

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    expert: int = 1


def transformer_config(cfg: Config, layout: Layout, *, on_cpu: bool) -> TransformerConfig:
    """Megatron-Core's config of this model on this layout."""
    m = cfg.model
    kind, rotary = _rotary(m.attention)
    return kind(
        **_blocks(m),
        **_attention(m.attention),
        **_mixers(m),
        **_experts(m),
        **_parallel(cfg, layout),
        **_execution(cfg, layout, on_cpu=on_cpu),
        **_backend(cfg),
        **rotary,
    )


def _blocks(m: ModelConfig) -> dict[str, Any]:
    e = m.moe
    return dict(
        num_layers=m.layers,
        hidden_size=m.hidden,
        ffn_hidden_size=m.dense_ffn,
        add_bias_linear=m.bias,
        gated_linear_unit=ACTIVATIONS[e.activation].gated,
        activation_func=_activation(e),
        activation_func_clamp_value=e.activation_limit or None,
        glu_linear_offset=e.activation_offset,
        normalization="RMSNorm",
        layernorm_epsilon=m.norm_eps,
        layernorm_zero_centered_gamma=m.norm_zero_centered,
        hidden_dropout=0.0,
        perform_initialization=False,
        init_method_std=m.init_std,
        mtp_num_layers=m.mtp_layers or None,
        mtp_loss_scaling_factor=m.mtp_loss,
    )


def _attention(a: AttentionConfig) -> dict[str, Any]:
    return dict(
        num_attention_heads=a.heads,
        num_query_groups=a.kv_heads if a.kind == "gqa" else a.heads,
        kv_channels=a.head_dim,
        add_qkv_bias=a.qkv_bias,
        attention_output_gate=a.output_gate,
        qk_layernorm=a.qk_norm or a.kind == "mla",
        softmax_type="learnable" if a.sinks else "vanilla",
        window_size=(a.window - 1, 0) if a.window else None,
        window_attn_skip_freq=a.window_every if a.window and a.window_every > 1 else None,
        attention_dropout=0.0,
    )


def _mixers(m: ModelConfig) -> dict[str, Any]:
    return {k: v for name in mixer_layers(m) for k, v in mixer_of(name).megatron_fields(m).items()}


def _experts(m: ModelConfig) -> dict[str, Any]:
    e = m.moe
    if not has_experts(m):
        return {}
    return dict(
        num_moe_experts=e.experts,
        moe_ffn_hidden_size=e.ffn,
        moe_latent_size=expert_hidden(m) if expert_hidden(m) < m.hidden else None,
        moe_shared_expert_intermediate_size=e.shared_ffn or None,
        moe_shared_expert_gate=e.shared_gate,
        moe_layer_freq=[int(i >= e.dense_layers) for i in range(m.layers)],
        moe_token_dispatcher_type="alltoall",
        **_router(m),
    )


def _router(model: ModelConfig) -> dict[str, Any]:
    """Routing as TransformerConfig fields.

    Normalised softmax over all experts is softmax over the top-k logits, Megatron-Core's default.
    Forced balance is not among the fields: both routers force the choice themselves.
    """
    r, top_k = model.moe.router, model.moe.top_k
    losses = {name: getattr(r, name) for name in _AUX_LOSSES if getattr(r, name)}
    names, coefficients = list(losses) or ["none"], list(losses.values()) or [0.0]
    limited = r.group_topk < r.groups
    return dict(
        moe_router_topk=top_k,
        moe_router_score_function=r.score,
        moe_router_pre_softmax=r.softmax_over == "all" and not (r.normalize and top_k > 1),
        moe_router_num_groups=r.groups if limited else None,
        moe_router_group_topk=r.group_topk if limited else None,
        moe_router_topk_scaling_factor=r.scale if r.scale != 1 else None,
        moe_router_dtype="fp32",
        moe_router_enable_expert_bias=bool(r.bias_rate),
        moe_router_bias_update_rate=r.bias_rate,
        moe_router_load_balancing_type=names if len(names) > 1 else names[0],
        moe_aux_loss_coeff=coefficients if len(names) > 1 else coefficients[0],
        moe_z_loss_coeff=r.z_loss or None,
    )


def _parallel(cfg: Config, layout: Layout) -> dict[str, Any]:
    return dict(
        tensor_model_parallel_size=layout.tensor,
        sequence_parallel=layout.tensor > 1,
        context_parallel_size=layout.context,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=(
            layout.virtual_pipeline if layout.virtual_pipeline > 1 else None
        ),
        pipeline_model_parallel_layout=_pipeline_layout(cfg),
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=1,
    )


def _pipeline_layout(cfg: Config) -> str | None:
    """The layout of pipeline chunks; None if Megatron-Core would deal out layers like that."""
    chunks = pipeline_chunks(cfg)
    even = len({chunk.count("t") for chunk in chunks}) == 1
    return None if even and not cfg.parallel.pipeline_layout else "|".join(chunks)


def _execution(cfg: Config, layout: Layout, *, on_cpu: bool) -> dict[str, Any]:
    """Precision, and which of Megatron-Core's fusions and ways to communicate are used."""
    dtype, interleaved = compute_dtype(cfg), layout.virtual_pipeline > 1
    return dict(
        bf16=in_bf16(cfg),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        gradient_accumulation_fusion=cfg.kernels.gradient_accumulation_fusion and not on_cpu,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        # kernels.core_attention.latent and kernels.core_attention.rope rotate, and say why.
        apply_rope_fusion=False,
        persist_layer_norm=False,
        cross_entropy_loss_fusion=not on_cpu,
        deallocate_pipeline_outputs=True,
        # Batches of interleaved stages send in both directions. With two stages both go to the same
        # peer, and NCCL matches the transfers of a pair by their order in the batch: a stage would
        # receive what was meant for another chunk. Single transfers are ordered in each direction,
        # and overlap the compute of other micro-batches.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not on_cpu and not interleaved,
        # Megatron-Core would synchronise the device after each batch, for a torch older than 1.13:
        # the current stream waits for the transfers, which is all that order needs.
        batch_p2p_sync=False,
        variable_seq_lengths=False,
        deterministic_mode=False,
    )


def _backend(cfg: Config) -> dict[str, Any]:
    path = expert_backend(cfg.kernels.backend).config_fields
    return dict(resolve_name(path)(cfg)) if path else {}


def _rotary(a: AttentionConfig) -> tuple[type[TransformerConfig], dict[str, Any]]:
    y = a.yarn
    if a.kind == "mla":
        return MLATransformerConfig, dict(
            q_lora_rank=a.q_lora_rank or None,
            kv_lora_rank=a.kv_lora_rank,
            qk_head_dim=a.qk_nope_dim,
            qk_pos_emb_head_dim=a.qk_rope_dim,
            v_head_dim=a.v_dim,
            rope_type="yarn" if y.factor > 1 else "rope",
            rotary_base=a.rope_theta,
            rotary_scaling_factor=y.factor,
            original_max_position_embeddings=y.original_context,
            beta_fast=y.beta_fast,
            beta_slow=y.beta_slow,
            mscale=y.mscale,
            mscale_all_dim=y.mscale_all_dim,
        )
    if y.factor > 1:
        return _YarnConfig, dict(
            yarn_rotary_scaling_factor=y.factor,
            yarn_original_max_position_embeddings=y.original_context,
            yarn_beta_fast=y.beta_fast,
            yarn_beta_slow=y.beta_slow,
            yarn_mscale=y.mscale,
            yarn_mscale_all_dim=y.mscale_all_dim,
            yarn_correction_range_round_to_int=y.truncate,
        )
    return TransformerConfig, {}
