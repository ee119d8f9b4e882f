"""A linear layer by a recipe, and a dense MLP without biases, on the operations of the expert MLP.

Both are one expert that has all rows. Attention's projections in FP8 are `dense_linear`; without a
recipe cuBLAS is as good. The MLP has two steps, fc1 and fc2, with the bits of
`kernels.expert_mlp.grouped_mlp`, which may overlap different transfers: a shared expert's fc1 runs
while tokens are dispatched to the routed experts, its fc2 while their results are combined.

Shape legend: N rows, I channels in, O channels out; D hidden, F width, H = 2F for gated activations
and F for others.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

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
from phalanx.kernels.expert_mlp.backend import HiddenGrads
from phalanx.kernels.expert_mlp.calls import (
    Fc1Call,
    Fc2DgradCall,
    Linear,
    Operand,
    Rows,
    RowsCall,
    WgradCall,
    rows_of,
    tensors_of,
)
from phalanx.kernels.expert_mlp.expert_plan import one_group
from phalanx.kernels.expert_mlp.main_grad import Buffer
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec


def dense_linear(x_NI: Tensor, w_OI: Tensor, bias_O: Tensor | None, spec: MLPSpec) -> Tensor:
    """y_NO = x @ w^T + bias, differentiable once, for bf16 or fp32.

    x is saved for the backward pass as the recipe has it; the activation of `spec` is not used.
    ValueError for an unknown backend, or shapes and dtypes that do not fit together.
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
        ops = backend_of(spec, "forward")
        x = ops.quantize(x_NI)
        _save_context(ctx, one_group(x_NI), spec, w_OI)
        ctx.save_for_backward(w_OI, *tensors_of(saved_input(x_NI, x, spec)))
        return ops.rows(RowsCall(x, Linear.single_expert(w_OI, bias_O), ctx.plan))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NO: Tensor) -> tuple[Tensor | None, ...]:
        saved, *x = ctx.saved_tensors
        (w_OI,) = held_parameters(ctx, [saved])
        rows_NO = dy_NO.contiguous()
        dy = backend_of(ctx.spec, "dgrad").quantize(rows_NO, gradient=True)
        columns = for_wgrad(rows_NO, dy, ctx.spec)
        dx_NI, dw_OI = _gradients(ctx, dy, columns, x, Linear.single_expert(w_OI))
        return dx_NI, dw_OI, dy_NO.sum(0) if ctx.needs_input_grad[2] else None, None


