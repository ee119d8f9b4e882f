"""The autograd of the expert MLP and the sum back to tokens, over any backend.

`ExpertMLP` is the one function for all of it: with a sum over a token's experts or in expert order,
alone or overlapping exchanges with other GPUs (`Overlap`), gradients returned or added to a
training framework's buffers. Saved for backward are x, h, the weights by reference and the plan's
indices, x and perhaps h in FP8 if the recipe says so; activations are recomputed from h, expert
rows are never kept. No gradient is added up in
an order that depends on timing: x's is a gather-and-sum through the inverse map.

Shape legend as in `kernels.backend`; out is [N, D], or [S, D] in expert order without `inverse_NK`.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from phalanx.kernels.expert_mlp import main_grad
from phalanx.kernels.expert_mlp.backend import (
    Backend,
    Linear,
    Operand,
    Rows,
    rows_of,
    tensors_of,
)
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.main_grad import Buffer
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec, MLPWeights
from phalanx.kernels.expert_mlp.providers import provider
from phalanx.kernels.expert_mlp.replicas import (
    LAYERS,
    BorrowedWeights,
    Layer,
    ReplicaExchange,
    borrow_weights,
    shared_grads,
)
from phalanx.kernels.expert_mlp.weight_grads import WeightGrads
from phalanx.kernels.quantize.blocks import Quantized
from phalanx.kernels.routing.sort_pairs import gather_rows


def backend_of(spec: MLPSpec, step: Literal["forward", "dgrad", "wgrad"]) -> Backend:
    """The backend of an MLP in one of its passes, with the SMs that it leaves free there."""
    margin = getattr(spec.margins, step)
    how = spec.recipe, spec.keep_fp8, spec.interleaved
    return provider(spec.backend, margin, spec.dynamic, *how)


class Overlap(Protocol):
    """Exchanges with other GPUs that overlap one call of the expert MLP."""

    @property
    def ready(self) -> Tensor:
        """What kernels wait for that read rows of x, or of out's gradient in the backward pass."""
        ...

    def wait_rows(self) -> None:
        """All those rows have arrived for what the current stream does from here on."""
        ...

    def start_sums(self, a_SF: Rows, hidden: int, plan: ExpertPlan, training: bool) -> Any:
        """All rows of x have been read. Returns the `signal` of fc2 of a, which comes next: of own
        experts alone where there are replicas."""
        ...

    def finish_sums(self) -> Tensor:
        """Send what fc2 has made of own experts, and at the end of this overlap what it makes of
        replicas after that. Returns [N, D] that only that end may read."""
        ...

    def send_gradient(
        self, dx_SD: Tensor | None, dprob_NK: Tensor | None, plan: ExpertPlan
    ) -> Tensor | None:
        """Send gradients of expert rows, to be summed, and of probabilities, before those of the
        weights are computed. Returns [N, D] that only the end of this overlap may read."""
        ...

    def tokens(self) -> Rows:
        """x in the backward pass, at its first use there."""
        ...

    def tokens_first(self) -> Rows:
        """The same before anything else is done there; the gradient of out has come too then."""
        ...


@dataclass
class Arrived:
    """Rows that have come in FP8, beside tensors of their shape without data for autograd."""

    tokens: Quantized | None = None
    """x."""
    gradient: Quantized | None = None
    """The gradient of out, in the backward pass."""


