"""Attention layers that keep keys and values; the modules of training, with another forward pass.

`install` replaces them in a model that is built and loaded, so that training has no part in it.

Legend: S tokens, B sequences, H query heads, G key-value heads, d channels of query and key, v
channels of value. Latent attention: n channels of a key of its own head, F rotary channels that
heads share, r channels of the latent, m = n + v.
"""

from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.configs.arithmetic.layers import mixer
from phalanx.configs.schema import ModelConfig
from phalanx.configs.tables.layers import MIXERS
from phalanx.kernels.core_attention.rope import rope, rope_
from phalanx.moe.inference.cache import NewTokens, Reading, Slots
from phalanx.moe.model.attention import LatentAttention


def install(layers: nn.ModuleList, m: ModelConfig) -> Reading:
    """Give every layer of a decoder a cache; return the object by which they learn of prompts."""
    reading = Reading()
    for number, layer in enumerate(layers):
        attention: Any = layer.self_attention
        if path := MIXERS[mixer(m, number)].cached:
            resolve_name(path)(attention, reading)
        elif isinstance(attention, LatentAttention):
            attention.__class__ = CachedLatentAttention
            attention.core_attention = CachedLatents(attention.core_attention, reading)
        else:
            attention.core_attention = CachedKeys(attention.core_attention, reading)
    return reading


class CachedKeys(nn.Module):
    """Core attention `core` with a cache of its keys and values."""

    def __init__(self, core: Any, reading: Reading) -> None:
        super().__init__()
        self.core, self.reading, self.slots = core, reading, Slots(core.window)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """[S, B, H * v], as `moe.model.attention.CoreAttention`; of `NewTokens` [B, 1, H * v]."""
        if isinstance(packed_seq_params, NewTokens):
            return self.attend(query[:, 0], key[:, 0], value[:, 0], packed_seq_params)[:, None]
        if self.reading.length_B is not None:
            self.keep(key, value)
        out: Tensor = self.core(
            query, key, value, *args, packed_seq_params=packed_seq_params, **kwargs
        )
        return out

    def keep(self, key: Tensor, value: Tensor) -> None:
        self.slots.keep(key, value, self.reading)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, new: NewTokens) -> Tensor:
        core = self.core
        sinks = getattr(core, "softmax_offset", None)
        out = self.slots.attend(query, key, value, new, scale=core.scale, sinks_H=sinks)
        return out.flatten(1)


class CachedLatents(CachedKeys):
    """Core attention with a cache of latents, which its layer fills."""

    def keep(self, key: Tensor, value: Tensor) -> None:
        """Nothing: these are keys and values of heads."""


class CachedLatentAttention(LatentAttention):
    """Latent attention with a cache of latents and rotary keys.

    A new token multiplies its query by the up-projection of keys, attends to the latents, and
    multiplies their sum by the up-projection of values, so that no key or value of a head is
    computed again ("absorbed", arXiv 2405.04434, section 2.1.2). Those products are in the dtype of
    the weights, also where training quantizes the projection.
    """

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: Any = None,
        inference_context: Any = None,
    ) -> tuple[Tensor, ...]:
        """As in training; for `NewTokens` a query per head, and one key and value for all heads.

        Their shapes are [B, 1, H, r + F], [B, 1, 1, r + F] and [B, 1, 1, r].
        """
        if isinstance(packed_seq_params, NewTokens):
            return self._of_new(hidden_states, packed_seq_params)
        made = super().get_query_key_value_tensors(
            hidden_states, key_value_states, position_ids, packed_seq_params, inference_context
        )
        core, key, latent = self.core_attention, made[1], made[4]
        if core.reading.length_B is not None:
            rotary_SB1F = key[:, :, :1, self.config.qk_head_dim :]
            kept = torch.cat((self.kv_layernorm(latent)[:, :, None], rotary_SB1F), -1)
            core.slots.keep(kept, None, core.reading)
        return made

    def _of_new(self, hidden_B1D: Tensor, new: NewTokens) -> tuple[Tensor, ...]:
        c, heads = self.config, self.num_attention_heads_per_partition
        q_latent, kv = self._qkv_down_projection(hidden_B1D)
        if c.q_lora_rank is None:
            q, _ = self.linear_q_proj(q_latent)
        else:
            q, _ = self.linear_q_up_proj(self.q_layernorm(q_latent))
        latent_B1r, rotary_B1F = kv.split([c.kv_lora_rank, c.qk_pos_emb_head_dim], -1)
        freqs, mscale = self.angles(len(hidden_B1D), new)
        q_B1Hd = rope_(q, freqs, heads=heads, mscale=mscale, interleaved=True, first=c.qk_head_dim)
        rotary_B11F = rope(rotary_B1F[:, :, None], freqs, mscale=mscale, interleaved=True)
        q_B1Hn, q_B1HF = q_B1Hd.split([c.qk_head_dim, c.qk_pos_emb_head_dim], -1)
        up_Hnr, _ = self.up_weights()
        absorbed_HBr = q_B1Hn[:, 0].transpose(0, 1) @ up_Hnr
        query = torch.cat((absorbed_HBr.transpose(0, 1)[:, None], q_B1HF), -1)
        latent_B11r = self.kv_layernorm(latent_B1r)[:, :, None]
        key = torch.cat((latent_B11r, rotary_B11F), -1)
        return query, key, latent_B11r, q_latent, latent_B1r

    def _run_core_attention(self, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
        out = super()._run_core_attention(*args, packed_seq_params=packed_seq_params, **kwargs)
        if not isinstance(packed_seq_params, NewTokens):
            return out
        _, up_Hvr = self.up_weights()
        sums_HBr = out[:, 0].unflatten(-1, (len(up_Hvr), -1)).transpose(0, 1)
        return (sums_HBr @ up_Hvr.mT).transpose(0, 1).flatten(1)[:, None]
