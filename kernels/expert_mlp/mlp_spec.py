"""How an expert MLP, a shared expert or a dense MLP is computed, as one value."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.quantize.recipe import Recipe


@dataclass(frozen=True)
class Margins:
    """SMs that the kernels of each pass leave free for others, such as communication.

    Only `fused` and `cudnn` can; a margin changes no result. With `cudnn` each value is compiled
    in, and weight gradients leave none free.
    """

    forward: int = 0
    dgrad: int = 0
    """Data gradients: everything of the backward pass that leads to dx and to dprob."""
    wgrad: int = 0
    """Weight and bias gradients."""

    def __post_init__(self) -> None:
        for name in ("forward", "dgrad", "wgrad"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"{getattr(self, name)} SMs cannot be left free: set "
                    f"kernels.sm_margin.{name} to 0 or more"
                )


@dataclass(frozen=True)
class MLPSpec:
    """What is computed between the two matrices of an MLP, by whom, and where gradients go."""

    activation: Activation
    backend: str
    """`reference`, `torch`, `fused` or `cudnn`; see `kernels.registry`."""
    margins: Margins = Margins()
    """SMs that the kernels of each pass leave free (fused; cudnn, but for weight gradients)."""
    dynamic: bool = True
    """Kernels claim tiles on the device rather than deal them out in turn (fused and cudnn)."""
    accumulate: bool = False
    """Gradients of parameters with a `main_grad` of their shape, fp32 or of their dtype, are added
    to that, and `grad_added_to_main_grad` is set, as Megatron-Core's data parallel wrapper
    expects."""
    recipe: Recipe | None = None
    """Operands of the GEMMs are quantized; None: they are as they are given."""
    save_unquantized: bool = False
    """With a recipe, dense layers save their inputs as they are given and quantize them once more
    in the backward pass, for callers who give up the memory of these; routed experts do not."""
    recompute_h: bool = False
    """Experts save no h: the backward pass runs fc1 again."""
    keep_fp8: bool = False
    """FP8 copies of weights stay with them until they change (fused only)."""
    interleaved: bool = False
    """w1, b1 and their gradients are in the order of `kernels.sm100.interleave` (cudnn only)."""


FUSED_MULTIPLE = 64
"""Of the widths that the fused kernels take."""


def for_widths(spec: MLPSpec, *widths: int) -> MLPSpec:
    """How a dense layer of these channels is computed: as `spec` says, or by `torch` where the
    fused kernels do not take them, such as a part of a projection on one of many tensor ranks."""
    if spec.backend != "fused" or all(width % FUSED_MULTIPLE == 0 for width in widths):
        return spec
    return replace(spec, backend="torch", margins=Margins(), keep_fp8=False)


class MLPWeights(NamedTuple):
    """Parameters of an MLP, stacked over L experts."""

    w1: Tensor
    """[L, H, D]; if gated, the gate's F rows and then those of the linear half."""
    w2: Tensor
    """[L, D, F]."""
    b1: Tensor | None = None
    """[L, H]."""
    b2: Tensor | None = None
    """[L, D]."""
