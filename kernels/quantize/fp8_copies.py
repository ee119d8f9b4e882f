"""FP8 copies of weights, cached on the parameter between two updates of it.

Without the cache a copy is made for each use, six times per MLP layer and micro-batch, in memory
that is freed right after. The cache costs two bytes per parameter.
"""

from collections.abc import Iterable

from torch import Tensor

from phalanx.kernels.expert_mlp.backend import Linear
from phalanx.kernels.quantize.blocks import QuantizedWeights
from phalanx.kernels.quantize.quantize import quantize_weights


def weight_copies(linear: Linear, *, keep: bool) -> QuantizedWeights:
    """FP8 copies of the weights in their stored layout.

    Args:
        linear: layer of the weights.
        keep: cache them on the parameter until `forget`.
    """
    stored = linear.transposed if linear.is_transposed else linear
    copies: QuantizedWeights | None = getattr(linear.source, "fp8_copies", None)
    if copies is None:
        copies = quantize_weights(stored.weight_LOI, stored.parts)
        if keep and linear.source is not None:
            linear.source.fp8_copies = copies  # type: ignore[attr-defined]
    return copies


def forget(parameters: Iterable[Tensor]) -> None:
    """Drop the cached copies of parameters, before the first use of updated weights."""
    for parameter in parameters:
        vars(parameter).pop("fp8_copies", None)
