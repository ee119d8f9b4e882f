"""The expert MLP as torch custom ops, for `GroupedMLP` under torch.compile.

They compute in the dtypes of their arguments, under autocast too, and save and recompute what
`kernels.expert_mlp.autograd` does. Weights, biases and their gradients have the layout that the
specification names; converted copies last as long as an op, and are not saved.

Shape legend as in `kernels.expert_mlp.backend`.
"""

import ast
import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from phalanx.kernels.custom_op import custom_op
from phalanx.kernels.derivatives import first_order
from phalanx.kernels.elementwise.rows import clear_padding
from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.autograd import (
    ExpertMLPArgs,
    Saved,
    backend_of,
    data_gradients,
    for_wgrad,
    run_forward,
)
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.mlp_spec import Margins, MLPSpec, MLPWeights
from phalanx.kernels.expert_mlp.pending_grads import weight_gradients
from phalanx.kernels.functional.layouts import in_kernel_layout, in_kernel_shapes, layout_named
from phalanx.kernels.quantize.recipe import Fp8Block, Microscaling

RECIPE_TYPES = (Fp8Block, Microscaling)
_FIELDS = {
    t: tuple(f.name for f in fields(t)) for t in (MLPSpec, Activation, Margins, *RECIPE_TYPES)
}
_BUILD: dict[str, Callable[..., Any]] = {"float": float.fromhex}
_BUILD |= {t.__name__: t for t in _FIELDS}


def constant(value: Any) -> Any:
    """An option, a specification or a size as torch.compile passes it to functions it runs.

    It is made of strings, integers, None and tuples, also with dynamic shapes.
    """
    if isinstance(value, float):
        return "float", value.hex()
    if isinstance(value, int) and not isinstance(value, bool):
        return operator.index(value)
    names = _FIELDS.get(type(value))
    if names is None:
        return value
    return (type(value).__name__, *[constant(getattr(value, name)) for name in names])


def decoded(constant: Any) -> Any:
    """The inverse of `constant`."""
    if not isinstance(constant, tuple):
        return constant
    kind, *values = constant
    return _BUILD[kind](*map(decoded, values))


def encode(spec: MLPSpec, layout: str = "halves") -> str:
    """A specification, and a key of `LAYOUTS`, as custom ops take it; they ignore `accumulate`.

    ValueError for a recipe that saves the activation's input in FP8, of which ops have no outputs,
    or an order of channels that is the backend's own.
    """
    if spec.recipe is not None and spec.recipe.hidden != "bf16":
        raise ValueError(f"recipe: hidden={spec.recipe.hidden} is for layers of this project alone")
    if spec.channel_order is not None:
        raise ValueError("channel_order: another order is for layers of this project alone")
    return repr((constant(spec), layout))


@functools.cache
def decode(text: str) -> tuple[MLPSpec, str]:
    """The specification and the layout that `encode` was given."""
    spec, layout = ast.literal_eval(text)
    return decoded(spec), layout


@custom_op("grouped_mlp")
def grouped_mlp(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    b1: Tensor | None,
    b2: Tensor | None,
    index: Tensor | None,
    prob: Tensor | None,
    offsets: Tensor,
    inverse: Tensor | None,
    order: Tensor | None,
    spec: str,
    keep_h: bool,
) -> tuple[Tensor, Tensor]:
    """(out, h); h is empty without `keep_h`, of which there is no gradient.

    Without `inverse` rows of out and of x's gradient that no expert has are 0.
    """
    decoded_spec, layout = decode(spec)
    args = ExpertMLPArgs(decoded_spec, keep_h)
    plan = ExpertPlan(index, prob, offsets, inverse, None, order)
    with torch.autocast(x.device.type, enabled=False):
        weights = in_kernel_layout(MLPWeights(w1, w2, b1, b2), layout)
        out, h, _ = run_forward(x, weights, plan, args)
        if inverse is None:
            clear_padding(out, offsets)
    return out, h


