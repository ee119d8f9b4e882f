"""FP8 copies of weights, cached on the parameter between two updates of it.

Without the cache a copy is made for each use, four times per MLP layer and micro-batch, in the
layout that is read and in memory that is freed right after. The cache has both layouts and costs
two bytes per parameter.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from phalanx.kernels.expert_mlp.calls import Linear
from phalanx.kernels.parameter_facts import facts_of
from phalanx.kernels.quantize.blocks import Quantized, QuantizedWeights
from phalanx.kernels.quantize.quantize import quantize_layout, quantize_weights


def weight_copy(linear: Linear, *, keep: bool) -> Quantized:
    """FP8 weights of a layer, [L, O, I], with contiguous channels in.

    Args:
        linear: layer of the weights.
        keep: cache them on the parameter until `forget`, in both layouts.
    """
    stored = linear.transposed if linear.is_transposed else linear
    facts = None if linear.source is None else facts_of(linear.source)
    copies: QuantizedWeights | None = None if facts is None else facts.fp8_copies
    if copies is None:
        if facts is None or not keep:
            transposed = linear.is_transposed
            return quantize_layout(stored.weight_LOI, stored.parts, transposed=transposed)
        facts.fp8_copies = copies = quantize_weights(stored.weight_LOI, stored.parts)
    return copies.transposed if linear.is_transposed else copies.forward


def forget(parameters: Iterable[Tensor]) -> None:
    """Drop the cached copies of parameters, before the first use of updated weights."""
    for parameter in parameters:
        facts_of(parameter).fp8_copies = None


@contextmanager
def within_a_step(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Copies cached before the context are not used in it, and those cached in it end with it.

    They lie between activations of the step. An eager step whose copies lasted until the next one
    would keep the allocator from returning the blocks around them, which a graph cannot use.
    """
    forget(parameters)
    try:
        yield
    finally:
        forget(parameters)
