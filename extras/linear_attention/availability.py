"""Availability of flash-linear-attention on a machine with a model."""

import torch

from phalanx.kernels.availability import dotted, short
from phalanx.kernels.refusal import Refusal
from phalanx.kernels.registry import Facts


def fla(facts: Facts) -> Refusal:
    """Reason why flash-linear-attention cannot run, or None."""
    if facts.device != "cuda":
        return "needs CUDA"
    if facts.capability is None or facts.capability < (8, 0):
        return f"needs CUDA capability 8.0 or more, not {dotted(facts.capability)}"
    if facts.dtype != torch.bfloat16:
        return f"needs bf16, not {short(facts.dtype)}"
    if not {"flash_linear_attention", "triton"} <= facts.packages:
        return f"needs flash-linear-attention: pip install {FLASH_LINEAR_ATTENTION}"
    return None


FLASH_LINEAR_ATTENTION = "fla-core==0.6.0"
"""Requirement of `extras.linear_attention.fla`, as pip knows it."""
