"""Rows in FP8 between ranks: half the bytes of bf16, in the format that the experts' GEMMs read.

Autograd carries tensors of the rows' shape and dtype without data: the gradient of a tensor has its
dtype, and that of rows in FP8 is not FP8. `hier` quantises rows before the transport between nodes
(the rail) and forwards them unchanged inside a node.

Legend: T tokens per rank, D hidden, R ranks, N = R * T.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from phalanx.kernels.expert_mlp.interfaces import Fp8Inputs
from phalanx.kernels.quantize.blocks import Quantized
from phalanx.kernels.quantize.quantize import quantize_packed, unpack_rows
from phalanx.kernels.quantize.recipe import FORMATS, Fp8Block

Move = Callable[[Tensor], Tensor]  # gathers packed rows of all ranks: [T, ...] -> [N, ...]


class FP8Rows:
    """Tokens and gradients of sums on their way to the experts, in one call of a layer."""

    def __init__(self, recipe: Fp8Block) -> None:
        self._tokens, self._gradient = torch.float8_e4m3fn, FORMATS[recipe.grad_format]
        self.fp8_inputs = Fp8Inputs()

    def bring_tokens(self, x_TD: Tensor, move: Move) -> Tensor:
        """[N, D] without data; the rows are in `fp8_inputs`."""
        return self.tokens_arrived(move(self.pack_tokens(x_TD)), x_TD)

    def bring_gradient(self, grad_TD: Tensor, move: Move) -> Tensor:
        return self.gradient_arrived(move(self.pack_gradient(grad_TD)), grad_TD)

    def pack_tokens(self, x_TD: Tensor) -> Tensor:
        """Quantise for sending: uint8 [T, ...]."""
        return quantize_packed(x_TD, self._tokens)

    def pack_gradient(self, grad_TD: Tensor) -> Tensor:
        return quantize_packed(grad_TD, self._gradient)

    def tokens_arrived(self, packed: Tensor, like_TD: Tensor) -> Tensor:
        """Put packed rows [N, ...] into `fp8_inputs`; returns [N, D] without data."""
        self.fp8_inputs.tokens = self.tokens(packed, like_TD.shape[1])
        return without_data(like_TD, len(packed))

    def gradient_arrived(self, packed: Tensor, like_TD: Tensor) -> Tensor:
        self.fp8_inputs.gradient = unpack_rows(packed, like_TD.shape[1], self._gradient)
        return without_data(like_TD, len(packed))

    def tokens(self, packed: Tensor, hidden: int) -> Quantized:
        """Unpack tokens [N, ...] to values and scales."""
        return unpack_rows(packed, hidden, self._tokens)


class RailRows(FP8Rows):
    """Rows over the rail: they are stored for `ForwardedRows`, and `fp8_inputs` stays empty."""

    packed_tokens: Tensor
    packed_gradient: Tensor

    def tokens_arrived(self, packed: Tensor, like_TD: Tensor) -> Tensor:
        self.packed_tokens = packed
        return without_data(like_TD, len(packed))

    def gradient_arrived(self, packed: Tensor, like_TD: Tensor) -> Tensor:
        self.packed_gradient = packed
        return without_data(like_TD, len(packed))


class ForwardedRows(FP8Rows):
    """Rows that arrived over the rail and are forwarded inside the node, then freed.

    Its methods take tensors without data in their place.
    """

    def __init__(self, recipe: Fp8Block, rail: RailRows) -> None:
        super().__init__(recipe)
        self._rail = rail

    def pack_tokens(self, x_TD: Tensor) -> Tensor:
        packed = self._rail.packed_tokens
        del self._rail.packed_tokens
        return packed

    def pack_gradient(self, grad_TD: Tensor) -> Tensor:
        packed = self._rail.packed_gradient
        del self._rail.packed_gradient
        return packed


def without_data(like_TD: Tensor, rows: int) -> Tensor:
    """[rows, D] for autograd alone."""
    return like_TD.new_empty(1).expand(rows, like_TD.shape[1])
