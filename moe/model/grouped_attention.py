"""Attention of grouped queries around a core attention, with the norms and rotary embedding of
kernels.attention.qkv.

Megatron-Core 0.19.2 copies the queries out of the mixed projection, norms and turns queries and
keys by kernels of their own, and joins three gradients to one. Here a layer goes from the
projection, its bias not yet added, to what core attention reads in one step, and back in one.

Shape legend: S positions, B batch, H query heads, G key-value heads, d channels; N = H / G + 2.
"""

from typing import Any

from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from phalanx.kernels.attention.qkv import HeadNorms, queries_keys_values
from phalanx.kernels.attention.rope import rope
from phalanx.moe.model.attention import CoreAttention
from phalanx.parallel.megatron.gathered import gathered


class GroupedAttention(SelfAttention):
    """Megatron-Core's SelfAttention for training on whole sequences; parameters are the same."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._mixed = self.config.num_query_groups >= self.world_size
        """Groups that tensor ranks share lie between the projection and the rest."""
        self.linear_qkv.skip_bias_add = self._mixed
        self._reads_views = isinstance(self.core_attention, CoreAttention)

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
        if self._mixed:
            query, key, value = queries_keys_values(
                query, key, freqs, mscale=mscale, norms=self._norms(), view=self._reads_views
            )
        else:
            assert key is not None
            query, key = (rope(x, freqs, mscale=mscale) for x in (query, key))
        return query, key, value, None, self.attn_mask_type, None

    def _norms(self) -> HeadNorms | None:
        if self.q_layernorm is None:
            return None
        query, key = (gathered(norm).weight for norm in (self.q_layernorm, self.k_layernorm))
        return HeadNorms(query, key, self.config.layernorm_epsilon)
