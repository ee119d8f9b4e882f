"""The largest attention logit of each head: max of scale * q @ k^T over what queries see.

QK-clip (Kimi K2, arXiv 2507.20534) rescales the weights of heads by it, and it is logged. No fused
attention kernel here returns it, so this is a separate pass: on CUDA the first of the two products
of attention's forward pass (`kernels.core_attention.max_logit_triton`), elsewhere torch in blocks
of queries. Sinks do not count.

Products of bf16 are exact in fp32 and their sums are fp32: the result is that of one order of
summing d products, within d * 2**-24 * sum |q_i k_i| of the exact one, and the same in every run.

The logarithm of a softmax denominator is an upper bound of its row's logits. If attention returns
it (fa4), blocks of rows below the head's maximum so far are skipped: all but a few once large
logits exist, none while attention is flat and the denominator counts keys.

Legend: B batch, H query heads, G key-value heads (G divides H), S queries, T keys (T >= S), d
channels. Query i is at position T - S + i.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.kernels.core_attention.documents import Documents
from phalanx.kernels.core_attention.rope import dense

_ROWS = 512  # queries that torch works on at a time


@dataclass(frozen=True)
class MaxLogit:
    """Largest logits of an attention layer so far."""

    most_H: Tensor  # fp32, contiguous: largest logit of each query head
    due: Tensor
    """int32 scalar; 0: nothing is computed. Read on the device, so that a captured step can be
    replayed with either."""


@torch.no_grad()
def raise_max_logits(
    top: MaxLogit,
    q_BHSd: Tensor,
    k_BGTd: Tensor,
    *,
    scale: float,
    window: int = 0,
    documents: Documents | None = None,
    lse_BHS: Tensor | None = None,
) -> None:
    """Raise `top.most_H` to the largest logits of these queries and keys, if it is due.

    `lse_BHS`: fp32, contiguous: logarithm of the softmax denominator of each row, over these logits
    and possibly a sink; saves work on CUDA without changing the result. ValueError if the heads are
    not those of `top`, or the scale is not above 0.
    """
    if q_BHSd.size(1) != top.most_H.numel():
        raise ValueError(f"{q_BHSd.size(1)} heads, and {top.most_H.numel()} largest logits")
    if scale <= 0:
        raise ValueError(f"a scale of {scale} would make the largest logit the least")
    if q_BHSd.is_cuda:
        from phalanx.kernels.core_attention.max_logit_triton import launch

        first_T = None if documents is None else documents.first_T
        launch(top.most_H, top.due, dense(q_BHSd), dense(k_BGTd), first_T, lse_BHS, scale, window)
    elif top.due:
        _raise_in_blocks(top.most_H, q_BHSd, k_BGTd, scale, window, documents)


def _raise_in_blocks(
    most_H: Tensor,
    q_BHSd: Tensor,
    k_BGTd: Tensor,
    scale: float,
    window: int,
    documents: Documents | None,
) -> None:
    (_, H, S, _), (_, G, T, _) = q_BHSd.shape, k_BGTd.shape
    dtype = torch.promote_types(q_BHSd.dtype, torch.float32)
    q_BGRSd, k_BG1Td = q_BHSd.to(dtype).unflatten(1, (G, H // G)), k_BGTd.to(dtype)[:, :, None]
    position_S1 = torch.arange(T - S, T)[:, None]
    first_S1 = position_S1 - window + 1 if window else torch.zeros_like(position_S1)
    if documents is not None:
        first_S1 = first_S1.maximum(documents.first_T[:, None])
    for start in range(0, S, _ROWS):
        rows = slice(start, start + _ROWS)
        end = T - S + min(start + _ROWS, S)
        j_1T = torch.arange(end)[None]
        unseen = (j_1T > position_S1[rows]) | (j_1T < first_S1[rows])
        logits = q_BGRSd[..., rows, :] @ k_BG1Td[..., :end, :].transpose(-1, -2) * scale
        logits.masked_fill_(unseen, float("-inf"))
        torch.maximum(most_H, logits.amax((0, 3, 4)).flatten().to(most_H.dtype), out=most_H)
