"""Grouped-query attention, with norms and rotary embedding by kernels.core_attention.qkv.

Megatron-Core 0.19.2 copies the queries out of the mixed projection, normalises and rotates queries
and keys by separate kernels, and concatenates three gradients. In this class one kernel computes
the inputs of core attention from the projection, to which its bias has not been added, and one
kernel computes the gradients. Norms over all heads together (OLMoE, MiniMax-M2) and norms with
weights less 1 (Qwen3-Next) are separate steps. With an output gate the projection has a gate of
each query head, behind the queries of its group; Megatron-Core multiplies the output by its
sigmoid.

Shape legend: S positions, B batch, H query heads, G key-value heads, d channels; N = H / G + 2, or
with a gate 2 H / G + 2.
"""

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from phalanx.configs.schema import Config
from phalanx.configs.tables.backends import attention_backend, norm_backend
from phalanx.kernels.core_attention.qkv import HeadNorms, queries_keys_values
from phalanx.kernels.core_attention.rope import rope
from phalanx.moe.model.attention import CoreAttention, core_saved_tensors, latent_saved_tensors
from phalanx.moe.saved_tensors import SavedTensors, TokenCounts
from phalanx.parallel.megatron.gathered import gathered


def over_heads(norm: Any, heads: int, *, hidden_size: int, **kwargs: Any) -> Any:
    """A norm over `heads` heads of `hidden_size` channels together, in place of one of each head.

    Args:
        norm: class of `moe.model.norm`.
        heads: number of query heads, or of key heads.
        hidden_size: channels of a head, which Megatron-Core passes.
        kwargs: other arguments of the norm.
    """
    return norm(hidden_size=heads * hidden_size, **kwargs)


class GroupedAttention(SelfAttention):
    """Megatron-Core's SelfAttention for training on whole sequences; parameters are the same."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._mixed = self.config.num_query_groups >= self.world_size
        """Each tensor rank has whole groups, so that the projection can be read as it is."""
        self.linear_qkv.skip_bias_add = self._mixed
        self._reads_views = isinstance(self.core_attention, CoreAttention)
        norm = self.q_layernorm
        self._over_heads = norm is not None and norm.weight.numel() > self.config.kv_channels
        """The norms are those of `over_heads`; all heads are then on this rank."""
        centered = norm is not None and self.config.layernorm_zero_centered_gamma
        self._separate_norms = self._over_heads or centered
        """The norms are steps before the rotary embedding."""

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor | None, ...]:
        """Mixed projection [S, B, G, N, d], bias [G, N, d], None, and gates [S, B, H, d] if any.

        `_adjust_key_value_for_inference` splits the projection. If tensor ranks share groups,
        queries, keys, values and gates as Megatron-Core returns them.
        """
        if not self._mixed:
            return super().get_query_key_value_tensors(hidden_states, *args, **kwargs)
        mixed, bias = self.linear_qkv(hidden_states)
        shape = self.num_query_groups_per_partition, -1, self.hidden_size_per_attention_head
        mixed = mixed.view(*mixed.shape[:2], *shape)
        bias = None if bias is None else bias.view(shape)
        if not self.config.attention_output_gate:
            return mixed, bias, None
        if bias is not None:
            mixed = mixed + bias
        R = mixed.shape[-2] // 2 - 1
        return mixed, None, None, mixed[..., R : 2 * R, :].flatten(2, 3)

    def _adjust_key_value_for_inference(
        self,
        inference_context: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        rotary_pos_emb: tuple[Tensor, Tensor],
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Queries, keys and values after the rotary embedding, and no rotary angles.

        Megatron-Core's hook between projections and rotary embedding: the one method that takes and
        returns both.
        """
        assert inference_context is None
        (freqs, _), mscale = rotary_pos_emb, self._yarn_concentration_factor
        if self._mixed and self._separate_norms:
            query, key, value = self._normed_separately(query, key, freqs, mscale)
        elif self._mixed:
            query, key, value = queries_keys_values(
                self._ungated(query),
                key,
                freqs,
                mscale=mscale,
                norms=self._norms(),
                view=self._reads_views,
            )
        else:
            assert key is not None
            query, key = (rope(x, freqs, mscale=mscale) for x in (query, key))
        return query, key, value, None, self.attn_mask_type, None

    def _ungated(self, mixed_SBGNd: Tensor) -> Tensor:
        """Queries, key and value of each group; a copy if gates lie between them."""
        if not self.config.attention_output_gate:
            return mixed_SBGNd
        R = mixed_SBGNd.shape[-2] // 2 - 1
        return torch.cat([mixed_SBGNd[..., :R, :], mixed_SBGNd[..., 2 * R :, :]], -2)

    def _normed_separately(
        self, mixed_SBGNd: Tensor, bias_GNd: Tensor | None, freqs: Tensor, mscale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, normalised by head or over all channels and rotated, and values.

        Values are a copy, so that autograd does not save the projection for a part of it.
        """
        if bias_GNd is not None:
            mixed_SBGNd = mixed_SBGNd + bias_GNd
        N, d = mixed_SBGNd.shape[3:]
        R = N // 2 - 1 if self.config.attention_output_gate else N - 2
        q, k = mixed_SBGNd[..., :R, :].flatten(2, 3), mixed_SBGNd[..., -2, :]
        if self._over_heads:
            q, k = q.flatten(2), k.flatten(2)
        q, k = self.q_layernorm(q), self.k_layernorm(k)
        q_SBHd, k_SBGd = (
            rope(x.reshape(*x.shape[:2], -1, d), freqs, mscale=mscale) for x in (q, k)
        )
        return q_SBHd, k_SBGd, mixed_SBGNd[..., -1, :].contiguous()

    def _norms(self) -> HeadNorms | None:
        if self.q_layernorm is None:
            return None
        query, key = (gathered(norm).weight for norm in (self.q_layernorm, self.k_layernorm))
        return HeadNorms(query, key, self.config.layernorm_epsilon)


def saved_tensors(cfg: Config, counts: TokenCounts) -> SavedTensors:
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
    return core_saved_tensors(cfg, counts, kernel_inputs, q, projected=projected)


def attention_saved_tensors(cfg: Config, counts: TokenCounts) -> SavedTensors:
    """Saved bytes of the model's core attention with its projections, of either kind."""
    of_kind = latent_saved_tensors if cfg.model.attention.kind == "mla" else saved_tensors
    return of_kind(cfg, counts)
