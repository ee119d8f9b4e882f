"""Caches of tokens that layers have read, so that a new token is computed alone.

A model reads prompts in one forward pass, by the kernels of training: prompts are padded behind
their ends, which changes no result, and each attention layer keeps its keys and values. After that
every sequence has one token in a forward pass, which `NewTokens` describes. To the model it is one
sequence of B tokens, each with a position of its own, as packed documents are.

A layer keeps keys and values in slots: position p is in slot p modulo their number. A layer with a
sliding window has as many slots as its window, so that a new token overwrites the one that left it.
Latent attention keeps latents and rotary keys, which all heads share (arXiv 2405.04434, section
2.1.2). Shapes are static and nothing is read on the host, as a CUDA graph needs.

Legend: B sequences, S tokens of the longest prompt, C slots, H query heads, G key-value heads, R =
H / G, d channels of query and key, v channels of value.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from phalanx.moe.model.packed import Packed


@dataclass
class NewTokens(Packed):
    """One token of each sequence; `position_T` are their positions, `whole_BS` the same [B, 1]."""

    filled: int | None = None
    """Slots behind this one are empty in all sequences; None if the host is not to know."""
    tables: list[Tensor] = field(default_factory=list)
    """Tables of angles: a graph reads them after Megatron-Core has forgotten them."""

    def angles(self, freqs_S11F: Tensor) -> Tensor:
        self.tables.append(freqs_S11F)
        return super().angles(freqs_S11F)


def new_tokens(position_B: Tensor, capacity: int, filled: int | None = None) -> NewTokens:
    """The tokens at int64 positions below `capacity`, one of each sequence."""
    return NewTokens(
        max_seqlen_q=capacity,
        max_seqlen_kv=capacity,
        sequences=len(position_B),
        position_T=position_B,
        whole_BS=position_B[:, None],
        filled=filled,
    )


@dataclass
class Reading:
    """Prompts that the model is reading; all layers share one of it.

    Outside of `Decoder.read` there is none, and layers with a cache compute as in training.
    """

    length_B: Tensor | None = None  # int64, tokens of each prompt
    capacity: int = 0  # most tokens of a sequence, those to come included


class Slots:
    """Keys and values of a layer's sequences; without values they are the first channels of keys.

    Args:
        window: keys that a token sees, itself included; 0 is no limit.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._key = self._value = torch.empty(0)

    def keep(self, k_SBGd: Tensor, v_SBGv: Tensor | None, reading: Reading) -> None:
        """Keep what prompts have, in the memory of earlier prompts if it has the size."""
        assert reading.length_B is not None
        slots = min(self._window or reading.capacity, reading.capacity)
        position_BC = positions_of_slots(reading.length_B - 1, slots)
        self._key = _kept(self._key, k_SBGd, position_BC)
        if v_SBGv is not None:
            self._value = _kept(self._value, v_SBGv, position_BC)

    def attend(
        self,
        q_BHd: Tensor,
        k_BGd: Tensor,
        v_BGv: Tensor,
        new: NewTokens,
        *,
        scale: float,
        sinks_H: Tensor | None,
    ) -> Tensor:
        """Keep a token of each sequence; return what it attends to, [B, H, v].

        With values in the keys, `v_BGv` are the first channels of `k_BGd`.
        """
        key, position_B = self._key, new.position_T
        slots, within = key.size(2), self._value.numel() == 0
        _put(key, k_BGd, position_B % slots)
        if not within:
            _put(self._value, v_BGv, position_B % slots)
        value = key[..., : v_BGv.size(-1)] if within else self._value
        visible_BC = positions_of_slots(position_B, slots) >= 0
        if new.filled is not None:
            key, value, visible_BC = (
                key[:, :, : new.filled],
                value[:, :, : new.filled],
                visible_BC[:, : new.filled],
            )
        return attend(q_BHd, key, value, visible_BC, scale=scale, sinks_H=sinks_H)


def positions_of_slots(last_B: Tensor, slots: int) -> Tensor:
    """The latest position in each slot, [B, C], up to the last one; below 0 if there is none."""
    last_B1 = last_B[:, None]
    return last_B1 - (last_B1 - torch.arange(slots, device=last_B.device)) % slots


def attend(
    q_BHd: Tensor,
    k_BGCd: Tensor,
    v_BGCv: Tensor,
    visible_BC: Tensor,
    *,
    scale: float,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attention of one query of each sequence, [B, H, v] in the dtype of q, with an fp32 softmax.

    `sinks_H` are as in `kernels.core_attention.core.attention`.
    """
    groups = k_BGCd.size(1)
    q_BGRd = q_BHd.unflatten(1, (groups, -1))
    logits_BGRC = _product(q_BGRd, k_BGCd.mT) * scale
    logits_BGRC = logits_BGRC.masked_fill(~visible_BC[:, None, None], float("-inf"))
    if sinks_H is not None:
        sink_GR1 = sinks_H.to(logits_BGRC.dtype).view(groups, -1, 1)
        logits_BGRC = torch.cat([logits_BGRC, sink_GR1.expand(*logits_BGRC.shape[:3], 1)], -1)
    weights_BGRC = logits_BGRC.softmax(-1)[..., : k_BGCd.size(2)].to(v_BGCv.dtype)
    return _product(weights_BGRC, v_BGCv).to(q_BHd.dtype).flatten(1, 2)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of [B, G, ...], in fp32 at least."""
    dtype = torch.promote_types(a.dtype, torch.float32)
    if a.is_cuda and a.dtype != dtype:
        product = torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=dtype)
        return product.unflatten(0, a.shape[:2])
    return a.to(dtype) @ b.to(dtype)


def _kept(kept_BGCx: Tensor, x_SBGx: Tensor, position_BC: Tensor) -> Tensor:
    x_BGSx = x_SBGx.permute(1, 2, 0, 3)
    index_B1C1 = position_BC.clamp(min=0)[:, None, :, None]
    index_BGCx = index_B1C1.expand(-1, x_BGSx.size(1), -1, x_BGSx.size(3))
    return state_like(kept_BGCx, x_BGSx.gather(2, index_BGCx))


def _put(kept_BGCx: Tensor, x_BGx: Tensor, slot_B: Tensor) -> None:
    x_BG1x = x_BGx[:, :, None]
    kept_BGCx.scatter_(2, slot_B[:, None, None, None].expand_as(x_BG1x), x_BG1x)


def keep_last(x_BSC: Tensor, count: int, length_B: Tensor) -> Tensor:
    """The last `count` tokens of each prompt, [B, count, C]; zeros precede a short one."""
    offset = torch.arange(-count, 0, device=x_BSC.device)
    position = length_B[:, None] + offset
    taken = x_BSC.gather(1, position.clamp(min=0)[..., None].expand(-1, -1, x_BSC.size(-1)))
    return taken.masked_fill((position < 0)[..., None], 0)


def state_like(kept: Any, new: Tensor) -> Tensor:
    """`new`, in the memory of `kept` if that is a tensor of its size."""
    same = isinstance(kept, Tensor) and (kept.shape, kept.dtype) == (new.shape, new.dtype)
    return kept.copy_(new) if same else new
