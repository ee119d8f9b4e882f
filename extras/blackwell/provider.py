"""The cuDNN backend of `configs.tables.backends`."""

from phalanx.extras.blackwell.backend import CuDNN
from phalanx.extras.blackwell.microscaling import CuDNNMicroscaling
from phalanx.kernels.expert_mlp.backend import Backend
from phalanx.kernels.expert_mlp.providers import Options
from phalanx.kernels.quantize.recipe import Microscaling


def cudnn(options: Options) -> Backend:
    """cuDNN's grouped GEMMs for Blackwell, in bf16, MXFP8 or NVFP4.

    Raises:
        ValueError: another recipe.
    """
    if options.recipe is None:
        return CuDNN(options.launch, options.channel_order is not None)
    if not isinstance(options.recipe, Microscaling):
        raise ValueError("kernels.backend=cudnn has no fp8_block: use kernels=torch")
    return CuDNNMicroscaling(options.launch, options.channel_order is not None, options.recipe)
