"""Calls of nvidia-cudnn-frontend, imported at the first of them.

Its kernels are compiled for the sizes of weights at the first call with them (seconds each, kept
for the process), so a step has to run before a capture. The SM margin is a number of clusters of
two in an environment variable, which a call reads and compiles in: `call` sets it around a call.
Weight gradients, whose grid covers all tiles, leave no SM free.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from phalanx.kernels.launch_options import LaunchOptions

MARGIN = "CUDNNFE_CLUSTER_OVERLAP_MARGIN"
_CLUSTER = 2  # SMs of a cluster


def call(name: str, options: LaunchOptions, **arguments: Any) -> dict[str, Tensor | None]:
    """Call `cudnn.NAME_wrapper_sm100` with the SM margin of `options`."""
    import cudnn

    with _leaving_free(options.sm_margin):
        outputs: dict[str, Tensor | None] = getattr(cudnn, f"{name}_wrapper_sm100")(**arguments)
    return outputs


@contextmanager
def _leaving_free(sms: int) -> Iterator[None]:
    clusters, before = str(-(-sms // _CLUSTER)), os.environ.get(MARGIN)
    if before == clusters or (before is None and not sms):
        yield
        return
    os.environ[MARGIN] = clusters
    try:
        yield
    finally:
        if before is None:
            del os.environ[MARGIN]
        else:
            os.environ[MARGIN] = before


_ONES: dict[tuple[torch.device, int], Tensor] = {}


def ones(count: int, device: torch.device) -> Tensor:
    """fp32 factors of 1, cached: an eager step precedes a capture, whose pool must not own them."""
    if (device, count) not in _ONES:
        _ONES[device, count] = torch.ones(count, device=device)
    return _ONES[device, count]
