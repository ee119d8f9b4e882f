"""Which blocks live: most by the norms of their weights, some by the norms of their gradients.

As in BLaST (arXiv 2507.03117), whose criteria these are, weights decide what is pruned and
gradients what is grown. Here each matrix keeps an exact number of blocks, so that shapes are
static: gradients choose a given share of that number, as in RigL (arXiv 1911.11134).

Legend: L experts, n blocks of a matrix.
"""

import torch
from torch import Tensor


def choose(
    living_Ln: Tensor, weight_Ln: Tensor, gradient_Ln: Tensor, *, most: int, exchanged: float
) -> Tensor:
    """Living blocks after an update, bool [L, n].

    `most` live, or as many as before if they were fewer. The largest of `weight_Ln` stay, but for a
    share, `exchanged`: these are the largest of `gradient_Ln` among all others, blocks that have
    just been pruned included. Equal gradients, as of an expert without tokens, are told apart by
    weights, and equal weights by position.

    Args:
        living_Ln: bool; dead blocks have a weight of 0.
        weight_Ln, gradient_Ln: norms of blocks, or their squares.
    """
    number_L1 = living_Ln.sum(1, keepdim=True).clamp(max=most)
    grown_L1 = (number_L1 * exchanged).round().long()
    by_weight_Ln = _descending(weight_Ln)
    kept_Ln = torch.zeros_like(living_Ln).scatter_(
        1, by_weight_Ln, _ranks(living_Ln) < number_L1 - grown_L1
    )
    gradient_Ln = gradient_Ln.masked_fill(kept_Ln, -1.0)
    order_Ln = _descending(gradient_Ln.gather(1, by_weight_Ln))
    by_gradient_Ln = by_weight_Ln.gather(1, order_Ln)
    return (
        torch.zeros_like(living_Ln)
        .scatter_(1, by_gradient_Ln, _ranks(living_Ln) < grown_L1)
        .logical_or_(kept_Ln)
    )


def _descending(score_Ln: Tensor) -> Tensor:
    return score_Ln.sort(dim=1, descending=True, stable=True).indices


def _ranks(like_Ln: Tensor) -> Tensor:
    return torch.arange(like_Ln.size(1), device=like_Ln.device).expand_as(like_Ln)
