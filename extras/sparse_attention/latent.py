"""Latent attention to the keys that an indexer chooses: DeepSeek sparse attention.

Two phases, as published (arXiv 2512.02556, section 2.1.1):

    warm_up   attention sees all keys, by the backend of any model; the indexer learns what it
              attends to, and nothing else is updated (`extras.sparse_attention.training`)
    sparse    attention sees the chosen keys, in its absorbed form; the indexer goes on to learn
              from attention's probabilities of these

The loss of the indexer joins the gradient as balancing losses do, whose scale it shares.

Shape legend: S positions, B batch, D hidden, H query heads, d channels of query and key, n of them
not rotated, F rotated, v channels of value, r rank of the latent, c = r + F; others as in
`extras.sparse_attention.selection`.
"""

from dataclasses import replace
from typing import Any

import torch
from megatron.core.transformer.moe.router import MoEAuxLossAutoScaler
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor
from torch.profiler import record_function

from phalanx.configs.schema import ModelConfig
from phalanx.extras.sparse_attention.attend import attend
from phalanx.extras.sparse_attention.indexer import Indexer
from phalanx.extras.sparse_attention.loss import loss_of_chosen, loss_of_visible
from phalanx.extras.sparse_attention.options import SparseOptions, understood
from phalanx.extras.sparse_attention.selection import Index, select
from phalanx.kernels.core_attention.rope import rope, rope_
from phalanx.moe.model.attention import LatentAttention
from phalanx.moe.router.balance import Statistics


class SparseLatentAttention(LatentAttention):
    """`LatentAttention` with an indexer, in the phase of `sparse`."""

    def __init__(self, *args: Any, sparse: SparseOptions, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sparse = sparse
        self.indexer = Indexer(self.config, sparse)
        self.statistics_of_layer: list[Statistics] = []
        """Statistics of the layer's router, which record the losses; none without experts."""
        self._index: tuple[Tensor, ...] = ()  # of this forward pass, between projections and core

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: Any = None,
        inference_context: Any = None,
    ) -> tuple[Tensor, ...]:
        """In the warm-up as `LatentAttention`; else absorbed queries, and latents as keys.

        These are [S, B, H, c], [S, B, 1, c], the same again, and latents of queries and keys.
        """
        if self.sparse.warms_up:
            made = super().get_query_key_value_tensors(
                hidden_states, key_value_states, position_ids, packed_seq_params, inference_context
            )
            latent = self.q_layernorm(made[3].detach())
            turn = self.angles(len(made[3]), packed_seq_params)
            self._index = self.indexer(hidden_states, latent, *turn)
            return made
        assert inference_context is None
        c, heads = self.config, self.num_attention_heads_per_partition
        q_latent, kv = self._qkv_down_projection(hidden_states)
        kv_latent, k_rope_SBF = kv.split([c.kv_lora_rank, c.qk_pos_emb_head_dim], -1)
        normed = self.q_layernorm(q_latent)
        freqs, mscale = self.angles(len(q_latent), packed_seq_params)
        self._index = self.indexer(hidden_states, normed, freqs, mscale)
        q, _ = self.linear_q_up_proj(normed)
        turned: dict[str, Any] = dict(mscale=mscale, interleaved=True)
        q_SBHd = rope_(q, freqs, heads=heads, first=c.qk_head_dim, **turned)
        q_SBHn, q_SBHF = q_SBHd.split([c.qk_head_dim, c.qk_pos_emb_head_dim], -1)
        up_Hnr, _ = self.up_weights()
        absorbed_SBHr = torch.einsum("sbhn,hnr->sbhr", q_SBHn, up_Hnr)
        query = torch.cat((absorbed_SBHr, q_SBHF), -1)
        k_SB1F = rope(k_rope_SBF[:, :, None], freqs, **turned)
        key = torch.cat((self.kv_layernorm(kv_latent)[:, :, None], k_SB1F), -1)
        return query, key, key, q_latent, kv_latent

    def _run_core_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """[S, B, H * v], with the loss of the indexer in its gradient."""
        parts, self._index = self._index, ()
        index = Index(*(_sequences(x, packed_seq_params) for x in parts))
        first_BS = _first_keys(packed_seq_params)
        if self.sparse.warms_up:
            out = super()._run_core_attention(
                query, key, value, attention_mask, packed_seq_params=packed_seq_params, **kwargs
            )
            if not self._learns:
                return out
            with record_function("attention/indexer"):
                q_BSHd, k_BSHd = (_sequences(x, packed_seq_params) for x in (query, key))
                loss = loss_of_visible(index, q_BSHd, k_BSHd, first_BS, scale=self.softmax_scale)
            return self._with_loss(out, loss, index)
        with record_function("attention/indexer"):
            chosen_BSK = select(index, first_BS, top_k=self.sparse.top_k)
        q_BSHc, kv_BTc = (_sequences(x, packed_seq_params) for x in (query, key.squeeze(2)))
        rank, scale = self.config.kv_lora_rank, self.softmax_scale

        def core(q_BSHc: Tensor, kv_BTc: Tensor, chosen_BSK: Tensor) -> tuple[Tensor, Tensor]:
            with record_function("attention/core"):
                return attend(q_BSHc, kv_BTc, chosen_BSK, scale=scale, values=rank)

        sums_BSHr, target_BSK = core(q_BSHc, kv_BTc, chosen_BSK)
        _, up_Hvr = self.up_weights()
        out_BSM = torch.einsum("bshr,hvr->bshv", sums_BSHr, up_Hvr).flatten(2)
        out = out_BSM.reshape(query.shape[1], query.shape[0], -1).transpose(0, 1).contiguous()
        if not self._learns:
            return out
        with record_function("attention/indexer"):
            loss = loss_of_chosen(index, chosen_BSK, target_BSK)
        return self._with_loss(out, loss, index)

    @property
    def _learns(self) -> bool:
        """False in validation, and where a pass is recomputed, which would count twice."""
        return self.training and torch.is_grad_enabled()

    def _with_loss(self, out: Tensor, loss: Tensor, index: Index) -> Tensor:
        mean = loss / index.w_BSJ[..., 0].numel()
        for statistics in self.statistics_of_layer:
            statistics.add_loss("indexer_loss", mean)
        return MoEAuxLossAutoScaler.apply(out, self.sparse.loss * mean)


def _sequences(x_SBx: Tensor, packed: Any) -> Tensor:
    """Sequences first: [B, S, ...], also of those that are packed into one."""
    if packed is None:
        return x_SBx.transpose(0, 1)
    return x_SBx.reshape(packed.sequences, -1, *x_SBx.shape[2:])


def _first_keys(packed: Any) -> Tensor | None:
    """First key of each query's document, in its sequence: int64 [B, S]."""
    if packed is None:
        return None
    position_BS = packed.position_T.view(packed.sequences, -1)
    return torch.arange(position_BS.shape[1], device=position_BS.device) - position_BS


def spec(_: str, attention: ModuleSpec, m: ModelConfig) -> ModuleSpec:
    """The spec of latent `attention`, with an indexer."""
    own = attention.params | {"sparse": understood(m.attention.sparse)}
    return replace(attention, module=SparseLatentAttention, params=own)
