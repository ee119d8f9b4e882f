"""Sizes that the kernels of this package are made for, without CuTe DSL.

The kernels' files import their limits from here, as does whoever decides whether they can run.
"""

TOPK_EXPERTS = 512
"""Experts, of all ranks, that `topk` chooses from."""
TOPK_SLOTS = 16
"""Experts that `topk` chooses for a token."""

PLAN_CAPACITIES = (64, 256, 512, 1024)
"""Numbers of local experts that there are kernels of `plan` for."""
PLAN_EXPERTS = max(PLAN_CAPACITIES)
"""Experts of a rank."""
PLAN_SLOTS = 256
"""Expert ids of a token that `plan` reads."""

COMBINE_SLOTS = 16
"""Expert rows of a token that `combine` adds up."""
