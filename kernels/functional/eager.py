"""The experts in eager mode, with little time of the host.

One autograd function makes the plan and runs the layer, forward and backward from tapes of its
launches (`kernels.tape`). Values are those of the custom ops, whose computations it calls.
torch.compile, captures and modes of torch have the ops themselves.

Legend: N tokens or rows, K experts per token, S expert rows, D hidden.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from phalanx.configs.tables.backends import EXPERT_BACKENDS
from phalanx.kernels.expert_mlp.expert_plan import is_debugging
from phalanx.kernels.expert_mlp.mlp_spec import MLPWeights
from phalanx.kernels.functional import custom_ops
from phalanx.kernels.routing import plan as planning
from phalanx.kernels.tape import Tapes

_PLAIN = (Tensor, nn.Parameter)


class Sizes(NamedTuple):
    """Sizes of the plan of tokens."""

    experts: int
    rows: int
    backend: str


def takes(backend: str, x: Tensor, *others: Tensor | None) -> bool:
    """True for calls whose launches may be recorded: of plain CUDA tensors, in eager mode.

    `others` are to be contiguous.
    """
    if not x.is_cuda or not _is_plain_call(backend, x):
        return False
    for tensor in others:
        if tensor is not None and not (type(tensor) in _PLAIN and tensor.is_contiguous()):
            return False
    return type(x) in _PLAIN and x.numel() > 0


def _is_plain_call(backend: str, x: Tensor) -> bool:
    return (
        EXPERT_BACKENDS[backend].records
        and not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._len_torch_function_stack()
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
        and x.get_device() == torch._C._cuda_getDevice()
        and not torch.cuda.is_current_stream_capturing()
        and not is_debugging()
    )


def run(
    x_ND: Tensor,
    weights: MLPWeights,
    ids: Tensor,
    prob: Tensor | None,
    spec: str,
    sizes: Sizes | None,
) -> Tensor:
    """The layer's output [N, D].

    Args:
        ids: int32 experts [N, K] of tokens; without `sizes` offsets [L + 1] of sorted rows.
        prob: fp32, [N, K] or [S].
        spec: of `custom_ops.encode`.
        sizes: None for rows that are sorted.
    """
    prob = None if prob is None else prob.contiguous()
    tensors = (x_ND.contiguous(), *weights, ids.contiguous(), prob)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        out: Tensor = _Experts.apply(spec, sizes, *tensors)
    else:
        out = _FORWARD(tensors, spec=spec, sizes=sizes, keep_h=False)[0]
    return out


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, spec: str, sizes: Sizes | None, *tensors: Tensor | None) -> Tensor:
        out, *saved = _FORWARD(tensors, spec=spec, sizes=sizes, keep_h=True)
        x, w1, w2, _, b2 = tensors[:5]
        ctx.save_for_backward(x, w1, w2, b2, *saved)
        ctx.set_materialize_grads(False)
        ctx.spec, ctx.sizes = spec, sizes
        result: Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None) -> tuple[Any, ...]:
        needs = ctx.needs_input_grad[2:]
        if dout is None:
            return (None,) * len(ctx.needs_input_grad)
        given = (dout.contiguous(), *ctx.saved_tensors)
        wanted = *needs[:5], needs[6]
        backend = custom_ops.decode(ctx.spec)[0].backend
        if torch.is_grad_enabled() or not _is_plain_call(backend, dout):
            grads = _composed(*given, spec=ctx.spec, sizes=ctx.sizes, needs=wanted)
        else:
            grads = _BACKWARD(given, spec=ctx.spec, sizes=ctx.sizes, needs=wanted)
        *most, dprob = grads
        return None, None, *most, None, dprob


def _forward(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    b1: Tensor | None,
    b2: Tensor | None,
    ids: Tensor,
    prob: Tensor | None,
    *,
    spec: str,
    sizes: Sizes | None,
    keep_h: bool,
) -> Sequence[Any]:
    """out, h, index, probabilities, offsets, inverse and order of the rows."""
    index = inverse = order = None
    offsets, prob_S = ids, prob
    if sizes is not None:
        assert prob is not None
        made = planning.plan.compute(ids, prob, 0, *sizes)
        prob_S, index, offsets, inverse, _, order = made
        order = order if order.numel() else None
    plan = index, prob_S, offsets, inverse, order
    out, h = custom_ops.grouped_mlp.compute(x, w1, w2, b1, b2, *plan, spec, keep_h)
    return out, h, *plan


def _gradients(
    of_mlp: Callable[..., Any],
    of_pairs: Callable[..., Any],
    dout: Tensor,
    *saved: Tensor | None,
    spec: str,
    sizes: Sizes | None,
    needs: tuple[bool, ...],
) -> Sequence[Tensor | None]:
    """Gradients of x, w1, w2, b1, b2 and the probabilities, by those of the layer and the plan."""
    *grads, dprob = of_mlp(dout, *saved, spec, list(needs[:5]))
    found = [g if need else None for g, need in zip(grads, needs, strict=False)]
    if sizes is not None and needs[5]:
        dprob = of_pairs(dprob, saved[-2], sizes.backend)
    return *found, dprob if needs[5] else None


_FORWARD = Tapes(_forward)
_BACKWARD = Tapes(
    partial(_gradients, custom_ops.grouped_mlp_backward.compute, planning.plan_backward.compute)
)
# The same by custom ops, whose own derivatives are refused by name.
_composed = partial(_gradients, custom_ops.differentiate, planning.gradients_of_pairs)
