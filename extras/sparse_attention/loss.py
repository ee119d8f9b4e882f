"""Loss of the indexer: KL divergence of its probabilities from those of attention.

The target is the mean of attention's probabilities over heads, which is their L1-normalised sum
(arXiv 2512.02556, section 2.1.1): over all visible keys in the dense warm-up, over the chosen ones
after it. Gradients reach the indexer alone; they are computed in the forward pass, piece by piece,
so that no tensor of all pairs exists.

Shape legend: as `extras.sparse_attention.attend`, and d channels of query and key of a head.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.extras.sparse_attention.products import pieces, product, rows
from phalanx.extras.sparse_attention.selection import Index, index_scores, visible

type PieceLoss = Callable[[Tensor, Tensor, Tensor, slice], Tensor]
"""Sum of the divergences of a piece, of its queries, all keys and its weights."""


def loss_of_chosen(index: Index, chosen_BSK: Tensor, target_BSK: Tensor) -> Tensor:
    """Sum over queries of the divergence over chosen keys, fp32 [] (fp64 of fp64 inputs).

    Args:
        chosen_BSK: int32, as `selection.select` returns.
        target_BSK: probabilities, as `attend.attend` returns; 0 where no key is chosen.
    """
    B, _, J, e = index.q_BSJe.shape

    def of_piece(q_BCJe: Tensor, k_BTe: Tensor, w_BCJ: Tensor, part: slice) -> Tensor:
        chosen_BCK = chosen_BSK[:, part]
        k_BCKe = rows(k_BTe, chosen_BCK)
        s_BCJK = (q_BCJe @ k_BCKe.mT).relu()
        score_BCK = (w_BCJ[:, :, None] @ s_BCJK).squeeze(2)
        return _divergence(target_BSK[:, part], score_BCK, chosen_BCK >= 0)

    return _sum_over(
        of_piece, index, pieces(index.q_BSJe, 4 * B * chosen_BSK.shape[-1] * max(J, e))
    )


def loss_of_visible(
    index: Index,
    q_BSHd: Tensor,
    k_BTHd: Tensor,
    first_BS: Tensor | None,
    *,
    scale: float,
    before: int = 0,
) -> Tensor:
    """Sum over queries of the divergence over all keys that they see, as `loss_of_chosen`.

    Args:
        q_BSHd, k_BTHd: queries and keys of attention.
        first_BS, before: as `selection.visible` has them.
        scale: factor on the logits of attention.
    """
    (B, _, H, _), J = q_BSHd.shape, index.q_BSJe.shape[2]
    q_BHSd, k_BHTd = q_BSHd.detach().transpose(1, 2), k_BTHd.detach().transpose(1, 2)

    def of_piece(q_BCJe: Tensor, k_BTe: Tensor, w_BCJ: Tensor, part: slice) -> Tensor:
        keys = before + part.stop
        seen = visible(first_BS, part, before, q_BCJe)
        with torch.no_grad():
            logits_BHCT = product(q_BHSd[:, :, part], k_BHTd[:, :, :keys].mT).mul_(scale)
            mask = seen if first_BS is None else seen[:, None]
            target_BCT = logits_BHCT.masked_fill_(~mask, float("-inf")).softmax(-1).mean(1)
        score_BCT = index_scores(q_BCJe, k_BTe[:, :keys], w_BCJ)
        return _divergence(target_BCT, score_BCT, seen)

    return _sum_over(of_piece, index, pieces(index.q_BSJe, 4 * B * k_BTHd.shape[1] * max(H, J)))


def _divergence(target: Tensor, score: Tensor, counts: Tensor) -> Tensor:
    log_p = score.masked_fill(~counts, float("-inf")).log_softmax(-1)
    terms = torch.xlogy(target, target) - target * log_p.masked_fill(~counts, 0)
    return terms.sum()


def _sum_over(loss: PieceLoss, index: Index, parts: Iterable[slice]) -> Tensor:
    return _Ahead.apply(*index, loss, parts)  # type: ignore[no-any-return]


class _Ahead(torch.autograd.Function):
    """Sum of the losses of pieces, with its gradients at once."""

    @staticmethod
    def forward(
        ctx: Any, q_BSJe: Tensor, k_BTe: Tensor, w_BSJ: Tensor, loss: PieceLoss, parts: Any
    ) -> Tensor:
        wide = torch.promote_types(q_BSJe.dtype, torch.float32)
        learns = any(ctx.needs_input_grad[:3])
        k = k_BTe.detach().to(wide).requires_grad_(learns)
        total = torch.zeros((), dtype=wide, device=k.device)
        grads = tuple(torch.zeros(x.shape, dtype=wide, device=k.device) for x in (q_BSJe, k, w_BSJ))
        for part in parts:
            q, w = (x[:, part].detach().to(wide).requires_grad_(learns) for x in (q_BSJe, w_BSJ))
            with torch.set_grad_enabled(learns):
                of_piece = loss(q, k, w, part)
            total += of_piece.detach()
            if learns:
                dq, dk, dw = torch.autograd.grad(of_piece, (q, k, w))
                grads[0][:, part], grads[2][:, part] = dq, dw
                grads[1].add_(dk)
        if learns:
            dtypes = q_BSJe.dtype, k_BTe.dtype, w_BSJ.dtype
            ctx.save_for_backward(*(g.to(d) for g, d in zip(grads, dtypes, strict=True)))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        return *(g * dtotal.to(g.dtype) for g in ctx.saved_tensors), None, None
