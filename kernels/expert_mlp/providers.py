"""From the name of an expert backend to the object that runs it.

`kernels.registry` says which can run where; here a name is taken at its word. The fused backend is
imported when it is first asked for, as its compiler takes seconds to import.
"""

import functools

from phalanx.kernels.expert_mlp.backend import Backend
from phalanx.kernels.expert_mlp.emulated_fp8 import EmulatedFP8
from phalanx.kernels.expert_mlp.reference import Reference
from phalanx.kernels.expert_mlp.torch_grouped import Grouped
from phalanx.kernels.quantize.recipe import Fp8Block

NAMES = ("reference", "torch", "fused")


@functools.cache
def provider(
    name: str, sm_margin: int = 0, dynamic: bool = True, recipe: Fp8Block | None = None
) -> Backend:
    """The backend called `name`.

    Args:
        name: one of NAMES.
        sm_margin: SMs that its kernels leave free.
        dynamic: its GEMMs claim tiles on the device; otherwise tiles are dealt out in turn.
        recipe: of its operands.

    Raises:
        ValueError: unknown name, or one that has no such recipe.
    """
    if recipe is not None:
        if name == "fused":
            raise ValueError("kernels=fused has no FP8 GEMMs yet: set precision=bf16")
        return EmulatedFP8(provider(name), recipe)
    match name:
        case "reference":
            return Reference()
        case "torch":
            return Grouped()
        case "fused":
            from phalanx.kernels.sm90.experts.backend import Fused

            return Fused(sm_margin, dynamic)
    raise ValueError(
        f"kernels.backend={name} has no expert MLP here: use kernels={' or kernels='.join(NAMES)}"
    )
