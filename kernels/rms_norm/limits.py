"""Rows that the kernels of QuACK's RMSNorm are used for, without importing it."""

from phalanx.kernels.refusal import Refusal

CHANNELS = 8
"""bf16 of a 16-byte access."""
MOST = 8192
"""Channels of a row that one CTA holds, forward and backward."""


def unsupported_width(channels: int) -> Refusal:
    """Why rows of so many channels cannot be normalised."""
    if channels % CHANNELS or not CHANNELS <= channels <= MOST:
        some = f"{CHANNELS} to {MOST} channels, in multiples of {CHANNELS}"
        return f"needs rows of {some}, not {channels}"
    return None
