"""Sum of squares over many tensors, for the norm of gradients, in one read of them."""

from collections.abc import Sequence

import torch
from torch import Tensor

_LARGE = 1 << 20  # elements from which a tensor has a launch of its own on a GPU


@torch.no_grad()
def square_sum(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of all elements: fp64 scalar on the device of the tensors.

    Summed in fp64; the kernel of large tensors on a GPU first sums some thousands in fp32. Nothing
    depends on timing, and nothing is read on the host.

    Args:
        tensors: at least one; of floating dtypes and any shapes, on one device.
    """
    large: list[Tensor] = []
    small: list[Tensor] = []
    for t in tensors:
        (large if t.is_cuda and t.is_contiguous() and t.numel() >= _LARGE else small).append(t)
    total = torch.zeros((), dtype=torch.float64, device=tensors[0].device)
    if small:
        norms = torch._foreach_norm(small, dtype=torch.float64)
        total += torch.stack(norms).square().sum()
    if large:
        from phalanx.kernels.elementwise.square_sum_triton import partial_sums

        total += partial_sums(large).sum(dtype=torch.float64)
    return total