def _gradients(
    ctx: Any, dy: Rows, columns: Any, x: list[Tensor], layer: Linear
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the input and of the weights that are wanted, from those of the outputs.

    `columns`: operand of the weights' gradient; `x`: tensors of the saved input.
    """
    need_x, need_w, *_ = ctx.needs_input_grad
    dgrad, wgrad = (backend_of(ctx.spec, step) for step in ("dgrad", "wgrad"))
    operands = []
    if need_w:
        x_rows = input_for_wgrad(rows_of(x), wgrad, ctx.spec)
        operands = [Operand(columns, parts=layer.parts, gradient=True), Operand(x_rows)]
    rows = RowsCall(dy, layer.transposed, ctx.plan) if need_x else None
    dx_NI, operands = dgrad.rows_and_columns(rows, ctx.plan, operands)
    w_OI = layer.source
    assert w_OI is not None
    if not need_w:
        return dx_NI, None
    d, v = operands
    return dx_NI, weight_gradient(ctx, wgrad, d, v, w_OI)


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


class DenseFc1(NamedTuple):
    """Result of `dense_fc1`, input of `dense_fc2`."""

    h_NH: Tensor  # its gradient comes from `dense_fc2`
    a_NF: Rows  # activation of h, without a gradient
    gradient: list[HiddenGrads]
    """With a recipe, the backward pass of fc2 stores the gradient of h here: quantized, it has a
    form for each of its readers, which autograd could not carry."""
    recompute: Callable[[], tuple[Tensor]]
    """Recomputes h, for callers that free its memory between forward and backward pass."""


def dense_fc1(x_ND: Tensor, w1: Tensor, spec: MLPSpec) -> DenseFc1:
    """h = x @ w1^T and its activation; h is saved unquantized. Errors as `dense_linear`."""
    F = w1.shape[0] // 2 if spec.activation.gated else w1.shape[0]
    fits = x_ND.ndim == 2 and w1.shape == (spec.activation.width(F), x_ND.shape[-1])
    if not fits or w1.dtype != x_ND.dtype:
        raise ValueError(f"expected x [N, D] and w1 [H, D] of one dtype, got {_shapes(x_ND, w1)}")
    gradient: list[HiddenGrads] = []
    x_ND = x_ND.contiguous()
    h_NH, *a = _Fc1.apply(x_ND, w1, spec, gradient)
    return DenseFc1(h_NH, rows_of(a), gradient, partial(_compute_h, x_ND.detach(), w1, spec))


def dense_fc2(first: DenseFc1, w2: Tensor, spec: MLPSpec) -> Tensor:
    """a @ w2^T for w2 [D, F]; only h is saved. Errors as `dense_linear`."""
    h_NH, a, gradient, _ = first
    a_NF = tensors_of(a)
    if w2.ndim != 2 or w2.shape[1] != a_NF[0].shape[1] or w2.dtype != h_NH.dtype:
        raise ValueError(f"expected a [N, F] and w2 [D, F], got {_shapes(a_NF[0], w2)} of a dtype")
    return _Fc2.apply(h_NH, w2, spec, gradient, *a_NF)


class _Fc1(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, w1: Tensor, spec: MLPSpec, gradient: list[HiddenGrads]
    ) -> tuple[Tensor, ...]:
        plan, fc1 = one_group(x_ND), _fc1_layer(w1, spec)
        ops = backend_of(spec, "forward")
        x = ops.quantize(x_ND)
        h_NH, a = ops.fc1_act(Fc1Call(x, fc1, plan, spec.activation))
        assert h_NH is not None  # keep_h is the default
        ctx.save_for_backward(w1, *tensors_of(saved_input(x_ND, x, spec)))
        _save_context(ctx, plan, spec, w1)
        ctx.gradient = gradient
        ctx.mark_non_differentiable(*tensors_of(a))
        ctx.set_materialize_grads(False)
        return h_NH, *tensors_of(a)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh_NH: Tensor, *_: None) -> tuple[Any, ...]:
        saved, *x = ctx.saved_tensors
        (w1,) = held_parameters(ctx, [saved])
        dh: Rows = dh_NH
        columns: Any = dh_NH
        if ctx.spec.recipe is not None:
            hidden = ctx.gradient.pop()
            dh = hidden.dh_SH
            columns = dh if hidden.dh_columns is None else hidden.dh_columns
        return *_gradients(ctx, dh, columns, x, _fc1_layer(w1, ctx.spec)), None, None


class _Fc2(torch.autograd.Function):
    """a @ w2^T. `a` is not saved but recomputed from h, which has its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        h_NH: Tensor,
        w2: Tensor,
        spec: MLPSpec,
        gradient: list[HiddenGrads],
        *a_NF: Tensor,
    ) -> Tensor:
        plan, fc2 = one_group(h_NH), Linear.single_expert(w2)
        ctx.save_for_backward(h_NH, w2)
        _save_context(ctx, plan, spec, w2)
        ctx.gradient, ctx.num_a = gradient, len(a_NF)
        return backend_of(spec, "forward").rows(RowsCall(rows_of(a_NF), fc2, plan))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_ND: Tensor) -> tuple[Any, ...]:
        h_NH, saved = ctx.saved_tensors
        (w2,) = held_parameters(ctx, [saved])
        spec, fc2 = ctx.spec, Linear.single_expert(w2)
        dgrad, dout_ND = backend_of(spec, "dgrad"), dout_ND.contiguous()
        dy = dgrad.quantize(dout_ND, gradient=True)
        hidden = dgrad.fc2_dgrad_dact(
            Fc2DgradCall(Operand(dy), fc2, h_NH, ctx.plan, spec.activation)
        )
        dh, dw2 = hidden.dh_SH, None
        if ctx.needs_input_grad[1]:
            wgrad = backend_of(spec, "wgrad")
            dy_operand = Operand(for_wgrad(dout_ND, dy, spec), gradient=True)
            d, a = (wgrad.columns(x, ctx.plan) for x in (dy_operand, Operand(hidden.a_SF)))
            dw2 = weight_gradient(ctx, wgrad, d, a, w2)
        if spec.recipe is not None:
            ctx.gradient.append(hidden)
            dh = h_NH.new_empty(1).expand_as(h_NH)  # only its shape is read
        return dh, dw2, None, None, *[None] * ctx.num_a


@torch.no_grad()
def _compute_h(x_ND: Tensor, w1: Tensor, spec: MLPSpec) -> tuple[Tensor]:
    ops = backend_of(spec, "forward")
    fc1, plan = _fc1_layer(w1, spec), one_group(x_ND)
    h_NH, _ = ops.fc1_act(Fc1Call(ops.quantize(x_ND), fc1, plan, spec.activation))
    assert h_NH is not None  # keep_h is the default
    return (h_NH,)


def _fc1_layer(w1: Tensor, spec: MLPSpec) -> Linear:
    return Linear.single_expert(w1, parts=spec.activation.facts.halves)


def _save_context(ctx: Any, plan: Any, spec: MLPSpec, w: Tensor) -> None:
    ctx.plan, ctx.spec = plan, spec
    hold_parameters(ctx, [w], spec)


def _shapes(*tensors: Tensor) -> str:
    return ", ".join(str(list(t.shape)) for t in tensors)
