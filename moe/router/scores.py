"""Scores for balancing losses. Legend: T tokens, E experts."""

from torch import Tensor

from phalanx.kernels.routing.topk.scores import TINY


def loss_scores(logits_TE: Tensor, score: str) -> Tensor:
    """Scores [T, E] for the balancing losses, which sum to 1 for every token."""
    if score == "softmax":
        return logits_TE.softmax(-1)
    score_TE = logits_TE.sigmoid()
    return score_TE / (score_TE.sum(-1, keepdim=True) + TINY)
