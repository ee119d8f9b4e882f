"""Size limits of the kernels of `kernels.sm90`, importable without CuTe DSL.

The kernels import their limits from here, as does the code that decides whether they can run.
"""

from phalanx.kernels.refusal import Refusal

TOPK_EXPERTS = 512  # most experts, of all ranks, that `topk` chooses from
TOPK_SLOTS = 16  # most experts that `topk` chooses for a token
TOPK_GROUPS = 32  # most groups of experts: one for each lane of a warp
TOPK_GROUP_STEP = 4  # divisor of a group's number of experts: the logits of a vector
TOPK_GROUP_SCORES = 2
"""Most scores that are added for a group's rank; the order of a longer sum is not defined."""

PLAN_CAPACITIES = (64, 256, 512, 1024)  # numbers of local experts that `plan` has kernels for
PLAN_EXPERTS = max(PLAN_CAPACITIES)  # most experts of a rank
PLAN_SLOTS = 256  # most expert ids of a token for `plan`

COMBINE_SLOTS = 16  # most expert rows of a token for `combine`
COMBINE_ADDENDS = 2  # most addends of `combine`: the shared experts' output, and the residual


def impossible_groups(groups: int, chosen: int, *, experts: int, top_k: int) -> Refusal:
    """Reason for which a token cannot choose from some groups of experts; None if it can.

    Args:
        groups: number of groups.
        chosen: how many a token chooses from.
        experts: number of experts.
        top_k: experts per token.
    """
    if 1 <= chosen <= groups and not experts % groups and top_k <= chosen * (experts // groups):
        return None
    return f"{top_k} of {experts} experts cannot come from {chosen} of {groups} equal groups"
