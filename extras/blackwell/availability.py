"""Availability of cuDNN's grouped GEMMs, for `configs.tables.backends`."""

import torch

from phalanx.configs.formats import is_microscaling
from phalanx.extras.blackwell import glu
from phalanx.kernels.availability import short
from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.limits import Refusal
from phalanx.kernels.registry import Facts

ROWS = 256  # multiple at which an expert's rows start and end
CHANNELS = 64  # divisor of the width of an expert and of the residual stream
EXPERTS = 1024  # maximum number of experts on a rank
PACKAGE = "nvidia-cudnn-frontend==1.32.0"  # what the adapter is written and tested against


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


def runs_here(facts: Facts) -> Refusal:
    """Reason why cuDNN's grouped GEMMs cannot run on a GPU that they are for, or None."""
    if facts.dtype != torch.bfloat16:
        return f"needs bf16, not {short(facts.dtype)}"
    if facts.fp8:
        return "has no blocks of 128 (precision=fp8_block)"
    if why := unsupported_sizes(facts.hidden, facts.ffn, facts.experts):
        return why
    block_scaled = is_microscaling(facts.recipe)
    if block_scaled and facts.wgrad == "bf16":
        return f"has no weight gradients in bf16 (precision.wgrad) under {facts.recipe}"
    if facts.activation:
        constants = facts.activation_alpha, facts.activation_limit, facts.activation_offset
        if why := glu.unsupported(
            Activation(facts.activation, *constants), block_scaled=block_scaled
        ):
            return why
    if "nvidia_cudnn_frontend" not in facts.packages:
        return f"needs cuDNN's frontend: pip install {PACKAGE}"
    return None
