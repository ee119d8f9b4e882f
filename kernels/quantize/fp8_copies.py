"""FP8 copies of weights that are made once between two of their updates, and kept beside them.

Without that a copy is made for each use: six times a layer and micro-batch of an MLP, in memory
that is free again behind it. What is kept is two bytes a parameter.
"""

from collections.abc import Iterable

from torch import Tensor

from phalanx.kernels.expert_mlp.backend import Linear
from phalanx.kernels.quantize.blocks import QuantizedWeights
from phalanx.kernels.quantize.quantize import quantize_weights


def weight_copies(linear: Linear, *, keep: bool) -> QuantizedWeights:
    """Those of the weights as they are stored.

    Args:
        keep: with the parameter, until `forget`.
    """
    stored = linear.transposed if linear.is_transposed else linear
    kept: QuantizedWeights | None = getattr(linear.source, "fp8_copies", None)
    if kept is None:
        kept = quantize_weights(stored.weight_LOI, stored.parts)
        if keep and linear.source is not None:
            linear.source.fp8_copies = kept  # type: ignore[attr-defined]
    return kept


def forget(parameters: Iterable[Tensor]) -> None:
    """Before the first use of weights that may be others than at the last."""
    for parameter in parameters:
        vars(parameter).pop("fp8_copies", None)
