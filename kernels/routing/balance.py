"""Load balance of the experts in plain torch: counts of choices, and losses that even them out.

Legend: T tokens, B sequences, E experts, K experts per token.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def count_choices(idx_TK: Tensor, experts: int) -> Tensor:
    """Number of times that each expert was chosen: int64 [E], exact and deterministic."""
    idx = idx_TK.flatten().long()
    return idx.new_zeros(experts).scatter_add_(0, idx, torch.ones_like(idx))


def count_choices_per_sequence(idx_TK: Tensor, experts: int, sequences: int) -> Tensor:
    """`count_choices` of each sequence: int64 [B, E]. Token t belongs to sequence t % B."""
    sequence_T1 = torch.arange(idx_TK.size(0), device=idx_TK.device).remainder_(sequences)[:, None]
    return count_choices(idx_TK + sequence_T1 * experts, sequences * experts).view(sequences, -1)


def balance_loss(score_TE: Tensor, count_BE: Tensor, *, ranks: int) -> Tensor:
    """Switch load-balancing loss E * sum_i f_i P_i: 1 for uniform routing (arXiv 2101.03961).

    f_i is the fraction of all choices that went to expert i, P_i the mean score of expert i.

    Args:
        score_TE: scores of this rank's tokens, with gradient. Token t belongs to sequence t % B.
        count_BE: integer choices of each expert, by sequence, or [1, E] for all of them; summed
            over the `ranks` that share these tokens' sequences, or over more.

    Returns:
        This rank's share of the loss, averaged over the B sequences.
    """
    sequences, experts = count_BE.shape
    tokens = score_TE.size(0) // sequences * ranks
    score_BE = score_TE.view(-1, sequences, experts).sum(0) / tokens
    fraction_BE = count_BE.to(score_BE.dtype) / count_BE.sum(-1, keepdim=True)
    return experts * (score_BE * fraction_BE).sum(-1).mean()


def z_loss(logits_TE: Tensor) -> Tensor:
    """Mean squared log-partition of the router (ST-MoE, arXiv 2202.08906)."""
    return logits_TE.logsumexp(-1).square().mean()


class KeepsPrecision(torch.nn.Module):
    """A module whose direct buffers keep their dtype when the model is cast.

    Megatron-Core's Float16Module casts floating-point buffers to bf16, in which an expert bias near
    1 cannot change by a step of 0.001.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "KeepsPrecision":
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            cast_buffer = self._buffers[name]
            if cast_buffer is not None and cast_buffer.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(cast_buffer.device)
        return self
