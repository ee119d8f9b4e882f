"""RMSNorm as a function, and together with the residual that goes past what follows it.

moe/model/norm.py calls it everywhere in a model. A layer needs two results of one sum: its norm,
and the sum itself for the next addition. `fork` makes both, and in the backward pass takes both
gradients, so that neither the addition nor the sum of the gradients is a pass of its own where the
backend can fuse them. Backends: `torch`, and `quack` (kernels of QuACK for Hopper, in bf16).

Legend: N channels; in front of them any dimensions.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(
    x: Tensor,
    weight_N: Tensor,
    eps: float,
    *,
    backend: str = "torch",
    accumulate: bool = False,
    centered: bool = False,
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467).

    Args:
        x: [..., N]; statistics and the product with the weight are fp32 inside, if x is bf16.
        weight_N: in the dtype of x.
        eps: added to the mean square.
        backend: `torch` or `quack`.
        accumulate: add the gradient of the weight to its `main_grad`, if it has one, instead of
            returning it (only `quack`).
        centered: the stored weight is the weight minus 1; 1 is added in fp32.

    Returns:
        A tensor with x's shape and dtype.

    Raises:
        ValueError: unknown backend, or tensors that it does not support.
    """
    if backend == "quack":
        from phalanx.kernels.rms_norm import quack

        return quack.rms_norm(x, weight_N, eps, accumulate=accumulate, centered=centered)
    _check(backend)
    return _norm(x, weight_N, eps, centered)


def fork(
    x: Tensor,
    residual: Tensor | None,
    weight_N: Tensor,
    eps: float,
    *,
    backend: str = "torch",
    accumulate: bool = False,
    centered: bool = False,
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), or without a residual (rms_norm(x), x).

    The sum is rounded to the dtype of x. `quack` normalises it in fp32, before it is rounded.

    Args:
        residual: shaped as x; None: x is the sum.
        x, weight_N, eps, backend, accumulate, centered: as in `rms_norm`.

    Raises:
        ValueError: as `rms_norm`.
    """
    if backend == "quack":
        from phalanx.kernels.rms_norm import quack

        options = dict(accumulate=accumulate, centered=centered)
        return quack.fork(x, residual, weight_N, eps, **options)
    _check(backend)
    total = x if residual is None else residual + x
    return _norm(total, weight_N, eps, centered), total


def _norm(x: Tensor, weight_N: Tensor, eps: float, centered: bool) -> Tensor:
    if not centered:
        return F.rms_norm(x, weight_N.shape, weight_N, eps)
    fp32 = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(fp32), weight_N.shape, weight_N.to(fp32) + 1, eps).to(x.dtype)


def _check(backend: str) -> None:
    if backend != "torch":
        raise ValueError(f"unknown norm backend {backend!r}: use torch or quack")
