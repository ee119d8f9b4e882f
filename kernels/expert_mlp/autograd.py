"""The autograd of the expert MLP and the sum back to tokens, over any backend.

`ExpertMLP` is the one function for all of it: with a sum over a token's experts or in expert order,
alone or overlapping exchanges with other GPUs (`Overlap`), gradients returned or added to a
training framework's buffers. Saved for backward are x, h, the weights by reference and the plan's
indices, x and perhaps h in FP8 if the recipe says so; activations are recomputed from h, expert
rows are never saved. No gradient is summed in an order that depends on timing: x's is a
gather-and-sum through the inverse map.

Shape legend as in `kernels.expert_mlp.backend`; out is [N, D], or [S, D] in expert order without
`inverse_NK`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.kernels.expert_mlp import main_grad
from phalanx.kernels.expert_mlp.backend import Backend, provider
from phalanx.kernels.expert_mlp.calls import (
    Fc1Call,
    Fc2DgradCall,
    Linear,
    Operand,
    Rows,
    RowsCall,
    rows_of,
    tensors_of,
)
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan, gather_rows
from phalanx.kernels.expert_mlp.fp8 import in_dtype
from phalanx.kernels.expert_mlp.interfaces import Experts, Fp8Inputs, Overlap, OwnExperts, unchanged
from phalanx.kernels.expert_mlp.mlp_spec import Layer, MLPSpec, MLPWeights, Pass
from phalanx.kernels.expert_mlp.pending_grads import PendingGrads, accumulate_or_defer
from phalanx.kernels.expert_mlp.weight_grads import WeightGrads
from phalanx.kernels.quantize.quantize import quantize_rows
from phalanx.kernels.quantize.recipe import Fp8Block


def backend_of(spec: MLPSpec, step: Pass) -> Backend:
    """The backend of an MLP in one of its passes, with that pass's options of launches."""
    options = spec.recipe, spec.keep_fp8, spec.channel_order
    return provider(spec.backend, spec.margins.options(step), *options)


def hold_parameters(ctx: Any, weights: Sequence[Tensor | None], spec: MLPSpec) -> None:
    """Keep the parameters themselves, as hooks make others of saved tensors.

    Those have neither the buffer of the gradient nor FP8 copies. `ctx.accumulated` has the
    parameters whose gradients go to their buffers, and None for others.
    """
    ctx.parameters = [p if p is not None and p.is_leaf else None for p in weights]
    ctx.accumulated = [p if spec.accumulate and main_grad.takes(p) else None for p in weights]


def held_parameters(ctx: Any, saved: Sequence[Tensor | None]) -> list[Any]:
    """The parameters of `hold_parameters`, or for those that are no leaves the saved tensors."""
    pairs = zip(ctx.parameters, saved, strict=True)
    return [tensor if p is None else p for p, tensor in pairs]