@grouped_mlp.register_fake
def _(x: Tensor, w1: Tensor, w2: Tensor, *rest: Any) -> Any:
    index, spec, keep_h = rest[2], rest[-2], rest[-1]
    layout = decode(spec)[1]
    w1, w2, _, _ = in_kernel_shapes(MLPWeights(w1, w2, None, None), layout)
    S, F = x.shape[0] if index is None else index.shape[0], w2.shape[-1]
    H = w1.shape[-2] // F * (layout_named(layout).padded or F)
    h_shape = (S, H) if keep_h else 0
    return x.new_empty(x.shape[0], w2.shape[-2]), x.new_empty(h_shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, w1, w2, _, b2, *plan = inputs[:10]
    ctx.save_for_backward(x, w1, w2, b2, output[1], *plan)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.spec = inputs[10]


def _backward(ctx: Any, dout: Tensor | None, _: None) -> tuple[Any, ...]:
    inputs = len(ctx.needs_input_grad)
    if dout is None:
        return (None,) * inputs
    needs = ctx.needs_input_grad[:5]
    *grads, dprob = differentiate(dout.contiguous(), *ctx.saved_tensors, ctx.spec, list(needs))
    grads = [g if need else None for g, need in zip(grads, needs, strict=True)]
    dprob = dprob if ctx.needs_input_grad[6] else None
    return *grads, None, dprob, *(None,) * (inputs - 7)


grouped_experts = first_order(grouped_mlp, "the expert MLP", _backward, _save)


@custom_op("grouped_mlp_backward")
def grouped_mlp_backward(
    dout: Tensor,
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    b2: Tensor | None,
    h: Tensor,
    index: Tensor | None,
    prob: Tensor | None,
    offsets: Tensor,
    inverse: Tensor | None,
    order: Tensor | None,
    spec: str,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, w1, w2, b1, b2 and prob; empty where `needs` (of the first five) says no."""
    decoded_spec, layout = decode(spec)
    args = ExpertMLPArgs(decoded_spec, keep_h=True)
    plan = ExpertPlan(index, prob, offsets, inverse, None, order)
    with torch.autocast(x.device.type, enabled=False):
        quantized = backend_of(args.spec, "forward").quantize(x)
        saved_x = for_wgrad(x, quantized, args.spec)
        weights = in_kernel_layout(MLPWeights(w1, w2, None, b2), layout)
        saved = Saved(saved_x, weights, h, plan, args)
        dx, dprob, work = data_gradients(dout, saved, needs)
        dw1, dw2, db1, db2 = weight_gradients(work, saved.weights, args.experts, [None] * 4)
        if inverse is None and dx is not None:
            clear_padding(dx, offsets)
    stored = layout_named(layout)
    dw1, db1 = (None if g is None else stored.from_kernels(g, fc1=True) for g in (dw1, db1))
    dw2, db2 = (None if g is None else stored.from_kernels(g, fc1=False) for g in (dw2, db2))
    grads = (dx, dw1, dw2, db1, db2, dprob)
    dx, dw1, dw2, db1, db2, dprob = (x.new_empty(0) if g is None else g for g in grads)
    return dx, dw1, dw2, db1, db2, dprob


@grouped_mlp_backward.register_fake
def _(dout: Tensor, x: Tensor, w1: Tensor, w2: Tensor, *rest: Any) -> Any:
    prob, spec, needs = rest[3], rest[-2], rest[-1]
    shaped = in_kernel_shapes(MLPWeights(w1, w2, None, None), decode(spec)[1])
    shapes = [x.shape, w1.shape, w2.shape, shaped.w1.shape[:-1], shaped.w2.shape[:-1]]
    grads = [x.new_empty(shape if need else 0) for shape, need in zip(shapes, needs, strict=True)]
    return *grads, x.new_empty(0) if prob is None else prob.new_empty(prob.shape)


differentiate = first_order(grouped_mlp_backward, "the expert MLP")
