"""Sizes that the kernels of this package are made for, without CuTe DSL.

The kernels' files import their limits from here, as does whoever decides whether they can run.
"""

TOPK_EXPERTS = 512
"""Experts, of all ranks, that `topk` chooses from."""
TOPK_SLOTS = 16
"""Experts that `topk` chooses for a token."""
TOPK_GROUPS = 32
"""Groups of experts, one for each lane of a warp."""
TOPK_GROUP_STEP = 4
"""A group has a multiple of so many experts, the logits of a vector."""
TOPK_GROUP_SCORES = 2
"""Best scores of a group that are added to judge it; the order of a longer sum is not defined."""

PLAN_CAPACITIES = (64, 256, 512, 1024)
"""Numbers of local experts that there are kernels of `plan` for."""
PLAN_EXPERTS = max(PLAN_CAPACITIES)
"""Experts of a rank."""
PLAN_SLOTS = 256
"""Expert ids of a token that `plan` reads."""

COMBINE_SLOTS = 16
"""Expert rows of a token that `combine` adds up."""
COMBINE_ADDENDS = 2
"""What it adds to a token's sum: the shared experts', and the residual."""
