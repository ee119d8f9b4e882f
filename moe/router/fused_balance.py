"""Counts, statistics and balancing losses of a router by a few kernels, on a GPU.

The formulas and counts of `moe.router.balance`, by the kernels of `kernels.routing.balance_triton`
in place of thirty launches.

Legend: T tokens of this rank, B sequences, E experts, K experts per token.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.configs.schema import RouterConfig
from phalanx.moe.router.balance import Statistics


@dataclass(frozen=True)
class Recorder:
    """Counts and losses of one router, with the buffers of its counts."""

    options: RouterConfig
    statistics: Statistics
    local_tokens_E: Tensor | None  # choices since the last update of the expert bias, int64
    global_tokens_E: Tensor | None
    """Choices of all replicas in this global batch, int64, for `global_aux_loss`."""
    replica: dist.ProcessGroup  # group of ranks that share sequences
    world: dist.ProcessGroup  # group of all replicas
    per_token: bool  # the schedule divides gradients by tokens

    @property
    def balances(self) -> bool:
        """True if there is a loss of counts and scores."""
        o = self.options
        return bool(o.aux_loss or o.seq_aux_loss or o.global_aux_loss)

    def __call__(
        self, logits_TE: Tensor, idx_TK: Tensor, judged_TK: Tensor | None, sequences: int
    ) -> Tensor | None:
        """Count choices and return the weighted sum of the balancing losses [1], if there are any.

        Args:
            logits_TE: fp32, on a GPU.
            idx_TK: choices.
            judged_TK: choices that the losses are computed of, if others.
            sequences: number of sequences, B.
        """
        logits_TE = logits_TE.contiguous()
        if not (self.balances or self.options.z_loss):
            self.finish(logits_TE.detach(), idx_TK, None, 1)
            return None
        sequences = sequences if self.options.seq_aux_loss else 1
        return _Losses.apply(logits_TE, self, idx_TK, judged_TK, sequences)  # type: ignore[no-any-return]

    def finish(
        self, logits_TE: Tensor, idx_TK: Tensor, judged_TK: Tensor | None, sequences: int
    ) -> tuple[Tensor, Tensor]:
        """Loss [1] and its slope [B, E]; see `kernels.routing.balance_triton.Terms.finish`."""
        from phalanx.kernels.routing.balance_triton import Counters, tally

        o, s = self.options, self.statistics
        counts = tally(
            logits_TE,
            idx_TK,
            sequences=sequences,
            score=o.score if self.balances else None,
            judged_TK=judged_TK if self.balances else None,
            log_sum=bool(o.z_loss),
        )
        judged_BE = counts.judged_BE
        if self.balances and self.replica.size() > 1:
            judged_BE = judged_BE.contiguous()
            dist.all_reduce(judged_BE, group=self.replica)
        if o.global_aux_loss:
            assert self.global_tokens_E is not None
            judged_E = counts.judged_BE.sum(0).long()
            if self.world.size() > 1:
                dist.all_reduce(judged_E, group=self.world)
            self.global_tokens_E.add_(judged_E)
        counters = Counters(s.tokens_per_expert, self.local_tokens_E, s.micro_batches, s.losses)
        seen_E = self.global_tokens_E if o.global_aux_loss else None
        return self.terms(len(logits_TE)).finish(counts, judged_BE, seen_E, counters)

    def terms(self, tokens: int) -> Any:
        """Coefficients of the losses for `tokens` tokens of this rank."""
        from phalanx.kernels.routing.balance_triton import Terms

        o, total = self.options, tokens * self.replica.size()
        coefficients = o.aux_loss, o.seq_aux_loss, o.global_aux_loss, o.z_loss
        return Terms(*coefficients, tokens=total, factor=total if self.per_token else 1.0)


class _Losses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, recorder: Recorder, *choices: Any) -> Tensor:
        loss, slope_BE = recorder.finish(logits_TE, *choices)
        ctx.save_for_backward(logits_TE, slope_BE if recorder.balances else None)
        ctx.recorder = recorder
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        from phalanx.kernels.routing.balance_triton import slope_to_logits

        logits_TE, slope_BE = ctx.saved_tensors
        terms = ctx.recorder.terms(len(logits_TE))
        z_slope = 2 * terms.z * terms.factor / terms.tokens
        score = ctx.recorder.options.score
        dlogits_TE = slope_to_logits(dloss, logits_TE, slope_BE, score, z_slope)
        return dlogits_TE, None, None, None, None