class ExpertMLP(torch.autograd.Function):
    """out of x, weights, biases, probabilities and addends.

    With `overlap`, out is in flight when it is returned, x is not saved but requested again, and
    the gradient of the probabilities is sent with that of x: none is returned, so pass None for
    the probabilities and leave them in the plan.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w1: Tensor,
        w2: Tensor,
        b1: Tensor | None,
        b2: Tensor | None,
        prob_S: Tensor | None,
        plan: ExpertPlan,
        args: "ExpertMLPArgs",
        *addends: Tensor,
    ) -> Tensor:
        weights, overlap, ctx.args = MLPWeights(w1, w2, b1, b2), args.overlap, args
        wait_rows = None if overlap is None else overlap.wait_rows
        wrap_backend = args.experts.start(weights, "fc1", wait_rows)
        out, h, x_rows = run_forward(x, weights, plan, args, addends, wrap_backend)
        if args.spec.recompute_h:
            h = x.new_empty(0)
        elif args.on_saved_h is not None:
            args.on_saved_h(*tensors_of(h))
        hold_parameters(ctx, weights, args.spec)
        saved_h, saved_x = tensors_of(h), tensors_of(x_rows) if overlap is None else ()
        ctx.counts = len(saved_h), len(saved_x)
        if overlap is None:
            ctx.save_for_backward(w1, w2, b1, b2, *saved_h, *saved_x, *plan._replace(needed=None))
        else:
            ctx.save_for_backward(w1, w2, b1, b2, *saved_h)
            ctx.plan = plan
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # gradients that nobody could differentiate would look like 0
            raise RuntimeError("the expert MLP has first gradients only: leave out create_graph")
        needs = ctx.needs_input_grad
        addends = [dout if need else None for need in needs[8:]]
        if not any(needs[:6]):  # h was not saved
            return *[None] * 8, *addends
        w1, w2, b1, b2, *tensors = ctx.saved_tensors
        weights = MLPWeights(*held_parameters(ctx, (w1, w2, b1, b2)))
        num_h, num_x = ctx.counts
        h, tensors = rows_of(tensors[:num_h]), tensors[num_h:]
        x = rows_of(tensors[:num_x]) if num_x else None
        plan = ExpertPlan(*tensors[num_x:]) if num_x else ctx.plan
        args = ctx.args
        in_flight = args.overlap is not None and not args.spec.recompute_h
        first: Layer = "fc1" if args.spec.recompute_h else "fc2"
        wrap_backend = args.experts.start(
            weights, first, args.overlap.wait_rows if in_flight else None
        )
        saved = Saved(x, weights, h, plan, args, wrap_backend)
        out_grad = dout.contiguous() if args.fp8_inputs is None else args.fp8_inputs.gradient
        dx, dprob, work = data_gradients(out_grad, saved, needs[:5])
        del saved, x, h, tensors, out_grad  # `work` has what it reads
        pending = PendingGrads(work, weights, args.experts, ctx.accumulated)
        grads = accumulate_or_defer(pending, needs[1:5], args.inputs_persist)
        results = zip([dx, *grads, dprob], needs, strict=False)
        return *(g if need else None for g, need in results), None, None, *addends


class ExpertMLPArgs(NamedTuple):
    """Arguments of `ExpertMLP` that are not tensors."""

    spec: MLPSpec
    keep_h: bool  # a backward pass may follow
    overlap: Overlap | None = None
    fp8_inputs: Fp8Inputs | None = None
    """Read in place of x and of the gradient of out; None: both are read themselves."""
    on_saved_h: Callable[..., None] | None = None  # called with the tensors that are saved of h
    experts: Experts = OwnExperts()
    inputs_persist: bool = False
    """x and the gradient of out stay as they are until the end of the step: weight gradients that
    go to `main_grad` may wait (`kernels.wgrad_queue`)."""


class Saved(NamedTuple):
    """State from which the backward pass starts."""

    x_ND: Rows | None  # none: `args.overlap` has it
    weights: MLPWeights
    h_SH: Rows  # empty with `args.spec.recompute_h`
    plan: ExpertPlan
    args: ExpertMLPArgs
    wrap_backend: Callable[[Backend], Backend] = unchanged  # result of `Experts.start`


def run_forward(
    x: Tensor,
    weights: MLPWeights,
    plan: ExpertPlan,
    args: ExpertMLPArgs,
    addends: Sequence[Tensor] = (),
    wrap_backend: Callable[[Backend], Backend] = unchanged,
) -> tuple[Tensor, Rows, Rows]:
    """(out, h as it is to be saved, x as it is to be saved); h is empty without `keep_h`."""
    spec, overlap = args.spec, args.overlap
    ops, act = wrap_backend(backend_of(spec, "forward")), spec.activation
    fc1, fc2 = _layers(weights, spec)
    ready = None if overlap is None else overlap.ready
    received: Rows = x if args.fp8_inputs is None else args.fp8_inputs.tokens
    x_rows = ops.quantize(received)
    h_SH, a_SF = ops.fc1_act(Fc1Call(x_rows, fc1, plan, act, args.keep_h, ready))
    h_SH = x.new_empty(0) if h_SH is None or not args.keep_h else saved_hidden(h_SH, spec)
    x_rows = for_wgrad(received, x_rows, spec)
    if overlap is not None:
        signal = overlap.start_sums(a_SF, weights.w2.shape[-2], plan, args.keep_h)
        sums = functools.cache(overlap.finish_sums)
        ops.rows(RowsCall(a_SF, fc2, plan, signal, after_signal=sums))
        return sums(), h_SH, x_rows
    y_SD = ops.rows(RowsCall(a_SF, fc2, plan))
    if plan.inverse_NK is None:
        return y_SD, h_SH, x_rows
    del a_SF
    return ops.combine(y_SD, plan.inverse_NK, addends), h_SH, x_rows


@torch.no_grad()
def data_gradients(
    dout: Rows, saved: Saved, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, WeightGrads]:
    """Gradients of x and of the probabilities, and the work of those of the weights.

    They come first, so that sending them overlaps the others.

    Args:
        dout: gradient of out, contiguous, or in FP8.
        saved: state of the forward pass.
        needs: which gradients of x, w1, w2, b1 and b2 are wanted.
    """
    x_ND, weights, h_SH, plan, args, wrap_backend = saved
    spec, act, overlap = args.spec, args.spec.activation, args.overlap
    ops = wrap_backend(backend_of(spec, "dgrad"))
    fc1, fc2 = _layers(weights, spec)
    need_x, need_w1, need_w2, need_b1, need_b2 = needs
    if spec.recompute_h:
        x_ND, h_SH = _hidden(saved, fc1)
    dy = Operand(dout, gather=plan.inverse_NK is not None, gradient=True)
    if dy.gather and not ops.fuses_gather and plan.row_index_S is not None:
        dy = Operand(gather_rows(dout, plan.row_index_S, plan.offsets), gradient=True)
    ready = None if overlap is None or spec.recompute_h else overlap.ready
    dy_rows = dy._replace(matrix=ops.quantize(dy.matrix, gradient=True))
    h_rows = in_dtype(Operand(h_SH, parts=fc1.parts), weights.w2.dtype)
    hidden = ops.fc2_dgrad_dact(Fc2DgradCall(dy_rows, fc2, h_rows, plan, act, ready))
    dh_SH, dprob_S, db1 = hidden.dh_SH, hidden.dprob_S, hidden.db1_LH
    dh = dh_SH if hidden.dh_columns is None else hidden.dh_columns
    dy = dy._replace(matrix=for_wgrad(dy.matrix, dy_rows.matrix, spec))
    gather_x = plan.row_index_S is not None
    w2_operands = [dy, Operand(hidden.a_SF)] if need_w2 else []
    w1_operands = [Operand(dh, parts=fc1.parts, gradient=True)] if need_w1 else []
    w1_operands += [Operand(x_ND, gather=gather_x)] if need_w1 and x_ND is not None else []
    operands = [*w2_operands, *w1_operands]
    del hidden, dy_rows, h_rows, dh, w2_operands, w1_operands
    fc1_dgrad = RowsCall(dh_SH, fc1.transposed, plan) if need_x else None
    if overlap is None:
        dx, operands = ops.rows_and_columns(fc1_dgrad, plan, operands)
        if dx is not None and plan.inverse_NK is not None:
            dx = ops.combine(dx, plan.inverse_NK)
    else:
        assert plan.inverse_NK is not None
        dx = None if fc1_dgrad is None else ops.rows(fc1_dgrad)
        dprob_NK = None if dprob_S is None else ops.plan_backward(dprob_S, plan.inverse_NK)
        dx = overlap.send_gradient(dx, dprob_NK, plan)
    work = WeightGrads(
        backend_of(spec, "wgrad"),
        plan,
        needs[1:],
        w1_operands=operands[2 * need_w2 :],
        w2_operands=operands[: 2 * need_w2],
        b1_operand=Operand(dh_SH, parts=fc1.parts) if need_b1 else None,
        b2_operand=dy if need_b2 else None,
        db1_LH=db1,
        tokens=None if overlap is None or x_ND is not None else overlap.tokens,
    )
    return dx, dprob_S, work


def _hidden(saved: Saved, fc1: Linear) -> tuple[Rows, Rows]:
    """x, and h recomputed from it, with the bits of the forward pass."""
    x_ND, spec, overlap = saved.x_ND, saved.args.spec, saved.args.overlap
    if x_ND is None:
        assert overlap is not None
        x_ND = overlap.tokens_first()
    ops = saved.wrap_backend(backend_of(spec, "forward"))
    h_SH, _ = ops.fc1_act(Fc1Call(ops.quantize(x_ND), fc1, saved.plan, spec.activation))
    assert h_SH is not None
    return x_ND, saved_hidden(h_SH, spec)


def _layers(weights: MLPWeights, spec: MLPSpec) -> tuple[Linear, Linear]:
    """Layers fc1 and fc2."""
    w1, w2, b1, b2 = weights
    return Linear(w1, b1, spec.activation.facts.halves, source=w1), Linear(w2, b2, source=w2)


def saved_hidden(h_SH: Rows, spec: MLPSpec) -> Rows:
    """The form of h that is saved; `in_dtype` returns its values."""
    if isinstance(spec.recipe, Fp8Block) and spec.recipe.hidden == "fp8":
        return quantize_rows(h_SH, spec.activation.facts.halves)
    return h_SH


def for_wgrad(unquantized: Any, quantized: Any, spec: MLPSpec) -> Any:
    """The form of a matrix that weight gradients read."""
    return unquantized if spec.recipe is not None and spec.recipe.wgrad == "bf16" else quantized


def saved_input(unquantized: Any, quantized: Any, spec: MLPSpec) -> Any:
    """The form of its input that a dense layer saves."""
    return unquantized if spec.save_unquantized else for_wgrad(unquantized, quantized, spec)


def input_for_wgrad(saved: Rows, ops: Backend, spec: MLPSpec) -> Rows:
    """The operand of weight gradients from `saved_input`."""
    requantize = spec.save_unquantized and spec.recipe is not None and spec.recipe.wgrad == "fp8"
    return ops.quantize(saved) if requantize else saved
