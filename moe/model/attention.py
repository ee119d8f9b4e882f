"""Core attention of a layer: Megatron-Core's `core_attention` slot over kernels.core_attention.

One class serves grouped queries, latent attention (values narrower than keys), layers with and
without a sliding window, and learnable sinks, with the parameter name and checkpoint layout of
Megatron-Core and Transformer Engine. Ranks that share sequences have a subclass
(`extras.context`).

Shape legend: S positions of this rank, T keys, B batch, H query heads, G key-value heads,
d channels of query and key, v channels of value.
"""

import math
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttention,
    MLASelfAttentionSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch.profiler import record_function

from phalanx.configs.tables.backends import ATTENTION_BACKENDS
from phalanx.configs.tables.capabilities import CONTEXT_EXCHANGES
from phalanx.kernels.core_attention.core import attention
from phalanx.kernels.core_attention.documents import Documents
from phalanx.kernels.core_attention.latent import keys_values
from phalanx.kernels.core_attention.max_logit import MaxLogit
from phalanx.kernels.core_attention.rope import rope_
from phalanx.moe.model.max_logits import active_max_logit
from phalanx.moe.model.packed import Packed
from phalanx.parallel.memory.layer_context import current_layer_context


class CoreAttention(MegatronModule):
    """Causal attention between the projections of a layer, built by Megatron-Core's attention.

    Args:
        layer_number: counted from 1, decides whether this layer has a window.
        softmax_scale: factor on the logits; 1 / sqrt(key channels) by default.
        k_channels: channels of a query and key head; `config.kv_channels` by default.
        pg_collection: the `tp` group splits heads, the `cp` group splits the sequence.
        backend: backend of kernels.core_attention.

    The others are part of Megatron-Core's protocol. Raises ValueError for dropout, or a softmax
    type that is neither vanilla nor learnable.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        backend: str,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        if attention_dropout or (attention_dropout is None and config.attention_dropout):
            raise ValueError("core attention has no dropout: set attention_dropout to 0")
        if config.softmax_type not in ("vanilla", "learnable"):
            raise ValueError(f"core attention has no softmax type {config.softmax_type!r}")
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        self.tp_group, self.cp_group = groups.tp, groups.cp
        self.backend = backend
        self.scale = softmax_scale or 1 / math.sqrt(k_channels or config.kv_channels)
        self.window = window_of(config, layer_number)
        self.top: MaxLogit | None = None  # if the run measures them
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // self.tp_group.size()
            self.softmax_offset = torch.nn.Parameter(
                torch.zeros(heads, dtype=config.params_dtype, device=torch.cuda.current_device())
            )
            # Without the mark, the gradient norm would only count the heads of tensor rank 0.
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
            if config.perform_initialization:
                config.init_method(self.softmax_offset)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Attend within each sequence, or within documents of one.

        Args:
            query, key, value: [S, B, H, d], [S, B, G, d], [S, B, G, v]; under context parallelism
                the rank's two chunks of the sequence, as Megatron-Core assigns them.
            attention_mask: ignored; the mask is always causal.
            packed_seq_params: `moe.model.packed.Packed` of the S tokens of one sequence, or None.

        Returns:
            [S, B, H * v] in the dtype of `query`.
        """
        assert attention_bias is None
        packed = packed_seq_params

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            with record_function("attention/core"):
                return self._attend_packed(query, key, value, packed)

        return attend_in_context(attend, query, key, value)

    def _attend_packed(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed: Packed | None
    ) -> torch.Tensor:
        return self._attend(q, k, v, None if packed is None else packed.documents)

    def _attend(
        self,
        q_SBHd: torch.Tensor,
        k_TBGd: torch.Tensor,
        v_TBGv: torch.Tensor,
        documents: Documents | None = None,
    ) -> torch.Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q_SBHd, k_TBGd, v_TBGv))
        o_BHSv = attention(
            q,
            k,
            v,
            scale=self.scale,
            window=self.window,
            sinks_H=self.softmax_offset,
            documents=documents,
            top=active_max_logit(self),
            backend=self.backend,
        )
        return o_BHSv.permute(2, 0, 1, 3).flatten(2).contiguous()

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The sinks, split over tensor ranks by head; empty without sinks."""
        assert metadata is not None
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


def window_of(config: TransformerConfig, layer_number: int) -> int:
    """Number of keys that a query of the layer attends to, itself included; 0 is no limit."""
    windowed = is_layer_window_attention(
        config.window_size, config.window_attn_skip_freq, layer_number
    )
    # Megatron-Core counts the keys before the query, (127, 0) for a window of 128.
    return config.window_size[0] + 1 if windowed and config.window_size else 0


def attend_in_context(
    attend: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> torch.Tensor:
    """Core attention, recomputed or offloaded as the layer's memory plan says."""
    memory = current_layer_context()
    out: torch.Tensor = memory.region("attention", attend, query, key, value)
    memory.offload("attention", query, key, value, out)
    return out


