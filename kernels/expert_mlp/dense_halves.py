"""A dense MLP without biases in two halves, so that something else can be done between them.

A shared expert's first half runs while tokens travel to the routed experts, its second half while
their sums come back. The two have the bits of the whole: `kernels.expert_mlp.grouped_mlp` with one
expert that has all rows.

Shape legend: N rows, D hidden, F width, H = 2F for gated activations and F for others.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.kernels.expert_mlp import main_grad
from phalanx.kernels.expert_mlp.autograd import backend_of
from phalanx.kernels.expert_mlp.backend import Linear, Operand
from phalanx.kernels.expert_mlp.expert_plan import one_group
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec


def dense_first(x_ND: Tensor, w1: Tensor, spec: MLPSpec) -> tuple[Tensor, Tensor]:
    """First half.

    Args:
        x_ND: bf16 or fp32, as w1 [H, D] is.
        spec: how.

    Returns:
        h_NH and a_NF, for `dense_second`, which is where h has its gradient from; a has none.

    Raises:
        ValueError: unknown backend, or shapes and dtypes that do not fit together.
    """
    F = w1.shape[0] // 2 if spec.activation.gated else w1.shape[0]
    fits = x_ND.ndim == 2 and w1.shape == (spec.activation.width(F), x_ND.shape[-1])
    if not fits or w1.dtype != x_ND.dtype:
        raise ValueError(f"expected x [N, D] and w1 [H, D] of one dtype, got {_shapes(x_ND, w1)}")
    return _First.apply(x_ND.contiguous(), w1, spec)


def dense_second(h_NH: Tensor, a_NF: Tensor, w2: Tensor, spec: MLPSpec) -> Tensor:
    """Second half: a @ w2^T.

    Args:
        h_NH, a_NF: of `dense_first`; only h is saved for the backward pass.
        w2: [D, F].
        spec: that of the first half.

    Raises:
        ValueError: unknown backend, or shapes and dtypes that do not fit together.
    """
    if w2.ndim != 2 or w2.shape[1] != a_NF.shape[1] or w2.dtype != a_NF.dtype:
        raise ValueError(f"expected a [N, F] and w2 [D, F] of one dtype, got {_shapes(a_NF, w2)}")
    return _Second.apply(h_NH, a_NF, w2, spec)


class _First(torch.autograd.Function):
    """h, which has a gradient, and act(h)."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, w1: Tensor, spec: MLPSpec) -> tuple[Tensor, Tensor]:
        plan, fc1 = one_group(x_ND), Linear(w1[None])
        h_NH, a_NF = backend_of(spec, "forward").fc1_act(x_ND, fc1, plan, spec.activation)
        assert h_NH is not None
        ctx.save_for_backward(x_ND, w1)
        _keep(ctx, plan, spec, w1)
        ctx.mark_non_differentiable(a_NF)
        ctx.set_materialize_grads(False)
        return h_NH, a_NF

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh_NH: Tensor, _: None) -> tuple[Any, ...]:
        x_ND, w1 = ctx.saved_tensors
        dx_ND = dw1 = None
        if ctx.needs_input_grad[0]:
            fc1 = Linear(w1[None])
            dx_ND = backend_of(ctx.spec, "dgrad").rows(dh_NH, fc1.transposed, ctx.plan)
        if ctx.needs_input_grad[1]:
            dw1 = _wgrad(ctx, dh_NH, x_ND, w1)
        return dx_ND, dw1, None


class _Second(torch.autograd.Function):
    """a @ w2^T. `a` is not saved but made again from h, which has its gradient."""

    @staticmethod
    def forward(ctx: Any, h_NH: Tensor, a_NF: Tensor, w2: Tensor, spec: MLPSpec) -> Tensor:
        plan = one_group(h_NH)
        ctx.save_for_backward(h_NH, w2)
        _keep(ctx, plan, spec, w2)
        return backend_of(spec, "forward").rows(a_NF, Linear(w2[None]), plan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_ND: Tensor) -> tuple[Any, ...]:
        h_NH, w2 = ctx.saved_tensors
        dout_ND, fc2 = dout_ND.contiguous(), Linear(w2[None])
        dgrad, act = backend_of(ctx.spec, "dgrad"), ctx.spec.activation
        made = dgrad.fc2_dgrad_dact(Operand(dout_ND), fc2, h_NH, ctx.plan, act)
        dw2 = _wgrad(ctx, dout_ND, made.a_SF, w2) if ctx.needs_input_grad[2] else None
        return made.dh_SH, None, dw2, None


def _keep(ctx: Any, plan: Any, spec: MLPSpec, w: Tensor) -> None:
    ctx.plan, ctx.spec = plan, spec
    ctx.accumulated = w if spec.accumulate and main_grad.takes(w) else None


def _wgrad(ctx: Any, d: Tensor, v: Tensor, w: Tensor) -> Tensor | None:
    """Into the buffer of the parameter, if that is asked for."""
    wgrad, operands = backend_of(ctx.spec, "wgrad").wgrad, (Operand(d), Operand(v), ctx.plan)
    if ctx.accumulated is None:
        return wgrad(*operands).view(w.shape)
    buffer = main_grad.buffer(ctx.accumulated)
    wgrad(*operands, buffer._replace(out=buffer.out[None]))
    return main_grad.added(ctx.accumulated)


def _shapes(*tensors: Tensor) -> str:
    return ", ".join(str(list(t.shape)) for t in tensors)
