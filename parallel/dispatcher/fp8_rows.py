"""Rows in FP8 between ranks: half the bytes of bf16, and what the experts' GEMMs read.

Autograd carries tensors of the rows' shape and dtype that hold no data: a gradient must have the
dtype of what it is the gradient of, and that of rows in FP8 is not FP8.

A transport may bring rows by two legs, as `hier` does: first between nodes, then inside one. They
become FP8 before the first leg and go on as they are.

Legend: T tokens per rank, D hidden, R ranks, N = R * T.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from phalanx.kernels.expert_mlp.autograd import Fp8Inputs
from phalanx.kernels.quantize.blocks import Quantized
from phalanx.kernels.quantize.packed import quantize_packed, unpack_rows
from phalanx.kernels.quantize.recipe import FORMATS, Fp8Block

Move = Callable[[Tensor], Tensor]
"""Brings packed rows of all ranks: [T, ...] -> [N, ...]."""


class FP8Rows:
    """Tokens and gradients of sums on their way to the experts, in one call of a layer.

    Args:
        recipe: of the experts.
    """

    def __init__(self, recipe: Fp8Block) -> None:
        self._tokens, self._gradient = torch.float8_e4m3fn, FORMATS[recipe.grad_format]
        self.fp8_inputs = Fp8Inputs()

    def bring_tokens(self, x_TD: Tensor, move: Move) -> Tensor:
        """[N, D] without data; the rows are in `fp8_inputs`."""
        return self.tokens_came(move(self.pack_tokens(x_TD)), x_TD)

    def bring_gradient(self, grad_TD: Tensor, move: Move) -> Tensor:
        """[N, D] without data; the rows are in `fp8_inputs`."""
        return self.gradient_came(move(self.pack_gradient(grad_TD)), grad_TD)

    def pack_tokens(self, x_TD: Tensor) -> Tensor:
        """uint8 [T, ...], to be sent."""
        return quantize_packed(x_TD, self._tokens)

    def pack_gradient(self, grad_TD: Tensor) -> Tensor:
        """uint8 [T, ...], to be sent."""
        return quantize_packed(grad_TD, self._gradient)

    def tokens_came(self, packed: Tensor, like_TD: Tensor) -> Tensor:
        """Put packed rows [N, ...] into `fp8_inputs`; returns [N, D] without data."""
        self.fp8_inputs.tokens = self.tokens(packed, like_TD.shape[1])
        return without_data(like_TD, len(packed))

    def gradient_came(self, packed: Tensor, like_TD: Tensor) -> Tensor:
        """The same of gradients."""
        self.fp8_inputs.gradient = unpack_rows(packed, like_TD.shape[1], self._gradient)
        return without_data(like_TD, len(packed))

    def tokens(self, packed: Tensor, hidden: int) -> Quantized:
        """What packed tokens are."""
        return unpack_rows(packed, hidden, self._tokens)


class FirstLeg(FP8Rows):
    """The first of two legs: what has come waits for the second, and `fp8_inputs` stays empty."""

    packed_tokens: Tensor
    packed_gradient: Tensor

    def tokens_came(self, packed: Tensor, like_TD: Tensor) -> Tensor:
        self.packed_tokens = packed
        return without_data(like_TD, len(packed))

    def gradient_came(self, packed: Tensor, like_TD: Tensor) -> Tensor:
        self.packed_gradient = packed
        return without_data(like_TD, len(packed))


class SecondLeg(FP8Rows):
    """The leg after `first`, whose rows it sends on and holds no longer.

    The tensors that it is given in their place are without data.
    """

    def __init__(self, recipe: Fp8Block, first: FirstLeg) -> None:
        super().__init__(recipe)
        self._first = first

    def pack_tokens(self, x_TD: Tensor) -> Tensor:
        packed = self._first.packed_tokens
        del self._first.packed_tokens
        return packed

    def pack_gradient(self, grad_TD: Tensor) -> Tensor:
        packed = self._first.packed_gradient
        del self._first.packed_gradient
        return packed


def without_data(like_TD: Tensor, rows: int) -> Tensor:
    """[rows, D] for autograd alone."""
    return like_TD.new_empty(1).expand(rows, like_TD.shape[1])
