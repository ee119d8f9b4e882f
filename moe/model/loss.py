"""Cross entropy of the language model, with the vocabulary over the tensor-parallel ranks.

On GPUs the gradient takes the place of the logits, which nothing else reads. Where a step knows
what the gradient of each loss is going to be (`expect_grad`), Hopper GPUs write it forward, in the
pass that reads the logits for the loss (`kernels.sm90.loss`); otherwise it is written backward,
from logits that are read once more (`kernels.elementwise.cross_entropy`).

Legend: N tokens, V vocabulary of this rank.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


class ExpectedGrad(NamedTuple):
    """What gradients of losses are going to be."""

    gradient: Callable[[], Tensor]
    """Makes it, fp32, of one element, not 0: of every loss that is wanted at all."""
    labels: int
    """Address of the labels that the losses are of."""


_FORETOLD: ContextVar[ExpectedGrad | None] = ContextVar("foretold", default=None)


@contextlib.contextmanager
def expect_grad(gradient: Callable[[], Tensor], labels: Tensor) -> Iterator[None]:
    """Inside, losses of these labels are going to have this gradient, which is asked for where it
    is of use.

    Others are right too, to twice the rounding, but take a pass over the logits of their tokens.
    """
    token = _FORETOLD.set(ExpectedGrad(gradient, labels.data_ptr()))
    try:
        yield
    finally:
        _FORETOLD.reset(token)


def expected_grad(labels: Tensor) -> Tensor | None:
    """That of losses of these labels, fp32, of one element; None if it is not known."""
    told = _FORETOLD.get()
    return told.gradient() if told is not None and told.labels == labels.data_ptr() else None


class CrossEntropy(torch.autograd.Function):
    """-log softmax(logits)[target] for each token; logits are overwritten by the backward pass."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, target_N: Tensor, group: dist.ProcessGroup) -> Tensor:
        from phalanx.kernels.elementwise.cross_entropy import statistics

        first = dist.get_rank(group) * logits_NV.shape[1]
        most_N, total_N, hit_N = statistics(logits_NV, target_N, first)
        if dist.get_world_size(group) > 1:
            own_N = most_N.clone()
            dist.all_reduce(most_N, op=dist.ReduceOp.MAX, group=group)
            sums_2N = torch.stack((total_N * (own_N - most_N).exp(), hit_N))
            dist.all_reduce(sums_2N, group=group)
            total_N, hit_N = sums_2N.unbind()
        lse_N = most_N + total_N.log()
        ctx.first = first
        ctx.save_for_backward(logits_NV, target_N, lse_N)
        return lse_N - hit_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None, None]:
        from phalanx.kernels.elementwise.cross_entropy import gradient_

        logits_NV, target_N, lse_N = ctx.saved_tensors
        gradient_(logits_NV, target_N, lse_N, grad_N.float().contiguous(), ctx.first)
        return logits_NV, None, None


class OnePassCrossEntropy(torch.autograd.Function):
    """The same; logits are overwritten by their gradient at once."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, target_N: Tensor, gradient: Tensor) -> Tensor:
        from phalanx.kernels.sm90.loss.cross_entropy import cross_entropy_

        loss_N = cross_entropy_(logits_NV, target_N, gradient)
        ctx.save_for_backward(logits_NV, gradient)
        return loss_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None, None]:
        from phalanx.kernels.elementwise.cross_entropy import rescale_

        gradient_NV, gradient = ctx.saved_tensors
        rescale_(gradient_NV, grad_N.float().contiguous(), gradient)
        return gradient_NV, None, None


def cross_entropy(logits_SBV: Tensor, labels_BS: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Loss of each token, fp32 [B, S], as Megatron-Core's models return it.

    Args:
        logits_SBV: bf16 or fp32; overwritten, at the latest by the backward pass.
        labels_BS: int64.
        group: tensor-parallel, over which the vocabulary is split.
    """
    S, B, V = logits_SBV.shape
    target_N = labels_BS.t().reshape(-1)
    logits_NV = logits_SBV.contiguous().view(-1, V)
    gradient = expected_grad(labels_BS) if _in_one_pass(logits_NV, group) else None
    if gradient is not None:
        loss_N = OnePassCrossEntropy.apply(logits_NV, target_N, gradient)
    else:
        loss_N = CrossEntropy.apply(logits_NV, target_N, group)
    return loss_N.view(S, B).t().contiguous()


def _in_one_pass(logits_NV: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether this GPU's kernel makes their loss and gradient at once, which are wanted."""
    if not logits_NV.requires_grad or logits_NV.dtype != torch.bfloat16:
        return False
    if not logits_NV.is_cuda or torch.cuda.get_device_capability(logits_NV.device) != (9, 0):
        return False
    from phalanx.kernels.sm90.loss.cross_entropy import configured

    return dist.get_world_size(group) == 1 and configured(logits_NV.shape[1]) is not None
