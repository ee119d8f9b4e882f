"""Value and derivative of every activation of `configs.tables.activations` in plain torch.

Functions of the clamped gate (or of h without a gate), elementwise, in the dtype of x. They are
what `kernels.expert_mlp.torch_grouped` compiles, and what `kernels.expert_mlp.reference` and dense
MLPs compute where torch has no function of its own.
"""

import math

import torch
from torch import Tensor

from phalanx.kernels.expert_mlp.activation import Activation


def silu(x: Tensor, act: Activation) -> Tensor:
    """x * sigmoid(x)."""
    return _sigmoid_linear(x, 1.0)


def silu_slope(x: Tensor, act: Activation) -> Tensor:
    """Derivative of `silu`."""
    return _sigmoid_linear_slope(x, 1.0)


def quick_gelu(x: Tensor, act: Activation) -> Tensor:
    """x * sigmoid(alpha * x)."""
    return _sigmoid_linear(x, act.alpha)


def quick_gelu_slope(x: Tensor, act: Activation) -> Tensor:
    """Derivative of `quick_gelu`."""
    return _sigmoid_linear_slope(x, act.alpha)


def gelu(x: Tensor, act: Activation) -> Tensor:
    """x times the normal distribution function of x."""
    return x * _normal_cdf(x)


def gelu_slope(x: Tensor, act: Activation) -> Tensor:
    """Derivative of `gelu`."""
    density = torch.exp(-0.5 * x.square()) * math.sqrt(0.5 / math.pi)
    return _normal_cdf(x) + x * density


def squared_relu(x: Tensor, act: Activation) -> Tensor:
    """The square of max(x, 0)."""
    return x.relu().square()


def squared_relu_slope(x: Tensor, act: Activation) -> Tensor:
    """Derivative of `squared_relu`."""
    return 2 * x.relu()


def _sigmoid_linear(x: Tensor, alpha: float) -> Tensor:
    return x * torch.sigmoid(alpha * x)


def _sigmoid_linear_slope(x: Tensor, alpha: float) -> Tensor:
    s = torch.sigmoid(alpha * x)
    return s + alpha * x * s * (1 - s)


def _normal_cdf(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
