"""Head sizes that flash-attn-4's kernels for Hopper support, without importing it.

Its own check allows more. In version 4.0.0b36, heads of 8, 16, 40, 48, 72, 80 and 112 channels get
wrong gradients of the queries: the backward kernel rounds them up to multiples of 16 channels, the
kernel that reads its sums to multiples of 32. Values of other widths than keys do not always
compile, or do not fit into shared memory.
"""

from phalanx.kernels.refusal import Refusal


def unsupported_heads(d: int, v: int, *, grouped: bool = False) -> Refusal:
    """Reason why heads of d query and key and v value channels cannot run, or None.

    `grouped`: several query heads share a key-value head.
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
