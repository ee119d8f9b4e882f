"""Row widths for which QuACK's RMSNorm kernels are used, without importing it."""

from phalanx.kernels.refusal import Refusal

CHANNELS = 8  # bf16 of a 16-byte access
MOST = 8192  # most channels of a row that one CTA holds, forward and backward


def unsupported_width(channels: int) -> Refusal:
    """Reason why rows of so many channels cannot be normalised, or None."""
    if channels % CHANNELS or not CHANNELS <= channels <= MOST:
        widths = f"{CHANNELS} to {MOST} channels, in multiples of {CHANNELS}"
        return f"needs rows of {widths}, not {channels}"
    return None
