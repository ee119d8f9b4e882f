"""What nvidia-cudnn-frontend's grouped GEMMs are made for, without importing it."""

from phalanx.kernels.refusal import Refusal

ROWS = 256
"""An expert's rows begin and end at multiples of it."""
CHANNELS = 64
"""Width of an expert, and of the residual stream, in whole runs of so many."""
EXPERTS = 1024
"""Of a rank."""
PACKAGE = "nvidia-cudnn-frontend==1.32.0"
"""The version that the adapter is written and tested against, as pip knows it."""


def unsupported_sizes(hidden: int, ffn: int, experts: int) -> Refusal:
    """Why experts of these sizes cannot be computed; a size of 0 is unknown and fits."""
    if hidden % CHANNELS or ffn % CHANNELS:
        return (
            f"needs whole runs of {CHANNELS} channels: model.hidden={hidden} and "
            f"model.moe.ffn={ffn} must be multiples of {CHANNELS}"
        )
    if experts > EXPERTS:
        return f"needs at most {EXPERTS} experts on a rank, not {experts}: raise parallel.expert"
    return None
