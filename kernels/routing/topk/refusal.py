"""Options and sizes that the kernel `topk` does not take, told without CuTe DSL."""

import math

from phalanx.kernels.refusal import Refusal
from phalanx.kernels.routing.topk.scores import Weighting
from phalanx.kernels.sm90_limits import (
    TOPK_EXPERTS,
    TOPK_GROUP_SCORES,
    TOPK_GROUP_STEP,
    TOPK_GROUPS,
    TOPK_SLOTS,
)


def topk_refusal(
    options: Weighting, *, experts: int, top_k: int, groups: tuple[int, int] = (1, 1)
) -> Refusal:
    """Reason for which `kernels.sm90.routing.topk` cannot route; None if it can.

    Args:
        options: function from logits to weights.
        experts: number of experts.
        top_k: experts per token.
        groups: number of groups of experts, and how many a token chooses from.
    """
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
