"""Availability of cuDNN's grouped GEMMs, for `configs.tables.backends`."""

import torch

from phalanx.configs.formats import is_microscaling
from phalanx.extras.blackwell import glu
from phalanx.extras.blackwell.limits import PACKAGE as CUDNN_FRONTEND
from phalanx.extras.blackwell.limits import unsupported_sizes
from phalanx.kernels.availability import short
from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.refusal import Refusal
from phalanx.kernels.registry import Facts


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
        return f"needs cuDNN's frontend: pip install {CUDNN_FRONTEND}"
    return None
