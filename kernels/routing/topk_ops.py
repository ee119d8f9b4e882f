"""Ops."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.kernels.custom_op import custom_op
from phalanx.kernels.derivatives import first_order
from phalanx.kernels.sm90.jit.stand_ins import import_kernels


@custom_op("router_topk")
def router_topk(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    groups: Sequence[int],
    score: str,
    normalize: bool,
    softmax_over: str,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """(experts of each token [T, K] int32, weights [T, K] fp32) from contiguous logits [T, E].

    `groups`: how many groups of experts, and how many a token chooses from; `bias`: fp32 [E]; the
    options after them are a `Weighting`.
    """
    import_kernels()
    from phalanx.kernels.sm90.routing import topk as kernel

    number, chosen = groups
    return kernel.topk(
        logits,
        top_k=top_k,
        score=score,
        normalize=normalize,
        softmax_over=softmax_over,
        scale=scale,
        bias_E=bias,
        groups=(number, chosen),
    )


@router_topk.register_fake
def _(logits: Tensor, bias: Tensor | None, top_k: int, *rest: Any) -> tuple[Tensor, Tensor]:
    shape = logits.shape[0], top_k
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape, dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, ctx.weights = inputs[0], inputs[4:]
    ctx.save_for_backward(*output, logits)
    ctx.mark_non_differentiable(output[0])


def _backward(ctx: Any, _: None, dprob: Tensor) -> tuple[Any, ...]:
    dlogits = _differentiate(dprob.contiguous(), *ctx.saved_tensors, *ctx.weights)
    return dlogits, *(None,) * 7


differentiable_topk = first_order(router_topk, "router_topk", _backward, _save)


@custom_op("router_topk_backward")
def router_topk_backward(
    dprob: Tensor,
    idx: Tensor,
    prob: Tensor,
    logits: Tensor,
    score: str,
    normalize: bool,
    softmax_over: str,
    scale: float,
) -> Tensor:
    """Gradient of the logits, in their dtype; the choice has none."""
    from phalanx.kernels.sm90.routing import topk as kernel

    return kernel.topk_backward(
        dprob,
        idx,
        prob,
        logits,
        score=score,
        normalize=normalize,
        softmax_over=softmax_over,
        scale=scale,
    )


@router_topk_backward.register_fake
def _(dprob: Tensor, idx: Tensor, prob: Tensor, logits: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(logits)


_differentiate = first_order(router_topk_backward, "router_topk")
