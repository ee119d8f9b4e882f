"""Floating-point operations of the custom ops, for `torch.utils.flop_counter.FlopCounterMode`."""

import functools
import sys
from typing import Any

import torch
from torch import Tensor

from phalanx.kernels.functional import custom_ops as _ops  # noqa: F401 - defines the ops


@functools.cache
def register_flops() -> None:
    """Let `FlopCounterMode` count the products of the experts, which it takes for none otherwise.

    Importing `phalanx.kernels.api` does this if torch.utils.flop_counter has been imported before:
    that one imports Triton, half a second that others need not wait for. Counted are the products
    of all rows, also of those that no expert has.
    """
    from torch.utils.flop_counter import register_flop_formula

    ops = getattr(torch.ops, __name__.partition(".")[0])
    register_flop_formula(ops.grouped_mlp, get_raw=True)(_forward)
    register_flop_formula(ops.grouped_mlp_backward, get_raw=True)(_backward)


def _forward(
    x: Tensor, w1: Tensor, w2: Tensor, b1: Any, b2: Any, index: Tensor | None, *rest: Any, **_: Any
) -> int:
    return 2 * _rows(x, index) * (_size(w1) + _size(w2))


def _backward(
    dout: Tensor,
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    b2: Any,
    h: Tensor,
    index: Tensor | None,
    *rest: Any,
    **_: Any,
) -> int:
    dx, dw1, dw2, *_biases = rest[-1]
    # The gradient of the activation is the way to all others but that of w2.
    products = _size(w2) * (1 + dw2) + _size(w1) * (dx + dw1)
    return 2 * _rows(x, index) * products


def _rows(x: Tensor, index: Tensor | None) -> int:
    return x.shape[0] if index is None else index.shape[0]


def _size(w: Tensor) -> int:
    """Elements of the weights of an expert."""
    return w.shape[1] * w.shape[2]


if "torch.utils.flop_counter" in sys.modules:
    register_flops()
