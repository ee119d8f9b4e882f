"""Size limits of kernels, importable without torch, CuTe DSL and the libraries.

Kernels import their limits from here, as does the code that decides whether they can run.
"""

Refusal = str | None
"""Reason for which something cannot run, in one line that can follow `cannot run:` or `not NAME:`;
None: it can run."""


TOPK_EXPERTS = 512  # most experts, of all ranks, that `topk` chooses from
TOPK_SLOTS = 16  # most experts that `topk` chooses for a token
TOPK_GROUPS = 32  # most groups of experts: one for each lane of a warp
TOPK_GROUP_STEP = 4  # divisor of a group's number of experts: the logits of a vector
TOPK_GROUP_SCORES = 2  # most scores added for a group's rank; longer sums have no fixed order

PLAN_CAPACITIES = (64, 256, 512, 1024)  # numbers of local experts that `plan` has kernels for
PLAN_EXPERTS = max(PLAN_CAPACITIES)  # most experts of a rank
PLAN_SLOTS = 256  # most expert ids of a token for `plan`

MAX_WAVES = 8  # most waves of rows in an exchange

COMBINE_SLOTS = 16  # most expert rows of a token for `combine`
COMBINE_ADDENDS = 2  # most addends of `combine`: the shared experts' output, and the residual


def impossible_groups(groups: int, chosen: int, *, experts: int, top_k: int) -> Refusal:
    """Reason for which a token cannot choose top_k experts from `chosen` groups, or None."""
    if 1 <= chosen <= groups and not experts % groups and top_k <= chosen * (experts // groups):
        return None
    return f"{top_k} of {experts} experts cannot come from {chosen} of {groups} equal groups"


def unsupported_heads(d: int, v: int, *, grouped: bool = False) -> Refusal:
    """Reason why flash-attn-4 cannot run heads of d query and key and v value channels, or None.

    Its own check allows more. In version 4.0.0b36, heads of 8, 16, 40, 48, 72, 80 and 112 channels
    get wrong gradients of the queries: the backward kernel rounds them up to multiples of 16
    channels, the kernel that reads its sums to multiples of 32. Values of other widths than keys do
    not always compile, or do not fit into shared memory.

    Args:
        grouped: several query heads share a key-value head.
    """
    if d % 32 or not 32 <= d <= 256:
        return f"needs heads of 32 to 256 channels, in multiples of 32, not {d}"
    if d == v:
        return None
    if grouped:
        return f"needs values as wide as keys where queries are grouped, not {v} and {d} channels"
    if v % 64 or not 64 <= v < d <= 192:
        return f"has no kernel for keys of {d} channels with values of {v}"
    return None


NORM_CHANNELS = 8  # bf16 of a 16-byte access
NORM_MOST_CHANNELS = 8192  # most channels of a row that one CTA holds, forward and backward


def unsupported_width(channels: int) -> Refusal:
    """Reason why QuACK cannot normalise rows of so many channels, or None."""
    if channels % NORM_CHANNELS or not NORM_CHANNELS <= channels <= NORM_MOST_CHANNELS:
        widths = (
            f"{NORM_CHANNELS} to {NORM_MOST_CHANNELS} channels, in multiples of {NORM_CHANNELS}"
        )
        return f"needs rows of {widths}, not {channels}"
    return None
