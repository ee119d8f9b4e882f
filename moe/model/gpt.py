"""From a typed config to Megatron-Core's GPTModel with our MoE layer, core attention and norm.

`build()` is the one place that knows Megatron-Core's model classes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pkgutil import resolve_name
from typing import Any

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
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from phalanx.configs.arithmetic.layers import is_dense, mixer, of_variants
from phalanx.configs.formats import is_resident
from phalanx.configs.layout import context_exchange
from phalanx.configs.schema import AttentionConfig, Config
from phalanx.configs.tables.backends import expert_backend
from phalanx.configs.tables.layers import MIXERS
from phalanx.kernels.expert_mlp.mlp_spec import Margins
from phalanx.moe.layer import MoE, MoEOptions
from phalanx.moe.model import embedding
from phalanx.moe.model.attention import LatentAttention, core_attention
from phalanx.moe.model.dense_mlp import DenseMLP
from phalanx.moe.model.grouped_attention import GroupedAttention, OutputProjection, over_heads
from phalanx.moe.model.kernel_facts import recipe
from phalanx.moe.model.loss import (
    LossContext,
    add_losses_ahead,
    cross_entropy,
    keep_predictions,
    token_shift,
)
from phalanx.moe.model.norm import norm_class
from phalanx.moe.model.transformer_layer import Layer
from phalanx.parallel.megatron import patches
from phalanx.parallel.memory.layer_context import MemoryPlan


@dataclass(frozen=True)
class Backends:
    """The implementations chosen for this run (kernels.registry)."""

    experts: str = "reference"
    attention: str = "reference"
    norm: str = "torch"
    other_mixer: str = "torch"  # implementation of the mixer in place of core attention, if any


def _rotary_share(a: AttentionConfig) -> float:
    """Fraction of a head's channels that are rotated; Megatron-Core rounds it down to channels."""
    all_channels = a.kind == "mla" or a.rotary_dim in (0, a.head_dim)
    return 1.0 if all_channels else (a.rotary_dim + 0.5) / a.head_dim


def embedding_stages(cfg: Config, config: TransformerConfig) -> list[int]:
    """Stages with the word embedding: the first, of a tied output, of multi-token prediction."""
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
        config: result of `transformer_config`, shared by all chunks.
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

        The `losses` are facts on the losses, on the stage that computes them.
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

        `hidden_states` are [S, B, D]; with multi-token prediction those that predict each token
        ahead follow along the first dimension.
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
    def __init__(self, norm: Any) -> None:
        self._norm = norm

    def layer_norm(self, *args: Any, **kwargs: Any) -> Any:
        """Class of the norm, whatever Megatron-Core asks for."""
        return self._norm


def _layer(
    cfg: Config, config: TransformerConfig, backends: Backends, moe: MoEOptions, number: int
) -> ModuleSpec:
    """Spec of layer `number`, from 0; prediction layers come after the last decoder layer."""
    m, backend = cfg.model, expert_backend(backends.experts)
    layer_recipe = None if backend.own_fp8 else recipe(cfg, number)
    moe = moe.with_recipe(layer_recipe, dense=cfg.precision.dense == "fp8")
    recomputed = memory_plan(cfg).recompute
    spec = replace(
        moe.spec,
        keep_fp8=is_resident(cfg, number),
        recompute_h="expert_h" in recomputed,
        save_unquantized="norm" in recomputed,
    )
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
    exchange = context_exchange(cfg) if config.context_parallel_size > 1 else ""
    attention.core_attention = core_attention(backends.attention, m.attention.sinks, exchange)
    for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
        if config.qk_layernorm and hasattr(attention, name):
            setattr(attention, name, norm)
    if m.attention.qk_norm and m.attention.qk_norm_over == "projection":
        attention.q_layernorm = partial(over_heads, norm, m.attention.heads)
        attention.k_layernorm = partial(over_heads, norm, m.attention.kv_heads)
    mixer_facts = MIXERS[mixer(m, number)]
    if mixer_facts.spec:
        own = backends.other_mixer, sub.self_attention, m
        sub.self_attention = resolve_name(mixer_facts.spec)(*own)
    if backend.layer:
        moe = replace(moe, recompute=recomputed)
    if is_dense(m, number):
        sub.mlp = partial(DenseMLP, spec=moe.dense, submodules=sub.mlp.keywords["submodules"])
    else:
        path = backend.layer or next((v.mlp for v in of_variants(m) if v.mlp), "")
        sub.mlp = partial(resolve_name(path) if path else MoE, options=moe)
    # Megatron-Core renames norms in checkpoints to match fused layers; ours are not fused.
    sub.sharded_state_dict_keys_map = {}
    projections = replace(moe.dense, margins=Margins())
    params: dict[str, Any] = {"memory": memory_plan(cfg)}
    if projections.recipe is not None and mixer_facts.quantized:
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