class ExpertMLP(torch.autograd.Function):
    """out of x, weights, biases, probabilities and addends.

    With `overlap`, out is on its way when it is returned, x is not saved but asked for again, and
    the gradient of the probabilities leaves with that of x: none is returned, so give None for
    them and leave them in the plan.
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
        how: "How",
        *addends: Tensor,
    ) -> Tensor:
        weights, overlap, replicas = MLPWeights(w1, w2, b1, b2), how.overlap, None
        ctx.how, ctx.saved_replicas = how, None
        if how.replicas is not None:
            rows = None if overlap is None else overlap.wait_rows
            replicas = borrow_weights(how.replicas, weights, None, rows, "fc1")
            ctx.saved_replicas = replicas.weights if how.replicas.keep else None
        out, h, x_rows = run_forward(x, weights, plan, how, addends, replicas)
        if how.spec.recompute_h:
            h = x.new_empty(0)
        elif how.made_h is not None:
            how.made_h(*tensors_of(h))
        # The parameters themselves: saved tensors may come back as others, without a buffer.
        ctx.accumulated = [
            p if how.spec.accumulate and main_grad.takes(p) else None for p in weights
        ]
        kept = tensors_of(h), tensors_of(x_rows) if overlap is None else ()
        ctx.counts = [len(tensors) for tensors in kept]
        if overlap is None:
            ctx.save_for_backward(w1, w2, b1, b2, *kept[0], *kept[1], *plan._replace(needed=None))
        else:
            ctx.save_for_backward(w1, w2, b1, b2, *kept[0])
            ctx.plan = plan
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # gradients that nobody could differentiate would look like 0
            raise RuntimeError("the expert MLP has first gradients only: leave out create_graph")
        needs = ctx.needs_input_grad
        addends = [dout if need else None for need in needs[8:]]
        if not any(needs[:6]):  # h was not kept
            return *[None] * 8, *addends
        w1, w2, b1, b2, *rest = ctx.saved_tensors
        of_h, of_x = ctx.counts
        h, after = rows_of(rest[:of_h]), rest[of_h:]
        x = rows_of(after[:of_x]) if of_x else None
        plan = ExpertPlan(*after[of_x:]) if of_x else ctx.plan
        buffers = [p if p is None else main_grad.buffer(p) for p in ctx.accumulated]
        how, weights, replicas = ctx.how, MLPWeights(w1, w2, b1, b2), None
        if how.replicas is not None:
            arriving = how.overlap is not None and not how.spec.recompute_h
            first: Layer = "fc1" if how.spec.recompute_h else "fc2"
            rows = how.overlap.wait_rows if arriving else None
            replicas = borrow_weights(how.replicas, weights, ctx.saved_replicas, rows, first)
        given = Saved(x, weights, h, plan, how, replicas)
        out_grad = dout.contiguous() if how.arrived is None else how.arrived.gradient
        dx, *grads, dprob = run_backward(out_grad, given, needs[:5], buffers)
        for i, p in enumerate(ctx.accumulated):
            grads[i] = grads[i] if p is None else main_grad.added(p)
        made = zip([dx, *grads, dprob], needs, strict=False)
        return *(g if need else None for g, need in made), None, None, *addends


class How(NamedTuple):
    """Arguments of `ExpertMLP` that say how."""

    spec: MLPSpec
    keep_h: bool
    """There is going to be a backward pass."""
    overlap: Overlap | None = None
    arrived: Arrived | None = None
    """What to read in place of x and of the gradient of out; None: these."""
    made_h: Callable[..., None] | None = None
    """Is called with what is saved of h."""
    replicas: ReplicaExchange | None = None
    """Whose experts have places behind the own ones in the plan; None: there are no such places."""


class Saved(NamedTuple):
    """What the backward pass starts from."""

    x_ND: Rows | None
    """None: `how.overlap` has it."""
    weights: MLPWeights
    h_SH: Rows
    """Empty with `how.spec.recompute_h`."""
    plan: ExpertPlan
    how: How
    replicas: BorrowedWeights | None = None
    """Of this pass."""


def run_forward(
    x: Tensor,
    weights: MLPWeights,
    plan: ExpertPlan,
    how: How,
    addends: Sequence[Tensor] = (),
    replicas: BorrowedWeights | None = None,
) -> tuple[Tensor, Rows, Rows]:
    """(out, h, x as it is to be saved); h is empty without `keep_h`."""
    spec, overlap = how.spec, how.overlap
    ops, act = backend_of(spec, "forward"), spec.activation
    fc1, fc2 = _layers(weights, spec, replicas)
    ready = None if overlap is None else overlap.ready
    given: Rows = x if how.arrived is None else how.arrived.tokens
    x_rows = ops.quantize(given)
    h_SH, a_SF = ops.fc1_act(x_rows, fc1, plan, act, keep_h=how.keep_h, ready=ready)
    if h_SH is None or not how.keep_h:
        h_SH = x.new_empty(0)
    x_rows = for_wgrad(given, x_rows, spec)
    if overlap is not None:
        signal = overlap.start_sums(a_SF, weights.w2.shape[-2], plan, how.keep_h)
        sums = functools.cache(overlap.finish_sums)  # of own experts, before it is replicas' turn
        ops.rows(a_SF, fc2.after(sums), plan, signal=signal)
        return sums(), h_SH, x_rows
    y_SD = ops.rows(a_SF, fc2, plan)
    if plan.inverse_NK is None:
        return y_SD, h_SH, x_rows
    del a_SF
    return ops.combine(y_SD, plan.inverse_NK, addends), h_SH, x_rows


@torch.no_grad()
def run_backward(
    dout: Rows, saved: Saved, needs: Sequence[bool], buffers: Sequence[Buffer | None]
) -> Sequence[Tensor | None]:
    """Gradients of x, w1, w2, b1, b2 and the probabilities.

    Args:
        dout: of out, contiguous, or in FP8.
        saved: of the forward pass.
        needs: which of the first five are wanted.
        buffers: where those of w1, w2, b1 and b2 go; None: to new tensors.

    The data gradient comes first, so that it can be sent under the others.
    """
    x_ND, weights, h_SH, plan, how, replicas = saved
    spec, act, overlap = how.spec, how.spec.activation, how.overlap
    ops = backend_of(spec, "dgrad")
    fc1, fc2 = _layers(weights, spec, replicas)
    need_x, need_w1, need_w2, need_b1, need_b2 = needs
    if spec.recompute_h:
        x_ND, h_SH = _hidden(saved, fc1)
    dy = Operand(dout, gather=plan.inverse_NK is not None, gradient=True)
    if dy.gather and not ops.gathers and plan.row_index_S is not None:
        dy = Operand(gather_rows(dout, plan.row_index_S, plan.offsets), gradient=True)
    ready = None if overlap is None or spec.recompute_h else overlap.ready
    dy_rows = dy._replace(matrix=ops.quantize(dy.matrix, gradient=True))
    made = ops.fc2_dgrad_dact(dy_rows, fc2, h_SH, plan, act, ready=ready)
    dh_SH, dprob_S, db1 = made.dh_SH, made.dprob_S, made.db1_LH
    dh = dh_SH if made.dh_columns is None else made.dh_columns
    dy = dy._replace(matrix=for_wgrad(dy.matrix, dy_rows.matrix, spec))
    x_gathers = plan.row_index_S is not None
    of_w2 = [dy, Operand(made.a_SF)] if need_w2 else []
    of_w1 = [Operand(dh, parts=fc1.parts, gradient=True)] if need_w1 else []
    of_w1 += [Operand(x_ND, gather=x_gathers)] if need_w1 and x_ND is not None else []
    operands = [*of_w2, *of_w1]
    del made, dy_rows, dh, of_w2, of_w1
    rows = dh_SH if need_x else None
    if overlap is None:
        dx, operands = ops.rows_and_columns(rows, fc1.transposed, plan, operands)
        if dx is not None and plan.inverse_NK is not None:
            dx = ops.combine(dx, plan.inverse_NK)
    else:
        assert plan.inverse_NK is not None
        dx = None if rows is None else ops.rows(rows, fc1.transposed, plan)
        dprob_NK = None if dprob_S is None else ops.plan_backward(dprob_S, plan.inverse_NK)
        dx = overlap.send_gradient(dx, dprob_NK, plan)
    work = WeightGrads(
        backend_of(spec, "wgrad"),
        plan,
        needs[1:],
        of_w1=operands[2 * need_w2 :],
        of_w2=operands[: 2 * need_w2],
        of_b1=Operand(dh_SH, parts=fc1.parts) if need_b1 else None,
        of_b2=dy if need_b2 else None,
        db1_LH=db1,
        tokens=None if overlap is None or x_ND is not None else overlap.tokens,
    )
    del dout, dy, operands  # the largest buffers of the backward after dh: `work` lets go of them
    if how.replicas is None or not any(needs[1:]):
        grads = work.all(buffers)
    else:
        grads = shared_grads(work, how.replicas, weights, buffers)
    dtype = weights.w1.dtype
    own = [_like(grad, dtype, buffer) for grad, buffer in zip(grads, buffers, strict=True)]
    return dx, *own, dprob_S


def _hidden(saved: Saved, fc1: Linear) -> tuple[Rows, Rows]:
    """x, and h from it by the bits of the forward pass."""
    x_ND, spec, overlap = saved.x_ND, saved.how.spec, saved.how.overlap
    if x_ND is None:
        assert overlap is not None
        x_ND = overlap.tokens_first()
    ops = backend_of(spec, "forward")
    h_SH, _ = ops.fc1_act(ops.quantize(x_ND), fc1, saved.plan, spec.activation, keep_h=True)
    assert h_SH is not None
    return x_ND, h_SH


def _layers(
    own: MLPWeights, spec: MLPSpec, replicas: BorrowedWeights | None
) -> tuple[Linear, Linear]:
    """Fc1 and fc2."""
    w1, w2, b1, b2 = own
    parts = spec.activation.facts.halves
    fc1, fc2 = Linear(w1, b1, parts, source=w1), Linear(w2, b2, source=w2)
    if replicas is None:
        return fc1, fc2
    w1, w2, b1, b2 = replicas.weights
    of_fc1, of_fc2 = Linear(w1, b1, parts), Linear(w2, b2)
    first, second = (functools.partial(replicas.arrive, layer) for layer in LAYERS)
    return fc1.before(of_fc1, first), fc2.before(of_fc2, second)


def for_wgrad(given: Any, rows: Any, spec: MLPSpec) -> Any:
    """Which of a matrix, as it was given and as the other GEMMs take it, weight gradients read."""
    return given if spec.recipe is not None and spec.recipe.wgrad == "bf16" else rows


def saved_input(given: Any, rows: Any, spec: MLPSpec) -> Any:
    """What a dense layer saves of its input, as it was given and as its GEMM took it."""
    return given if spec.save_given else for_wgrad(given, rows, spec)


def input_for_wgrad(saved: Rows, ops: Backend, spec: MLPSpec) -> Rows:
    """What weight gradients read of it."""
    again = spec.save_given and spec.recipe is not None and spec.recipe.wgrad == "fp8"
    return ops.quantize(saved) if again else saved


def _like(grad: Tensor | None, dtype: torch.dtype, buffer: Buffer | None) -> Tensor | None:
    """A gradient in the dtype of the weights, unless it is in a buffer, where nobody reads it."""
    return grad if grad is None or buffer is not None else grad.to(dtype)
