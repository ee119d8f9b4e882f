"""Sizes that nvidia-cudnn-frontend's grouped GEMMs support, without importing it."""

from phalanx.kernels.refusal import Refusal

ROWS = 256  # multiple at which an expert's rows start and end
CHANNELS = 64  # divisor of the width of an expert and of the residual stream
EXPERTS = 1024  # maximum number of experts on a rank
PACKAGE = "nvidia-cudnn-frontend==1.32.0"
"""The version that the adapter is written and tested against, as pip knows it."""


def unsupported_sizes(hidden: int, ffn: int, experts: int) -> Refusal:
    """Reason why experts of these sizes cannot run, or None; a size of 0 is unknown and fits."""
    if hidden % CHANNELS or ffn % CHANNELS:
        return (
            f"needs whole runs of {CHANNELS} channels: model.hidden={hidden} and "
            f"model.moe.ffn={ffn} must be multiples of {CHANNELS}"
        )
    if experts > EXPERTS:
        return f"needs at most {EXPERTS} experts on a rank, not {experts}: raise parallel.expert"
    return None
