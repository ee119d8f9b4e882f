"""The recipes `mxfp8` and `nvfp4` of a run."""

from phalanx.configs.schema import PrecisionConfig
from phalanx.kernels.quantize.recipe import Microscaling


def build(p: PrecisionConfig) -> Microscaling:
    """The recipe that a run names, with its switches."""
    return Microscaling(p.recipe, p.wgrad, p.stochastic_rounding)  # type: ignore[arg-type]
