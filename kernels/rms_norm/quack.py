"""RMSNorm by QuACK's kernels for Hopper (https://github.com/Dao-AILab/quack), with autograd.

Forward a kernel adds the residual, writes the sum, and normalises it; backward one makes the
gradient of the sum from both results' gradients. Persistent CTAs leave partial gradients of the
weight, one row each, which `sums_triton` adds up in their order: all of it is the same bit for bit
in every run. Saved are the sum, the weight by reference, and 4 bytes a row.

QuACK's own autograd function compiles anew for every power of two of rows, rounds the gradient of a
weight before Megatron-Core's buffer has it, and returns no gradients of a sum that is its input.

Legend: M rows, N channels, P CTAs of the backward kernel.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.kernels.expert_mlp import main_grad
from phalanx.kernels.limits import NORM_CHANNELS, unsupported_width
from phalanx.kernels.rms_norm.quack_library import Rows, program


class _Args(NamedTuple):
    eps: float
    accumulate: bool
    forks: bool  # the sum is returned too
    centered: bool  # the stored weight is the weight minus 1


def rms_norm(
    x: Tensor, weight_N: Tensor, eps: float, *, accumulate: bool = False, centered: bool = False
) -> Tensor:
    """RMSNorm by QuACK, which copies rows that are not contiguous and aligned to 16 bytes."""
    _check(x, None, weight_N)
    args = _Args(eps, accumulate, forks=False, centered=centered)
    normed: Tensor = _Norm.apply(x, None, weight_N, args)
    return normed


def fork(
    x: Tensor,
    residual: Tensor | None,
    weight_N: Tensor,
    eps: float,
    *,
    accumulate: bool = False,
    centered: bool = False,
) -> tuple[Tensor, Tensor]:
    """`kernels.rms_norm.rms_norm.fork` by QuACK."""
    _check(x, residual, weight_N)
    args = _Args(eps, accumulate, forks=True, centered=centered)
    normed, total = _Norm.apply(x, residual, weight_N, args)
    return normed, total


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight_N: Tensor, args: _Args
    ) -> Tensor | tuple[Tensor, Tensor]:
        N = weight_N.numel()
        x_MN = _rows(x, N)
        normed = x.new_empty(x.shape)
        total = None if residual is None else x.new_empty(x.shape)
        rstd_M = x.new_empty(x_MN.shape[0], dtype=torch.float32)
        if x.numel():
            program(Rows(N, "forward", residual is not None, args.centered))(
                x_MN,
                _factor(weight_N, args.centered),
                None,
                None if residual is None else _rows(residual, N),
                normed.view(-1, N),
                None if total is None else total.view(-1, N),
                rstd_M,
                None,
                args.eps,
            )
        ctx.added, ctx.centered = residual is not None, args.centered
        # The parameter itself: a saved tensor may come back as another, without a buffer.
        ctx.accumulated = weight_N if args.accumulate and main_grad.takes(weight_N) else None
        ctx.save_for_backward(x_MN if total is None else total, weight_N, rstd_M)
        ctx.set_materialize_grads(False)
        if not args.forks:
            return normed
        return normed, x.view_as(x) if total is None else total

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dnormed: Tensor | None, dtotal: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        total, weight_N, rstd_M = ctx.saved_tensors
        if dnormed is None:
            return dtotal, dtotal if ctx.added else None, None, None
        N = weight_N.numel()
        dsum = dnormed.new_empty(dnormed.shape)
        partial_PN = rstd_M.new_empty(_ctas(N, rstd_M.device), N)
        if dsum.numel():
            program(Rows(N, "backward", dtotal is not None, ctx.centered))(
                _rows(total, N),
                _factor(weight_N, ctx.centered),
                _rows(dnormed, N),
                None if dtotal is None else _rows(dtotal, N),
                rstd_M,
                None,
                dsum.view(-1, N),
                partial_PN,
                None,
                None,
                partial_PN.shape[0],
            )
        else:
            partial_PN.zero_()
        dweight_N = _weight_grad(ctx, partial_PN, weight_N) if ctx.needs_input_grad[2] else None
        return dsum, dsum if ctx.added else None, dweight_N, None


def _weight_grad(ctx: Any, partial_PN: Tensor, weight_N: Tensor) -> Tensor | None:
    from phalanx.kernels.elementwise.sums_triton import add_rows

    if ctx.accumulated is None:
        return add_rows(partial_PN, torch.empty_like(weight_N), add=False)
    return main_grad.write(
        ctx.accumulated, lambda buffer: add_rows(partial_PN, buffer.out, add=buffer.add)
    )


def _factor(weight_N: Tensor, centered: bool) -> Tensor:
    """[N] factor of normalised channels: the weight, or in fp32 the stored weight plus 1."""
    return weight_N.float() + 1 if centered else _rows(weight_N, weight_N.numel())[0]


def _rows(x: Tensor, N: int) -> Tensor:
    x_MN = x.reshape(-1, N)
    if x_MN.stride(1) != 1 or x_MN.stride(0) % NORM_CHANNELS or x_MN.data_ptr() % 16:
        # `contiguous` would leave the strides of a single row as they are.
        return x_MN.clone(memory_format=torch.contiguous_format)
    return x_MN


@functools.cache
def _ctas(N: int, device: torch.device) -> int:
    from quack.rmsnorm_config import get_sm_count

    count: int = get_sm_count(N, device)
    return count


def _check(x: Tensor, residual: Tensor | None, weight_N: Tensor) -> None:
    N = weight_N.numel()
    for name, tensor in (("x", x), ("residual", residual), ("weight", weight_N)):
        if tensor is not None and tensor.dtype != torch.bfloat16:
            raise ValueError(f"kernels.norm=quack needs bf16, but {name} is {tensor.dtype}")
    if not x.is_cuda or torch.cuda.get_device_capability(x.device) != (9, 0):
        raise ValueError("kernels.norm=quack needs CUDA capability 9.0")
    if weight_N.ndim != 1 or x.ndim < 1 or x.shape[-1] != N:
        raise ValueError(f"weight {list(weight_N.shape)} does not fit x {list(x.shape)}")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual {list(residual.shape)} is not as x {list(x.shape)}")
    if why := unsupported_width(N):
        raise ValueError(f"kernels.norm=quack {why}")
