"""Implementation of each operation, and SMs that the experts leave free."""

from dataclasses import dataclass, field

from phalanx.configs.fields import knob
from phalanx.configs.tables.backends import ATTENTION_BACKENDS, EXPERT_BACKENDS, NORM_BACKENDS


@dataclass
class SmMarginConfig:
    """Number of SMs that `fused` and `cudnn` expert kernels leave free, of `cudnn` in pairs."""

    forward: int = 0
    """SMs that the fused expert kernels leave free in the forward pass, for example for NCCL."""
    dgrad: int = 0
    """SMs that the fused kernels of the data gradients leave free in the backward pass."""
    wgrad: int = 0
    """SMs that the fused kernels of the weight gradients leave free in the backward pass; with
    `cudnn` these leave none."""


@dataclass
class KernelsConfig:
    """Which implementation runs each operation. A forced choice that cannot run is an error."""

    backend: str = knob("auto", choices=("auto", EXPERT_BACKENDS))
    """Experts: an entry of configs/tables/backends.py, or `auto` for the best that can run."""
    attention: str = knob("auto", choices=("auto", ATTENTION_BACKENDS))
    """Core attention: an entry of configs/tables/backends.py, or `auto` for the best that can run.

    Linear attention runs by flash-linear-attention where it can, with `reference` always by torch.
    """
    norm: str = knob("auto", choices=("auto", NORM_BACKENDS))
    """RMSNorm: an entry of configs/tables/backends.py, or `auto` for the best that can run."""
    gradient_accumulation_fusion: bool = True
    """On a GPU, the weight-gradient kernels add directly into Megatron-Core's gradient buffers."""
    sm_margin: SmMarginConfig = field(default_factory=SmMarginConfig)
    """SMs that the fused expert kernels leave free."""
