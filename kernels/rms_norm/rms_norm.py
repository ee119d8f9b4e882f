"""RMSNorm as a function, and together with the residual that goes past what follows it.

A layer needs two results of one sum: its norm, and the sum itself for the next addition. `fork`
makes both, and backward takes both gradients, so that neither addition is a pass of its own where
the backend can fuse them. Backends: `torch`, and `quack` (kernels of QuACK for Hopper, in bf16).

Legend: N channels; in front of them any dimensions.
"""

from importlib import import_module
from typing import Any

from torch import Tensor

from phalanx.configs.tables.backends import NORM_BACKENDS


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
        accumulate: add the gradient of the weight to its `main_grad`, if it has one, instead of
            returning it (only `quack`).
        centered: the stored weight is the weight minus 1; 1 is added in fp32.

    Raises:
        ValueError: unknown backend, or tensors that it does not support.
    """
    implementation = _module(backend)
    normed: Tensor = implementation.rms_norm(
        x, weight_N, eps, accumulate=accumulate, centered=centered
    )
    return normed


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

    The sum is rounded to the dtype of x; `quack` normalises it before. Other arguments and errors
    are those of `rms_norm`.
    """
    implementation = _module(backend)
    normed, total = implementation.fork(
        x, residual, weight_N, eps, accumulate=accumulate, centered=centered
    )
    return normed, total


def _module(backend: str) -> Any:
    facts = NORM_BACKENDS.get(backend)
    if facts is None or not facts.implementation:
        known = " or ".join(name for name, entry in NORM_BACKENDS.items() if entry.implementation)
        raise ValueError(f"unknown norm backend {backend!r}: use {known}")
    return import_module(facts.implementation)
