"""Attention of grouped queries around a core attention, with the norms and rotary embedding of
kernels.attention.qkv.

Megatron-Core 0.19.2 copies the queries out of the mixed projection, norms and turns queries and
keys by kernels of their own, and joins three gradients to one. Here a layer goes from the
projection, its bias not yet added, to what core attention reads in one step, and back in one. Norms
over all heads together (OLMoE, MiniMax-M2) have no such kernel, and are steps of their own.

Shape legend: S positions, B batch, H query heads, G key-value heads, d channels; N = H / G + 2.
"""

from typing import Any

from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from phalanx.kernels.attention.qkv import HeadNorms, queries_keys_values
from phalanx.kernels.attention.rope import rope
from phalanx.moe.model.attention import CoreAttention
from phalanx.parallel.megatron.gathered import gathered


def over_heads(norm: Any, heads: int, *, hidden_size: int, **given: Any) -> Any:
    """The norm of `heads` heads of `hidden_size` channels together, in the place of that of each.

    Args:
        norm: of `moe.model.norm`.
        heads: of queries, or of keys.
        hidden_size: channels of a head, as Megatron-Core asks for.
        given: what the norm takes besides.
    """
    return norm(hidden_size=heads * hidden_size, **given)


class GroupedAttention(SelfAttention):
    """Megatron-Core's SelfAttention for training on whole sequences; parameters are the same."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._mixed = self.config.num_query_groups >= self.world_size
        """Groups that tensor ranks share lie between the projection and the rest."""
        self.linear_qkv.skip_bias_add = self._mixed
        self._reads_views = isinstance(self.core_attention, CoreAttention)
        norm = self.q_layernorm
        self._over_heads = norm is not None and norm.weight.numel() > self.config.kv_channels
        """The norms are of `over_heads`; the heads are then all on this rank."""

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Mixed projection [S, B, G, N, d] and bias [G, N, d], for the next method to take apart.

        With groups that tensor ranks share, q, k and v as they are.
        """
        if not self._mixed:
            return super().get_query_key_value_tensors(hidden_states, *args, **kwargs)
        mixed, bias = self.linear_qkv(hidden_states)
        shape = self.num_query_groups_per_partition, -1, self.hidden_size_per_attention_head
        mixed = mixed.view(*mixed.shape[:2], *shape)
        return mixed, None if bias is None else bias.view(shape), None

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
        """Queries, keys and values; what follows is told that there are no rotary angles left.

        Megatron-Core's hook between projections and rotary embedding: the one place that is given
        both and returns both.
        """
        assert inference_context is None
        (freqs, _), mscale = rotary_pos_emb, self._yarn_concentration_factor
        if self._over_heads:
            query, key, value = self._normed_together(query, key, freqs, mscale)
        elif self._mixed:
            query, key, value = queries_keys_values(
                query, key, freqs, mscale=mscale, norms=self._norms(), view=self._reads_views
            )
        else:
            assert key is not None
            query, key = (rope(x, freqs, mscale=mscale) for x in (query, key))
        return query, key, value, None, self.attn_mask_type, None

    def _normed_together(
        self, mixed_SBGNd: Tensor, bias_GNd: Tensor | None, freqs: Tensor, mscale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys normalised over all channels of a token and turned, and values."""
        if bias_GNd is not None:
            mixed_SBGNd = mixed_SBGNd + bias_GNd
        G, N, d = mixed_SBGNd.shape[2:]
        q_SBGRd, k_SBG1d, v_SBG1d = mixed_SBGNd.split([N - 2, 1, 1], -2)
        q_SBM, k_SBM = self.q_layernorm(q_SBGRd.flatten(2)), self.k_layernorm(k_SBG1d.flatten(2))
        q_SBHd, k_SBGd = (
            rope(x.unflatten(-1, (-1, d)), freqs, mscale=mscale) for x in (q_SBM, k_SBM)
        )
        # A copy, so that the projection is not kept for a part of it.
        return q_SBHd, k_SBGd, v_SBG1d.squeeze(-2).contiguous()

    def _norms(self) -> HeadNorms | None:
        if self.q_layernorm is None:
            return None
        query, key = (gathered(norm).weight for norm in (self.q_layernorm, self.k_layernorm))
        return HeadNorms(query, key, self.config.layernorm_epsilon)
