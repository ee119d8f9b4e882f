"""FP8 copies of weights, cached on the parameter between two updates of it.

Without the cache a copy is made for each use, four times per MLP layer and micro-batch, in memory
that is freed right after. The cache costs two bytes per parameter.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from phalanx.kernels.expert_mlp.calls import Linear
from phalanx.kernels.parameter_facts import facts_of
from phalanx.kernels.quantize.blocks import QuantizedWeights
from phalanx.kernels.quantize.quantize import quantize_weights


def weight_copies(linear: Linear, *, keep: bool) -> QuantizedWeights:
    """FP8 copies of the weights in their stored layout.

    Args:
        linear: layer of the weights.
        keep: cache them on the parameter until `forget`.
    """
    stored = linear.transposed if linear.is_transposed else linear
    facts = None if linear.source is None else facts_of(linear.source)
    copies: QuantizedWeights | None = None if facts is None else facts.fp8_copies
    if copies is None:
        copies = quantize_weights(stored.weight_LOI, stored.parts)
        if keep and facts is not None:
            facts.fp8_copies = copies
    return copies


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
