"""From a typed config to Megatron-Core's GPTModel with our MoE layer, core attention and norm.

`build()` is the one place that knows Megatron-Core's model classes. The TransformerConfig carries
every MoE field too, so that the stock MoELayer (kernels.backend=megatron) builds from it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_submodules,
    get_gpt_mtp_block_spec_for_backend,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from phalanx.configs.activations import ACTIVATIONS
from phalanx.configs.formats import in_bf16, is_fp8
from phalanx.configs.linear_attention import HEAD_DIM, TAPS, is_linear
from phalanx.configs.schema import (
    AttentionConfig,
    Config,
    LinearAttentionConfig,
    ModelConfig,
    MoEConfig,
)
from phalanx.kernels.expert_mlp.activation import formula
from phalanx.kernels.expert_mlp.mlp_spec import Margins
from phalanx.moe.experts import activation_of
from phalanx.moe.layer import MoE, MoEOptions
from phalanx.moe.model import embedding
from phalanx.moe.model.attention import LatentAttention, core_attention
from phalanx.moe.model.dense_mlp import DenseMLP
from phalanx.moe.model.grouped_attention import GroupedAttention, over_heads
from phalanx.moe.model.loss import LossContext, cross_entropy
from phalanx.moe.model.mtp_loss import add_losses_ahead, keep_predictions, token_shift
from phalanx.moe.model.norm import norm_class
from phalanx.moe.model.output_projection import OutputProjection
from phalanx.moe.model.precision import compute_dtype, recipe, with_recipe
from phalanx.moe.model.transformer_layer import Layer
from phalanx.moe.stock_moe import QUICK_GELU_SLOPE, StockMoE, router_kwargs
from phalanx.parallel.megatron import patches
from phalanx.parallel.memory.layer_context import MemoryPlan


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
    """The nonlinearity of dense and shared MLPs and of the stock experts."""
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
class Backends:
    """The implementations chosen for this run (kernels.registry)."""

    experts: str = "reference"
    attention: str = "reference"
    norm: str = "torch"
    linear_attention: str = "torch"


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
        **_linear_attention(m.linear_attention),
        **_experts(m),
        **_parallel(cfg, layout),
        **_execution(cfg, layout, on_cpu=on_cpu),
        **_fp8(cfg),
        **router_kwargs(m),
        **rotary,
    )


def _blocks(m: ModelConfig) -> dict[str, Any]:
    """Width, dense MLP, norms and initialisation of the layers."""
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


def _linear_attention(a: LinearAttentionConfig) -> dict[str, Any]:
    """Sizes only: `build` decides layer by layer which layers have linear attention."""
    return dict(
        linear_conv_kernel_dim=TAPS,
        linear_key_head_dim=HEAD_DIM,
        linear_value_head_dim=HEAD_DIM,
        linear_num_key_heads=a.key_heads,
        linear_num_value_heads=a.value_heads,
    )


def _experts(m: ModelConfig) -> dict[str, Any]:
    e = m.moe
    return dict(
        num_moe_experts=e.experts,
        moe_ffn_hidden_size=e.ffn,
        moe_shared_expert_intermediate_size=e.shared_ffn or None,
        moe_shared_expert_gate=e.shared_gate,
        moe_layer_freq=[int(i >= e.dense_layers) for i in range(m.layers)],
        moe_token_dispatcher_type="alltoall",
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
        pipeline_model_parallel_layout=cfg.parallel.pipeline_layout or None,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=1,
    )


def _execution(cfg: Config, layout: Layout, *, on_cpu: bool) -> dict[str, Any]:
    """Precision, and which of Megatron-Core's fusions and ways to communicate are used."""
    dtype, interleaved = compute_dtype(cfg), layout.virtual_pipeline > 1
    return dict(
        bf16=in_bf16(cfg),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        # The stock MoE layer applies it to its experts too, which then need Apex or TE.
        gradient_accumulation_fusion=(
            cfg.kernels.gradient_accumulation_fusion
            and cfg.kernels.backend != "megatron"
            and not on_cpu
        ),
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
        variable_seq_lengths=False,
        deterministic_mode=False,
    )


def _fp8(cfg: Config) -> dict[str, Any]:
    """Fields of Transformer Engine's blockwise recipe, for Megatron-Core's own experts."""
    p = cfg.precision
    if not is_fp8(cfg) or cfg.kernels.backend != "megatron":
        return {}
    return dict(
        fp8="hybrid" if p.grad_format == "e5m2" else "e4m3",
        fp8_recipe="blockwise",
        first_last_layers_bf16=p.bf16_first_layers + p.bf16_last_layers > 0,
        num_layers_at_start_in_bf16=p.bf16_first_layers,
        num_layers_at_end_in_bf16=p.bf16_last_layers,
    )


def _rotary(a: AttentionConfig) -> tuple[type[TransformerConfig], dict[str, Any]]:
    """The class that declares this attention's rotary embedding, and its fields."""
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


