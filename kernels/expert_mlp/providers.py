"""Expert backends by name.

`kernels.registry` decides which can run; this module does not check. The fused backend is imported
at its first use, as its compiler takes seconds to import.
"""

import functools

from phalanx.kernels.expert_mlp.backend import Backend
from phalanx.kernels.expert_mlp.emulated_fp8 import EmulatedFP8
from phalanx.kernels.expert_mlp.emulated_microscaling import EmulatedMicroscaling
from phalanx.kernels.expert_mlp.reference import Reference
from phalanx.kernels.expert_mlp.torch_grouped import Grouped
from phalanx.kernels.quantize.recipe import Microscaling, Recipe
from phalanx.kernels.sm100.limits import ROWS as CUDNN_ROWS

NAMES = ("reference", "torch", "fused", "cudnn")


def row_multiple(name: str) -> int:
    """Multiple to which a backend's plans pad the rows of each expert."""
    return CUDNN_ROWS if name == "cudnn" else 1


def rows_for(pairs: int, experts: int, name: str) -> int:
    """Number of expert rows that suffices for `pairs`, however they are spread over the experts."""
    multiple = row_multiple(name)
    return (pairs + experts * (multiple - 1)) // multiple * multiple


@functools.cache
def provider(
    name: str,
    sm_margin: int = 0,
    recipe: Recipe | None = None,
    keep_fp8: bool = False,
    interleaved: bool = False,
) -> Backend:
    """The backend called `name`.

    Args:
        name: one of NAMES.
        sm_margin: SMs that its kernels leave free.
        recipe: quantization of its operands.
        keep_fp8: FP8 copies of weights are kept until the weights change.
        interleaved: fc1 is stored in the order of `kernels.sm100.interleave` (cudnn only).

    Raises:
        ValueError: unknown name, or a recipe that the backend does not support.
    """
    if isinstance(recipe, Microscaling):
        if name == "fused":
            raise ValueError(f"kernels.backend=fused has no {recipe.format}: use kernels=torch")
        if name == "cudnn":
            from phalanx.kernels.sm100.microscaling import CuDNNMicroscaling

            return CuDNNMicroscaling(sm_margin, interleaved, recipe)
        return EmulatedMicroscaling(provider(name), recipe)
    if recipe is not None:
        if name == "fused":
            from phalanx.kernels.sm90.fp8.backend import FusedFP8

            return FusedFP8(sm_margin, recipe, keep_fp8)
        return EmulatedFP8(provider(name), recipe)
    match name:
        case "reference":
            return Reference()
        case "torch":
            return Grouped()
        case "fused":
            from phalanx.kernels.sm90.experts.backend import Fused

            return Fused(sm_margin)
        case "cudnn":
            from phalanx.kernels.sm100.backend import CuDNN

            return CuDNN(sm_margin, interleaved)
    raise ValueError(
        f"kernels.backend={name} has no expert MLP here: use kernels={' or kernels='.join(NAMES)}"
    )
