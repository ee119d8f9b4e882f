"""Kernels for Hopper that only expert replication launches, which are built ahead of time.

They are variants of the core's kernels: weight gradients of replicas, of which empty ones are not
cleared, bias gradients of rows behind those of own experts, an exchange of routing alone, and sums
that are sent with unreduced rows.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

EITHER = (False, True)


def kernels() -> Iterator[tuple[type, Any]]:
    """Kernel class and configuration of each, with the exchanges of eight GPUs."""
    yield from _gradients()
    yield from _exchanges()


def _gradients() -> Iterator[tuple[type, Any]]:
    from phalanx.kernels.sm90.experts.bias_grad import BiasGradConfig, BiasGradKernel
    from phalanx.kernels.sm90.wgrad.bf16 import Contraction, D, V
    from phalanx.kernels.sm90.wgrad.fp8 import Fp8Contraction
    from phalanx.kernels.sm90.wgrad.kernel import WgradConfig, WgradKernel

    formats = ("e4m3", "e5m2")
    contractions: tuple[Any, ...] = (
        *(Contraction(*chosen) for chosen in product((192, 256), (D, V))),
        *(Fp8Contraction(*chosen) for chosen in product((192, 256), formats)),
    )
    for math in contractions:
        yield WgradKernel, WgradConfig(math, True, False, ordered=True, zeros=False)
    for scaled in EITHER:
        how: dict[str, Any] = dict(scaled=scaled, indexed=scaled, behind=True)
        yield BiasGradKernel, BiasGradConfig(True, False, **how)
        for rows_format in formats:
            yield BiasGradKernel, BiasGradConfig(True, False, **how, rows_format=rows_format)


def _exchanges() -> Iterator[tuple[type, Any]]:
    from phalanx.kernels.sm90.exchange.combine_push import CombinePushConfig, CombinePushKernel
    from phalanx.kernels.sm90.exchange.push import PushConfig, PushKernel

    yield PushKernel, PushConfig(16, 8, 1, False)  # side data alone
    for slots, side in product((2, 4, 6, 8, 10), EITHER):
        yield CombinePushKernel, CombinePushConfig(slots, 8, side, True)
