"""Rows in FP8 between ranks: half the bytes of bf16, and what the experts' GEMMs read.

Autograd carries tensors of the rows' shape and dtype that hold no data: a gradient must have the
dtype of what it is the gradient of, and that of rows in FP8 is not FP8.

Legend: T tokens per rank, D hidden, R ranks, N = R * T.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from phalanx.kernels.expert_mlp.autograd import Arrived
from phalanx.kernels.quantize.blocks import Quantized
from phalanx.kernels.quantize.packed import pack_rows, unpack_rows
from phalanx.kernels.quantize.quantize import quantize_rows
from phalanx.kernels.quantize.recipe import FORMATS, Fp8Block

Move = Callable[[Tensor], Tensor]
"""Brings rows of bytes of all ranks: [T, ...] -> [N, ...]."""


class FP8Rows:
    """Tokens and gradients of sums on their way to the experts, in one call of a layer.

    Args:
        recipe: of the experts.
    """

    def __init__(self, recipe: Fp8Block) -> None:
        self._recipe = recipe
        self.arrived = Arrived()

    def bring_tokens(self, x_TD: Tensor, move: Move) -> Tensor:
        """[N, D] without data; the rows are in `arrived`."""
        self.arrived.tokens = _moved(x_TD, torch.float8_e4m3fn, move)
        return _without_data(x_TD, len(self.arrived.tokens.data))

    def bring_gradient(self, grad_TD: Tensor, move: Move) -> Tensor:
        """[N, D] without data; the rows are in `arrived`."""
        self.arrived.gradient = _moved(grad_TD, FORMATS[self._recipe.grad_format], move)
        return _without_data(grad_TD, len(self.arrived.gradient.data))


def _moved(x_TD: Tensor, dtype: torch.dtype, move: Move) -> Quantized:
    packed = pack_rows(quantize_rows(x_TD, dtype=dtype))
    return unpack_rows(move(packed), x_TD.shape[1], dtype)


def _without_data(like_TD: Tensor, rows: int) -> Tensor:
    return like_TD.new_empty(1).expand(rows, like_TD.shape[1])
