"""Attention of each query to its chosen keys, in plain torch: gathered, in pieces of queries.

Latent attention is multi-query attention to the latents once the up-projection of keys has been
multiplied into the queries ("absorbed", arXiv 2405.04434, section 2.1.2), so that what is gathered
is one row per key for all heads. Nothing of size S x T exists, and nothing of size S x K but the
chosen keys and their probabilities summed over heads, which the indexer learns from; the backward
pass computes the rest again.

Shape legend: as `extras.sparse_attention.selection`, and H query heads, c channels of an absorbed
query and of a key, of which the first r are the value.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.extras.sparse_attention.products import add_rows_, pieces, product, rows


def attend(
    q_BSHc: Tensor, kv_BTc: Tensor, chosen_BSK: Tensor, *, scale: float, values: int
) -> tuple[Tensor, Tensor]:
    """Attend to chosen keys.

    Args:
        q_BSHc, kv_BTc: of one floating dtype.
        chosen_BSK: int32, distinct keys of each query; -1 for none. Every query has one.
        scale: factor on the logits.
        values: r.

    Returns:
        Sums of values [B, S, H, r] in the dtype of q, and the mean over heads of the probabilities
        [B, S, K], fp32 at least and without a gradient.
    """
    return _Attend.apply(q_BSHc, kv_BTc, chosen_BSK, scale, values)  # type: ignore[no-any-return]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_BSHc: Tensor, kv_BTc: Tensor, chosen_BSK: Tensor, scale: float, values: int
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q_BSHc, kv_BTc, chosen_BSK)
        ctx.scale, ctx.values = scale, values
        out_BSHr = q_BSHc.new_empty(*q_BSHc.shape[:3], values)
        wide = torch.promote_types(q_BSHc.dtype, torch.float32)
        mean_BSK = torch.empty(chosen_BSK.shape, dtype=wide, device=q_BSHc.device)
        for part in _pieces(q_BSHc, chosen_BSK):
            kv_BCKc, p_BCHK = _probabilities(q_BSHc, kv_BTc, chosen_BSK, part, scale)
            out_BSHr[:, part] = product(p_BCHK.to(kv_BCKc.dtype), kv_BCKc[..., :values])
            mean_BSK[:, part] = p_BCHK.mean(2)
        ctx.mark_non_differentiable(mean_BSK)
        return out_BSHr, mean_BSK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_BSHr: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        q_BSHc, kv_BTc, chosen_BSK = ctx.saved_tensors
        dq_BSHc = torch.empty_like(q_BSHc)
        wide = torch.promote_types(q_BSHc.dtype, torch.float32)
        dkv_BTc = torch.zeros(kv_BTc.shape, dtype=wide, device=kv_BTc.device)
        for part in _pieces(q_BSHc, chosen_BSK):
            kv_BCKc, p_BCHK = _probabilities(q_BSHc, kv_BTc, chosen_BSK, part, ctx.scale)
            dout_BCHr, narrow = dout_BSHr[:, part], kv_BCKc.dtype
            dp_BCHK = product(dout_BCHr, kv_BCKc[..., : ctx.values].mT)
            dp_BCHK -= (p_BCHK * dp_BCHK).sum(-1, keepdim=True)
            ds_BCHK = dp_BCHK.mul_(p_BCHK).mul_(ctx.scale).to(narrow)
            dq_BSHc[:, part] = product(ds_BCHK, kv_BCKc)
            drows_BCKc = product(ds_BCHK.mT, q_BSHc[:, part])
            drows_BCKc[..., : ctx.values] += product(p_BCHK.to(narrow).mT, dout_BCHr)
            add_rows_(dkv_BTc, chosen_BSK[:, part], drows_BCKc)
        return dq_BSHc, dkv_BTc.to(kv_BTc.dtype), None, None, None


def _pieces(q_BSHc: Tensor, chosen_BSK: Tensor) -> Any:
    (B, _, H, c), K = q_BSHc.shape, chosen_BSK.shape[-1]
    return pieces(q_BSHc, 4 * B * K * max(H, c))


def _probabilities(
    q_BSHc: Tensor, kv_BTc: Tensor, chosen_BSK: Tensor, part: slice, scale: float
) -> tuple[Tensor, Tensor]:
    """Chosen rows [B, C, K, c] of a piece, and their probabilities [B, C, H, K] in fp32."""
    chosen_BCK = chosen_BSK[:, part]
    kv_BCKc = rows(kv_BTc, chosen_BCK)
    logits_BCHK = product(q_BSHc[:, part], kv_BCKc.mT).mul_(scale)
    logits_BCHK.masked_fill_(chosen_BCK[:, :, None] < 0, float("-inf"))
    return kv_BCKc, logits_BCHK.softmax(-1)