class LatentAttention(MLASelfAttention):
    """Multi-head latent attention (arXiv 2405.04434), with three changes to Megatron-Core 0.19.2.

    1. Megatron-Core gathers the column-split key-value down-projection and uses its rotary part
       on every tensor rank for the rank's own heads, whose gradient alone the rank then has. Here
       the gathered projection returns to the sequence-parallel layout first, from which the rotary
       part is gathered with a gradient that is summed over ranks.
    2. Megatron-Core requires a norm in front of a query projection without a low rank, which no
       published model has. Here there is none.
    3. Megatron-Core splits and concatenates queries to rotate some of their channels, and
       concatenates keys from their own part and the rotary part that all heads share. Here either
       is one pass (`kernels.core_attention.rope`, `kernels.core_attention.latent`).

    Training only: `moe.inference.cached_attention` adds a cache.
    """

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        return {
            name: getattr(submodules, name)
            for name in (
                "linear_q_proj",
                "linear_q_up_proj",
                "linear_kv_up_proj",
                "q_layernorm",
                "kv_layernorm",
            )
        }

    def _qkv_down_projection(
        self, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q_compressed, kv_combined = super()._qkv_down_projection(hidden_states)
        if self.config.sequence_parallel:
            kv_combined = gather_from_tensor_model_parallel_region(kv_combined, self.tp_group)
            kv_combined = scatter_to_sequence_parallel_region(kv_combined, self.tp_group)
        return q_compressed, kv_combined

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        inference_context: Any = None,
    ) -> tuple[torch.Tensor, ...]:
        """Queries and keys [S, B, H, d], values [S, B, H, v], query and key-value latents.

        `hidden_states` are [S, B, D], under sequence parallelism S / tensor of them, and
        `packed_seq_params` a `moe.model.packed.Packed` of the S tokens of one sequence, or None.
        The other arguments are part of Megatron-Core's protocol.
        """
        assert inference_context is None
        c = self.config
        q_latent, kv = self._qkv_down_projection(hidden_states)
        kv_latent, k_rope = kv.split([c.kv_lora_rank, c.qk_pos_emb_head_dim], -1)
        if c.sequence_parallel:
            k_rope = gather_from_sequence_parallel_region(k_rope, group=self.tp_group)
        memory = current_layer_context()
        if not memory.recomputes("mla_up"):
            return *self._up(q_latent, kv_latent, k_rope, packed_seq_params), q_latent, kv_latent

        def up(q: torch.Tensor, kv: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
            # Values must not be a view: freeing them frees all of their storage, and core attention
            # would copy them.
            return tuple(x.contiguous() for x in self._up(q, kv, k, packed_seq_params))

        query, key, value = memory.region("mla_up", up, q_latent, kv_latent, k_rope)
        return query, key, value, q_latent, kv_latent

    def _up(
        self,
        q_latent: torch.Tensor,
        kv_latent: torch.Tensor,
        k_rope: torch.Tensor,
        packed: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        c, heads = self.config, self.num_attention_heads_per_partition
        if c.q_lora_rank is None:
            q, _ = self.linear_q_proj(q_latent)
        else:
            q, _ = self.linear_q_up_proj(self.q_layernorm(q_latent))
        kv, _ = self.linear_kv_up_proj(self.kv_layernorm(kv_latent))
        freqs, mscale = self.angles(len(q), packed)
        q_SBHd = rope_(q, freqs, heads=heads, mscale=mscale, interleaved=True, first=c.qk_head_dim)
        kv_SBHm = kv.unflatten(-1, (heads, -1))
        k_SBHd, v_SBHv = keys_values(kv_SBHm, k_rope, freqs, nope=c.qk_head_dim, mscale=mscale)
        return q_SBHd, k_SBHd, v_SBHv

    def angles(self, positions: int, packed: Any) -> tuple[torch.Tensor, float]:
        """Rotary angles of a rank's positions, and the factor of what they turn."""
        c = self.config
        # With packed documents, the angles of all positions on every context rank.
        length = positions * c.context_parallel_size if packed is None else packed.max_seqlen_q
        angles = self.rotary_pos_emb(length, packed_seq=packed is not None)
        freqs, mscale = angles if c.rope_type == "yarn" else (angles, 1.0)
        return (freqs if packed is None else packed.angles(freqs)), mscale

    def up_weights(self) -> tuple[torch.Tensor, ...]:
        """Up-projections of keys [H, n, r] and values [H, v, r]."""
        c, weight = self.config, self.linear_kv_up_proj.weight
        up_Hmr = weight.unflatten(0, (self.num_attention_heads_per_partition, -1))
        return up_Hmr.split([c.qk_head_dim, c.v_head_dim], 1)


def core_attention(backend: str, sinks: bool = False, exchange: str = "") -> Any:
    """The core attention module of a layer spec; `exchange`: of ranks that share sequences."""
    if path := ATTENTION_BACKENDS[backend].layer:
        return resolve_name(path)(sinks and not exchange)
    module = resolve_name(CONTEXT_EXCHANGES[exchange].layer) if exchange else CoreAttention
    return ModuleSpec(module=module, params={"backend": backend})
