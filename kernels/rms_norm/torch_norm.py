"""RMSNorm by PyTorch, everywhere; see `kernels.rms_norm.rms_norm`."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(
    x: Tensor, weight_N: Tensor, eps: float, *, accumulate: bool = False, centered: bool = False
) -> Tensor:
    """`kernels.rms_norm.rms_norm.rms_norm`; the gradient of the weight is always returned."""
    if not centered:
        return F.rms_norm(x, weight_N.shape, weight_N, eps)
    fp32 = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(fp32), weight_N.shape, weight_N.to(fp32) + 1, eps).to(x.dtype)


def fork(
    x: Tensor,
    residual: Tensor | None,
    weight_N: Tensor,
    eps: float,
    *,
    accumulate: bool = False,
    centered: bool = False,
) -> tuple[Tensor, Tensor]:
    """`kernels.rms_norm.rms_norm.fork`; the gradient of the weight is always returned."""
    total = x if residual is None else residual + x
    return rms_norm(total, weight_N, eps, centered=centered), total
