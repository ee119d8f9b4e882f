"""The fused backend of `configs.tables.backends`."""

from phalanx.kernels.expert_mlp.backend import BackendOfParts
from phalanx.kernels.expert_mlp.providers import Options
from phalanx.kernels.quantize.recipe import Fp8Block
from phalanx.kernels.sm90.jit.stand_ins import import_kernels


def fused(options: Options) -> BackendOfParts:
    """The fused kernels for Hopper, in bf16 or with the FP8 recipe.

    Raises:
        ValueError: another recipe, or one with weight gradients in bf16.
    """
    import_kernels()
    if options.recipe is None:
        from phalanx.kernels.sm90.experts.backend import Fused

        return Fused(options.launch)
    if not isinstance(options.recipe, Fp8Block):
        name = options.recipe.format
        raise ValueError(f"kernels.backend=fused has no {name}: use kernels=torch")
    if options.recipe.wgrad == "bf16":
        raise ValueError("kernels.backend=fused has no precision.wgrad=bf16: use kernels=torch")
    from phalanx.kernels.sm90.fp8.backend import FusedFP8

    return FusedFP8(options.launch, options.recipe, options.keep_fp8)
