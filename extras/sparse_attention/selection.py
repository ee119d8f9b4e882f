"""Scores of the lightning indexer, and the keys that they choose (arXiv 2512.02556, section 2.1).

A query and a key before it have the score sum_j w_j relu(q_j . k) over the heads of the indexer.

Shape legend: B sequences, S queries, C queries of a piece, T keys, K chosen keys, J heads and e
channels of the indexer. Query i is at position `before` + i of the keys.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.extras.sparse_attention.products import pieces, product


class Index(NamedTuple):
    """Queries, keys and weights of the indexer, of any floating dtype."""

    q_BSJe: Tensor
    k_BTe: Tensor
    w_BSJ: Tensor  # with the factors 1 / sqrt(J e)

    def scores(self, part: slice, keys: int) -> Tensor:
        """Scores [B, C, T] of the queries of a piece and the first `keys`, fp32 at least."""
        return index_scores(self.q_BSJe[:, part], self.k_BTe[:, :keys], self.w_BSJ[:, part])


def index_scores(q_BCJe: Tensor, k_BTe: Tensor, w_BCJ: Tensor) -> Tensor:
    """Scores [B, C, T], fp32 at least; differentiable if the inputs need gradients."""
    differentiable = torch.is_grad_enabled() and q_BCJe.requires_grad
    multiply = _differentiable if differentiable else product
    s_BMT = multiply(q_BCJe.flatten(1, 2), k_BTe.mT)
    s_BCJT = s_BMT.relu().unflatten(1, q_BCJe.shape[1:3])
    return (w_BCJ.to(s_BCJT.dtype)[:, :, None] @ s_BCJT).squeeze(2)


def _differentiable(a: Tensor, b: Tensor) -> Tensor:
    dtype = torch.promote_types(a.dtype, torch.float32)
    return a.to(dtype) @ b.to(dtype)


def visible(first_BS: Tensor | None, part: slice, before: int, like: Tensor) -> Tensor:
    """Keys that the queries of a piece may attend to: bool, to be broadcast with [B, C, T].

    `first_BS` are the first keys of the queries' documents, in front of which they see none.
    """
    key_T = torch.arange(before + part.stop, device=like.device)
    query_C1 = torch.arange(before + part.start, before + part.stop, device=like.device)[:, None]
    seen = key_T <= query_C1
    return seen if first_BS is None else seen & (key_T >= first_BS[:, part, None])


@torch.no_grad()
def select(index: Index, first_BS: Tensor | None, *, top_k: int, before: int = 0) -> Tensor:
    """The `top_k` keys of the best scores of each query.

    Returns:
        int32 [B, S, K] with K = min(top_k, T), best first; -1 where a query sees fewer keys.
    """
    (B, S, J, _), T = index.q_BSJe.shape, index.k_BTe.shape[1]
    K = min(top_k, T)
    chosen_BSK = index.k_BTe.new_full((B, S, K), -1, dtype=torch.int32)
    for part in pieces(index.q_BSJe, 4 * B * J * T):
        keys = before + part.stop
        score_BCT = index.scores(part, keys)
        score_BCT.masked_fill_(~visible(first_BS, part, before, score_BCT), float("-inf"))
        best = score_BCT.topk(min(K, keys), -1)
        found = best.indices.masked_fill(best.values == float("-inf"), -1)
        chosen_BSK[:, part, : found.shape[-1]] = found.to(torch.int32)
    return chosen_BSK
