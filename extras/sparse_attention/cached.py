"""Sparse attention that keeps latents and keys of its indexer: a new token is computed alone.

A new token's indexer scores the kept keys, and attention sees the best of them, as in training
(`moe.inference.cache` describes how new tokens come). A model in the warm-up sees all.

Legend: as `extras.sparse_attention.latent`, and C slots.
"""

from typing import Any

import torch
from torch import Tensor

from phalanx.extras.sparse_attention.latent import SparseLatentAttention
from phalanx.extras.sparse_attention.selection import index_scores
from phalanx.moe.inference.cache import NewTokens, Reading, Slots, attend, positions_of_slots
from phalanx.moe.inference.cached_attention import CachedLatentAttention, CachedLatents


def install(layer: Any, reading: Reading) -> None:
    """Give a layer of sparse attention a cache."""
    if layer.sparse.warms_up:
        layer.__class__ = CachedLatentAttention
        layer.core_attention = CachedLatents(layer.core_attention, reading)
        return
    layer.__class__ = CachedSparseAttention
    layer.reading, layer.latents, layer.keys = reading, _Rows(0), _Rows(0)


class _Rows(Slots):
    """Rows of tokens, one a slot: position p is in slot p."""

    def keep_prompts(self, x_SBc: Tensor, reading: Reading) -> None:
        self.keep(x_SBc[:, :, None], None, reading)

    def keep_new(self, x_Bc: Tensor, new: NewTokens) -> tuple[Tensor, Tensor]:
        """Keep a row of each sequence; all rows [B, C, c], and those that are filled [B, C]."""
        rows_BCc, position_B = self._key[:, 0], new.position_T
        rows_BCc[torch.arange(len(x_Bc), device=x_Bc.device), position_B] = x_Bc
        filled_BC = positions_of_slots(position_B, rows_BCc.shape[1]) >= 0
        return rows_BCc[:, : new.filled], filled_BC[:, : new.filled]


class CachedSparseAttention(SparseLatentAttention):
    """`SparseLatentAttention` after its warm-up, with caches."""

    reading: Reading
    latents: _Rows
    keys: _Rows

    def _run_core_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """[S, B, H * v]; of `NewTokens`, which are one sequence, [B, 1, H * v]."""
        new = packed_seq_params
        if not isinstance(new, NewTokens):
            if self.reading.length_B is not None:
                self.latents.keep_prompts(key[:, :, 0], self.reading)
                self.keys.keep_prompts(self._index[1], self.reading)
            return super()._run_core_attention(
                query, key, value, attention_mask, packed_seq_params=new, **kwargs
            )
        (q_B1Je, k_B1e, w_B1J), self._index = self._index, ()
        keys_BCe, filled_BC = self.keys.keep_new(k_B1e[:, 0], new)
        score_BC = index_scores(q_B1Je, keys_BCe, w_B1J)[:, 0]
        score_BC = score_BC.masked_fill(~filled_BC, float("-inf"))
        best_BK = score_BC.topk(min(self.sparse.top_k, score_BC.shape[1]), -1).indices
        chosen_BC = torch.zeros_like(filled_BC).scatter_(1, best_BK, True) & filled_BC
        rows_BCc, _ = self.latents.keep_new(key[:, 0, 0], new)
        sums_BHr = attend(
            query[:, 0],
            rows_BCc[:, None],
            rows_BCc[:, None, :, : self.config.kv_lora_rank],
            chosen_BC,
            scale=self.softmax_scale,
        )
        _, up_Hvr = self.up_weights()
        return torch.einsum("bhr,hvr->bhv", sums_BHr, up_Hvr).flatten(1)[:, None]
