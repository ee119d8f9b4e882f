"""Losses of the language model: cross entropy over tensor parallel ranks, tokens further ahead.

On GPUs the gradient overwrites the logits. If a step knows the gradient of each loss in advance
(`LossContext`), Hopper GPUs write it in the forward pass, while they read the logits for the loss
(`kernels.sm90.loss`); otherwise the backward pass reads the logits once more
(`kernels.elementwise.cross_entropy`).

The loss of a token ahead (multi-token prediction) is the mean over the labels that count. This
replaces Megatron-Core's `process_mtp_loss`, which divides by the labels of a micro-batch of a rank,
so that few labels weigh as much as many, and counts correct predictions by a pass over all logits.

Legend: N tokens, V vocabulary of this rank, B sequences, S tokens of each on this rank, K tokens
ahead.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, roll_tensor
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass
class LossContext:
    """Facts on the losses of one call of a model with labels, and results of that call."""

    expected_grad: Callable[[], Tensor] | None = None
    """Function that returns the gradient of every next-token loss that counts: fp32, one element,
    not 0. It is called only if it is used. Losses with other gradients are right too, to twice the
    rounding, but cost a pass over the logits of their tokens."""
    labels_ahead_K: Tensor | None = None
    """Divisors of the losses of each token ahead; None: labels of the call."""
    losses_ahead: list[Tensor] = field(default_factory=list)
    """Added by the call if it has `labels_ahead_K`."""


class CrossEntropy(torch.autograd.Function):
    """-log softmax(logits)[target] for each token; logits are overwritten by the backward pass."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, target_N: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Loss of each token, fp32 [N]; the group splits the vocabulary."""
        from phalanx.kernels.elementwise.cross_entropy import statistics

        first = dist.get_rank(group) * logits_NV.shape[1]
        most_N, total_N, hit_N = statistics(logits_NV, target_N, first)
        if dist.get_world_size(group) > 1:
            local_max_N = most_N.clone()
            dist.all_reduce(most_N, op=dist.ReduceOp.MAX, group=group)
            sums_2N = torch.stack((total_N * (local_max_N - most_N).exp(), hit_N))
            dist.all_reduce(sums_2N, group=group)
            total_N, hit_N = sums_2N.unbind()
        lse_N = most_N + total_N.log()
        ctx.first = first
        ctx.save_for_backward(logits_NV, target_N, lse_N)
        return lse_N - hit_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None, None]:
        """Gradient of the logits, in their memory."""
        from phalanx.kernels.elementwise.cross_entropy import gradient_

        logits_NV, target_N, lse_N = ctx.saved_tensors
        gradient_(logits_NV, target_N, lse_N, grad_N.float().contiguous(), ctx.first)
        return logits_NV, None, None


class OnePassCrossEntropy(torch.autograd.Function):
    """-log softmax(logits)[target]; the forward pass overwrites logits by their gradient."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, target_N: Tensor, gradient: Tensor) -> Tensor:
        """Loss of each token, fp32 [N], whose gradient is expected to be `gradient`."""
        from phalanx.kernels.sm90.loss.cross_entropy import cross_entropy_

        loss_N = cross_entropy_(logits_NV, target_N, gradient)
        ctx.save_for_backward(logits_NV, gradient)
        return loss_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None, None]:
        """Gradient of the logits, rescaled where `grad_N` is not the expected one."""
        from phalanx.kernels.elementwise.cross_entropy import rescale_

        gradient_NV, gradient = ctx.saved_tensors
        rescale_(gradient_NV, grad_N.float().contiguous(), gradient)
        return gradient_NV, None, None


def cross_entropy(
    logits_SBV: Tensor,
    labels_BS: Tensor,
    group: dist.ProcessGroup,
    expected_grad: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Loss of each token, fp32 [B, S], as Megatron-Core's models return it.

    The logits, bf16 or fp32, are overwritten, at the latest by the backward pass; labels are int64;
    the vocabulary is split over the tensor parallel `group`.
    """
    S, B, V = logits_SBV.shape
    target_N = labels_BS.t().reshape(-1)
    logits_NV = logits_SBV.contiguous().view(-1, V)
    if expected_grad is not None and _in_one_pass(logits_NV, group):
        loss_N = OnePassCrossEntropy.apply(logits_NV, target_N, expected_grad())
    else:
        loss_N = CrossEntropy.apply(logits_NV, target_N, group)
    return loss_N.view(S, B).t().contiguous()


def _in_one_pass(logits_NV: Tensor, group: dist.ProcessGroup) -> bool:
    """True if this GPU has a kernel for loss and gradient in one pass, and a gradient is needed."""
    if not logits_NV.requires_grad or logits_NV.dtype != torch.bfloat16:
        return False
    if not logits_NV.is_cuda or torch.cuda.get_device_capability(logits_NV.device) != (9, 0):
        return False
    from phalanx.kernels.sm90.loss.cross_entropy import configured

    return dist.get_world_size(group) == 1 and configured(logits_NV.shape[1]) is not None


Shift = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Shift of [B, S] by one token within sequences and documents; with it, the sum of the result."""


def keep_predictions(hidden_states: Tensor, **_: Any) -> Tensor:
    """Hidden states as they are, for `process_mtp_loss`: the model adds the losses itself."""
    return hidden_states


def token_shift(cp_group: Any, packed_seq_params: Any) -> Shift:
    """Megatron-Core's shift of tokens, labels and masks for one call of a model."""
    return lambda x: roll_tensor(x, cp_group=cp_group, packed_seq_params=packed_seq_params)


def add_losses_ahead(
    hidden_states: list[Tensor],
    labels: Tensor,
    loss_mask: Tensor | None,
    context: LossContext,
    *,
    token_loss: Callable[[Tensor, Tensor], Tensor],
    shift: Shift,
    config: Any,
) -> Tensor:
    """Hidden states that predict the next token; their gradient includes that of the losses ahead.

    Args:
        hidden_states: [S, B, D] each, which predict the next token and each token ahead.
        labels: [B, S], of the next token.
        loss_mask: bool [B, S]: labels that count; None counts all.
        context: receives the losses ahead.
        token_loss: losses [B, S] from hidden states and labels.
        config: TransformerConfig with the factor of the losses.
    """
    next_SBD, *ahead = hidden_states
    mask = torch.ones_like(labels, dtype=torch.bool) if loss_mask is None else loss_mask
    for k, hidden_SBD in enumerate(ahead):
        labels, _ = shift(labels)
        mask, number = shift(mask)
        if context.labels_ahead_K is None:
            number = number.clamp(min=1)
        else:
            number = context.labels_ahead_K[k]
        loss_BS = mask * token_loss(hidden_SBD, labels)
        if context.labels_ahead_K is not None:
            context.losses_ahead.append(loss_BS.detach().sum() / number)
        scale = config.mtp_loss_scaling_factor / config.mtp_num_layers
        next_SBD = MTPLossAutoScaler.apply(next_SBD, scale * loss_BS / number)
    return next_SBD