def _rotary_share(a: AttentionConfig) -> float:
    """Fraction of a head's channels that are rotated; Megatron-Core rounds it down to channels."""
    all_channels = a.kind == "mla" or a.rotary_dim in (0, a.head_dim)
    return 1.0 if all_channels else (a.rotary_dim + 0.5) / a.head_dim


def embedding_stages(cfg: Config, config: TransformerConfig) -> list[int]:
    """Pipeline stages that hold the word embedding.

    These are the first stage, that of a tied output and that of multi-token prediction.
    """
    stages = range(config.pipeline_model_parallel_size)
    tied = [stages[-1]] if cfg.model.tie_embeddings else []
    return sorted({0, *tied, *get_mtp_ranks(list(stages), config)})


def build(
    cfg: Config,
    config: TransformerConfig,
    *,
    pg: ProcessGroupCollection,
    backends: Backends,
    moe: MoEOptions,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> GPTModel:
    """One model chunk: the layers of one (virtual) pipeline stage.

    Args:
        cfg: config of the run.
        config: result of `transformer_config`, shared by all chunks.
        pg: process groups.
        backends: chosen implementations.
        moe: options of the MoE layers.
        pre_process: this chunk holds the embedding.
        post_process: this chunk holds the loss.
        vp_stage: index of a virtual pipeline chunk.
        pp_rank: pipeline rank; the process group's by default.
    """
    m = cfg.model
    norm = norm_class(backends.norm)
    layer = partial(_layer, cfg, config, backends, moe)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=pp_rank)
    count = get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=pp_rank)
    if config.pipeline_model_parallel_layout is not None:
        ids = _layout_ids(config, vp_stage, pp_rank)
    else:
        ids = list(range(first, first + count))
    block = TransformerBlockSubmodules(layer_specs=[layer(i) for i in ids], layer_norm=norm)
    mtp = None
    if m.mtp_layers:
        patches.losses_ahead_by(keep_predictions)
        # Built like the last decoder layer, also where this chunk has no decoder layer.
        mtp = get_gpt_mtp_block_spec_for_backend(
            config=config,
            spec=TransformerBlockSubmodules(layer_specs=[layer(m.layers)], layer_norm=norm),
            backend=_NormProvider(norm),
            vp_stage=vp_stage,
            pp_rank=pp_rank,
        )
    yarn = m.attention.yarn.factor > 1 and m.attention.kind == "gqa"
    model = LanguageModel(
        config=config,
        transformer_layer_spec=block,
        vocab_size=m.vocab_size,
        max_sequence_length=cfg.data.sequence_length,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=m.tie_embeddings,
        position_embedding_type="yarn" if yarn else "rope",
        rotary_percent=_rotary_share(m.attention),
        rotary_base=int(m.attention.rope_theta),
        mtp_block_spec=mtp,
        pg_collection=pg,
        vp_stage=vp_stage,
    )
    embedding.install(model)
    if m.tie_embeddings and model.mtp_process and post_process:
        # The prediction layer's copy of the embedding is the output weight; Megatron-Core allocates
        # a second one past the first stage, which it never uses and refuses to checkpoint.
        model.output_layer.weight = None
    return model


