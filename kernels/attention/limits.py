"""Heads that the kernels of flash-attn-4 for Hopper take, without importing it.

Its check at run time is wider: it lets through what then does not compile or does not fit into
shared memory in the backward pass. The limits here are of version 4.0.0b36, by compiling.
"""

from phalanx.kernels.refusal import Refusal


def refuse_heads(d: int, v: int, *, grouped: bool = False) -> Refusal:
    """Why heads of d channels of query and key and v of value cannot run.

    `grouped`: several query heads share a key-value head.
    """
    if d % 8 or v % 8 or not 8 <= d <= 256:
        return f"needs heads of 8 to 256 channels, in multiples of 8, not {d} and {v}"
    if d == v:
        return None
    if grouped:
        return f"needs values as wide as keys where queries are grouped, not {v} and {d} channels"
    if v > d or d > 192 or _box(v, d) < _box(d, d):
        return f"has no kernel for keys of {d} channels with values of {v}"
    return None


def _box(channels: int, d: int) -> int:
    """Columns of a tile that are swizzled together in shared memory."""
    step = 64 if d > 128 else 16
    rounded = -(-channels // step) * step
    return next(box for box in (64, 32, 16) if rounded % box == 0)
