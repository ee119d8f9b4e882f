"""Functions of a router's logits: choice of experts and their weights, and limits of the kernel.

They are pure functions of the logits [T, E] of this rank's tokens, in fp32 or fp64, without a host
read. Ties go to the lower expert, on every device. What the kernel `topk` does not take is told
without CuTe DSL.

Legend: T tokens, E experts in G groups, K experts per token.
"""

import math
from typing import Protocol

import torch
from torch import Tensor

from phalanx.kernels.limits import (
    TOPK_EXPERTS,
    TOPK_GROUP_SCORES,
    TOPK_GROUP_STEP,
    TOPK_GROUPS,
    TOPK_SLOTS,
    Refusal,
)

TINY = 1e-20  # addend of sums of sigmoids, so that none is 0


class Weighting(Protocol):
    """Function from logits to weights, as fields of a router's options."""

    @property
    def score(self) -> str:
        """`softmax` or `sigmoid`."""
        ...

    @property
    def normalize(self) -> bool: ...

    @property
    def softmax_over(self) -> str:
        """`all` logits, or the chosen ones (`topk`)."""
        ...

    @property
    def scale(self) -> float: ...


def choice_scores(
    logits_TE: Tensor, options: Weighting, bias_E: Tensor | None, grouped: bool
) -> Tensor:
    """Scores by which experts are chosen; `bias_E` is added in the choice alone.

    `grouped`: groups, which are judged by sums of scores, limit the choice.
    """
    if bias_E is None and not grouped:
        return logits_TE  # orders experts as the scores do, and does not saturate
    score_TE = logits_TE
    if options.score == "sigmoid":
        score_TE = logits_TE.sigmoid()
    elif options.softmax_over == "all":
        score_TE = logits_TE.softmax(-1)
    return score_TE if bias_E is None else score_TE + bias_E


def choose(
    score_TE: Tensor, top_k: int, groups: int = 1, group_topk: int = 1, *, width: int = 0
) -> Tensor:
    """The K (or `width`) best experts of each token, best first; int64 [T, K].

    With groups, experts must come from the `group_topk` best groups, and the score of a group is
    the sum of its K // group_topk best experts (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
    """
    if group_topk < groups:
        score_TGM = score_TE.view(score_TE.size(0), groups, -1)
        best = max(1, top_k // group_topk)
        group_TG = score_TGM.topk(best, dim=-1).values.sum(-1)
        refused_TG = torch.ones_like(group_TG, dtype=torch.bool)
        refused_TG.scatter_(1, _first(group_TG, group_topk), False)
        score_TE = score_TGM.masked_fill(refused_TG[..., None], float("-inf")).flatten(1)
    return _first(score_TE, width or top_k)


def _first(score: Tensor, k: int) -> Tensor:
    # A stable sort, since topk breaks ties differently on each device.
    return torch.sort(score, dim=-1, descending=True, stable=True).indices[:, :k]


def probabilities(
    logits_TE: Tensor,
    idx_TK: Tensor,
    options: Weighting,
    *,
    kept_TK: Tensor | None = None,
    top_k: int = 0,
) -> Tensor:
    """Weights of the chosen experts: [T, K] in the dtype of the logits.

    One expert per token is never normalised, as in Megatron-Core: its weight would be 1 and the
    router would not learn. transformers does normalise it, so that `moe.hf` imports no such model.

    Args:
        idx_TK: int64 experts of each token.
        kept_TK: choices that count; the others have weight 0. Default: all.
        top_k: experts per token if that is not the width of `idx_TK`.
    """
    normalize = options.normalize and (top_k or idx_TK.size(1)) > 1
    chosen_TK = logits_TE.gather(1, idx_TK)
    if options.score == "sigmoid":
        prob_TK = _only(kept_TK, chosen_TK.sigmoid())
        if normalize:
            prob_TK = prob_TK / (prob_TK.sum(-1, keepdim=True) + TINY)
    elif normalize or options.softmax_over == "topk":  # the two are equivalent
        if kept_TK is not None:
            # A token without experts keeps its logits, as a softmax of -inf would be NaN.
            dropped_TK = ~kept_TK & kept_TK.any(-1, keepdim=True)
            chosen_TK = chosen_TK.masked_fill(dropped_TK, float("-inf"))
        prob_TK = _only(kept_TK, chosen_TK.softmax(-1))
    else:
        prob_TK = _only(kept_TK, logits_TE.softmax(-1).gather(1, idx_TK))
    return prob_TK * options.scale


def _only(kept: Tensor | None, prob: Tensor) -> Tensor:
    return prob if kept is None else prob.masked_fill(~kept, 0)


def topk_refusal(
    options: Weighting, *, experts: int, top_k: int, groups: tuple[int, int] = (1, 1)
) -> Refusal:
    """Why `kernels.sm90.routing.topk` cannot route; `groups`: their number, and of a token."""
    if groups[1] < groups[0] and (why := _refuse_groups(options, experts, top_k, *groups)):
        return why
    if experts % 8 or experts > TOPK_EXPERTS:
        return f"needs a multiple of 8 experts, at most {TOPK_EXPERTS}, not {experts}"
    if top_k > TOPK_SLOTS:
        return f"needs a top_k of at most {TOPK_SLOTS}, not {top_k}"
    if not options.scale or not math.isfinite(options.scale):
        return f"needs a scale other than {options.scale}"
    return None


def _refuse_groups(
    options: Weighting, experts: int, top_k: int, groups: int, chosen: int
) -> Refusal:
    if options.score != "sigmoid":
        return f"expert groups need score=sigmoid, not {options.score}"
    if groups > TOPK_GROUPS:
        return f"needs at most {TOPK_GROUPS} groups, not {groups}"
    if experts // groups % TOPK_GROUP_STEP:
        return f"needs groups of a multiple of {TOPK_GROUP_STEP} experts, not {experts // groups}"
    if top_k // chosen > TOPK_GROUP_SCORES:
        return (
            f"a group may be judged by {TOPK_GROUP_SCORES} scores, not by {top_k // chosen}: "
            f"top_k={top_k} with group_topk={chosen}"
        )
    return None