class LanguageModel(GPTModel):
    """Megatron-Core's GPTModel; on GPUs with the loss of `moe.model.loss`.

    Tokens of packed documents (`moe.model.packed`) are rotated by their positions in them.
    """

    def _preprocess(self, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
        result = super()._preprocess(*args, packed_seq_params=packed_seq_params, **kwargs)
        hidden, angles, *rest = result
        if packed_seq_params is None or angles is None:  # latent attention computes its angles
            return result
        # Megatron-Core's angles are by position in the sequence, without regard to documents.
        angles = self.rotary_pos_emb(packed_seq_params.max_seqlen_q, packed_seq=True)
        angles = angles[0] if isinstance(angles, tuple) else angles
        return hidden, packed_seq_params.angles(angles), *rest

    def forward(self, *args: Any, losses: LossContext | None = None, **kwargs: Any) -> Tensor:
        """Loss of each token [B, S], or logits [B, S, V] without labels; else hidden states.

        Args:
            args, kwargs: arguments of Megatron-Core's class.
            losses: facts on the losses, on the stage that computes them.
        """
        output: Tensor = super().forward(
            *args,
            output_processor=self._output,
            output_processor_context=losses or LossContext(),
            **kwargs,
        )
        return output

    def _output(self, *, hidden_states: Tensor, context: LossContext, **call: Any) -> Tensor:
        """Output of the last stage; Megatron-Core calls it in place of its own computation.

        Args:
            hidden_states: [S, B, D]; with multi-token prediction those that predict each token
                ahead follow along the first dimension.
            context: facts on the losses.
            call: other arguments of the hook of Megatron-Core.
        """

        def logits(hidden_SBD: Tensor) -> Tensor:
            logits_SBV, _ = call["output_layer"](
                hidden_SBD,
                weight=call["output_weight"],
                runtime_gather_output=call["runtime_gather_output"],
            )
            return logits_SBV

        labels = call["labels"]
        if self.config.mtp_num_layers:
            hidden_states, *ahead = hidden_states.chunk(1 + self.config.mtp_num_layers)
            if labels is not None and self.training:
                hidden_states = add_losses_ahead(
                    [hidden_states, *ahead],
                    labels,
                    call["loss_mask"],
                    context,
                    token_loss=lambda x, y: self.compute_language_model_loss(y, logits(x)),
                    shift=token_shift(self.pg_collection.cp, call["packed_seq_params"]),
                    config=self.config,
                )
        logits_SBV = logits(hidden_states)
        if labels is None:
            return logits_SBV.transpose(0, 1).contiguous()
        return self.compute_language_model_loss(labels, logits_SBV, context.expected_grad)

    def compute_language_model_loss(
        self,
        labels: Tensor,
        logits: Tensor,
        expected_grad: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """Loss of each token, fp32 [B, S], of logits [S, B, V], which it may overwrite."""
        if not self.config.cross_entropy_loss_fusion:
            return super().compute_language_model_loss(labels, logits)
        return cross_entropy(logits, labels, self.pg_collection.tp, expected_grad)


class _NormProvider(LocalSpecProvider):
    """Megatron-Core's local modules with our norm."""

    def __init__(self, norm: Any) -> None:
        self._norm = norm

    def layer_norm(self, *args: Any, **kwargs: Any) -> Any:
        """Class of the norm, whatever Megatron-Core asks for."""
        return self._norm


def _layer(
    cfg: Config, config: TransformerConfig, backends: Backends, moe: MoEOptions, number: int
) -> ModuleSpec:
    """Spec of layer `number`, from 0; prediction layers come after the last decoder layer."""
    m, layer_recipe = cfg.model, recipe(cfg, number) if backends.experts != "megatron" else None
    moe = with_recipe(moe, layer_recipe, dense=cfg.precision.dense == "fp8")
    recomputed = memory_plan(cfg).recompute
    spec = replace(moe.spec, recompute_h="expert_h" in recomputed, save_unquantized="norm" in recomputed)
    moe = replace(moe, spec=spec)
    mla = m.attention.kind == "mla"
    sub = get_gpt_layer_local_submodules(
        normalization="RMSNorm",
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=mla,
    )
    sub.self_attention.module = LatentAttention if mla else GroupedAttention
    norm = norm_class(backends.norm)
    sub.input_layernorm = sub.pre_mlp_layernorm = norm_class(backends.norm, residual=True)
    attention = sub.self_attention.submodules
    attention.linear_proj = OutputProjection
    whole_with_sinks = m.attention.sinks and config.context_parallel_size == 1
    attention.core_attention = core_attention(backends.attention, whole_with_sinks=whole_with_sinks)
    for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
        if config.qk_layernorm and hasattr(attention, name):
            setattr(attention, name, norm)
    if m.attention.qk_norm and m.attention.qk_norm_over == "projection":
        attention.q_layernorm = partial(over_heads, norm, m.attention.heads)
        attention.k_layernorm = partial(over_heads, norm, m.attention.kv_heads)
    linear = is_linear(m, number)
    if linear:
        # Imported here, since it needs a part of Megatron-Core that no other model needs.
        from phalanx.moe.model import gated_delta_net

        sub.self_attention = gated_delta_net.spec(backends.linear_attention)
    if backends.experts == "megatron":
        modules = {"moe_act": "moe_act", "moe": "moe", "mlp": "shared_experts"}
        names = tuple(module for name, module in modules.items() if name in recomputed)
        moe = replace(moe, recompute=names)
    if number >= m.moe.dense_layers:
        sub.mlp = partial(StockMoE if backends.experts == "megatron" else MoE, options=moe)
    else:
        sub.mlp = partial(DenseMLP, spec=moe.dense, submodules=sub.mlp.keywords["submodules"])
    # Megatron-Core renames norms in checkpoints to match fused layers; ours are not fused.
    sub.sharded_state_dict_keys_map = {}
    projections = replace(moe.dense, margins=Margins())
    params: dict[str, Any] = {"memory": memory_plan(cfg)}
    # Projections of linear attention do not divide into FP8 blocks and stay bf16.
    if projections.recipe is not None and not linear:
        params["projections"] = projections
    return ModuleSpec(module=Layer, params=params, submodules=sub)


def memory_plan(cfg: Config) -> MemoryPlan:
    """Activations that every layer recomputes or offloads."""
    return MemoryPlan(frozenset(cfg.run.recompute), frozenset(cfg.run.offload))


def _layout_ids(config: TransformerConfig, vp_stage: int | None, pp_rank: int | None) -> list[int]:
    from megatron.core.transformer.enums import LayerType

    layout: Any = config.pipeline_model_parallel_layout
    return list(
        layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=vp_stage, pp_rank=pp_rank)
    )
