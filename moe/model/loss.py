"""Cross entropy of the language model, with the vocabulary over the tensor-parallel ranks.

On GPUs by the kernels of `kernels.elementwise.cross_entropy`: the gradient takes the place of the
logits, which nothing else reads.

Legend: N tokens, V vocabulary of this rank.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


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


def cross_entropy(logits_SBV: Tensor, labels_BS: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Loss of each token, fp32 [B, S], as Megatron-Core's models return it.

    Args:
        logits_SBV: bf16 or fp32; the backward pass overwrites them.
        labels_BS: int64.
        group: tensor-parallel, over which the vocabulary is split.
    """
    S, B, V = logits_SBV.shape
    target_N = labels_BS.t().reshape(-1)
    loss_N = CrossEntropy.apply(logits_SBV.contiguous().view(-1, V), target_N, group)
    return loss_N.view(S, B).t().contiguous()
