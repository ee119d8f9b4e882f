"""A linear layer by a recipe, on the operations of the expert MLP: one expert that has all rows.

Attention's projections in FP8 are this. Without a recipe cuBLAS is as good.

Shape legend: N rows, I channels in, O channels out.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.kernels.expert_mlp import main_grad
from phalanx.kernels.expert_mlp.autograd import (
    backend_of,
    for_wgrad,
    held_parameters,
    hold_parameters,
    input_for_wgrad,
    saved_input,
)
from phalanx.kernels.expert_mlp.calls import (
    Linear,
    Operand,
    RowsCall,
    WgradCall,
    rows_of,
    tensors_of,
)
from phalanx.kernels.expert_mlp.expert_plan import one_group
from phalanx.kernels.expert_mlp.main_grad import Buffer
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec


def dense_linear(x_NI: Tensor, w_OI: Tensor, bias_O: Tensor | None, spec: MLPSpec) -> Tensor:
    """y_NO = x @ w^T + bias, differentiable once.

    Args:
        x_NI: bf16 or fp32, as w and the bias are. Saved for the backward pass as the recipe has it.
        spec: backend, recipe and accumulation of gradients; the activation is not used.

    Raises:
        ValueError: unknown backend, or shapes and dtypes that do not fit together.
    """
    fits = x_NI.ndim == w_OI.ndim == 2 and x_NI.shape[1] == w_OI.shape[1]
    if not fits or x_NI.dtype != w_OI.dtype:
        raise ValueError(
            f"expected x [N, I] and w [O, I] of one dtype, got {x_NI.dtype} {list(x_NI.shape)} and "
            f"{w_OI.dtype} {list(w_OI.shape)}"
        )
    return _Linear.apply(x_NI.contiguous(), w_OI, bias_O, spec)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_NI: Tensor, w_OI: Tensor, bias_O: Tensor | None, spec: MLPSpec
    ) -> Tensor:
        ops, ctx.plan, ctx.spec = backend_of(spec, "forward"), one_group(x_NI), spec
        x = ops.quantize(x_NI)
        ctx.save_for_backward(w_OI, *tensors_of(saved_input(x_NI, x, spec)))
        hold_parameters(ctx, [w_OI], spec)
        return ops.rows(RowsCall(x, Linear.single_expert(w_OI, bias_O), ctx.plan))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NO: Tensor) -> tuple[Tensor | None, ...]:
        saved, *x = ctx.saved_tensors
        (w_OI,) = held_parameters(ctx, [saved])
        dgrad, wgrad = (backend_of(ctx.spec, step) for step in ("dgrad", "wgrad"))
        need_x, need_w, need_b, _ = ctx.needs_input_grad
        dy = dgrad.quantize(dy_NO.contiguous(), gradient=True)
        operands, dw_OI = [], None
        if need_w:
            dy_rows = for_wgrad(dy_NO.contiguous(), dy, ctx.spec)
            x_rows = input_for_wgrad(rows_of(x), wgrad, ctx.spec)
            operands = [Operand(dy_rows, gradient=True), Operand(x_rows)]
        layer = Linear.single_expert(w_OI).transposed
        rows = RowsCall(dy, layer, ctx.plan) if need_x else None
        dx_NI, operands = dgrad.rows_and_columns(rows, ctx.plan, operands)
        if need_w:
            d, v = operands
            dw_OI = weight_gradient(ctx, wgrad, d, v, w_OI)
        return dx_NI, dw_OI, dy_NO.sum(0) if need_b else None, None


def weight_gradient(ctx: Any, wgrad: Any, d: Operand, v: Operand, w_OI: Tensor) -> Tensor | None:
    """In the dtype of w, or in the buffer of the parameter in `ctx.accumulated`."""
    (accumulated,) = ctx.accumulated
    if accumulated is None:
        dw_LOI: Tensor = wgrad.wgrad(WgradCall(d, v, ctx.plan))
        return dw_LOI.view(w_OI.shape).to(w_OI.dtype)
    plan = ctx.plan

    def compute(buffer: Buffer) -> None:
        wgrad.wgrad(WgradCall(d, v, plan, buffer._replace(out=buffer.out[None])))

    return main_grad.write(accumulated, compute)
