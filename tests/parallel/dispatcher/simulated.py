"""All ranks of an expert-parallel group in one process: what every transport comes to.

For tests, and for whoever studies the transports. Tokens and
sums move as in `parallel.dispatcher.symm`: a token once to each rank that holds one of its experts,
a sum once back from each such rank. All of it is plain torch, whose autograd makes the way back of
gradients.

Legend: T tokens of the rank that has most, D hidden, K slots for experts of a token, R ranks,
N = R * T.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.parallel.dispatcher.base import BudgetPlanner, TokenChoices
from phalanx.parallel.dispatcher.capacity import Budget
from phalanx.parallel.dispatcher.transport_class import Received


class Route(NamedTuple):
    """Rows sent to a rank: the `route` of its `Received`."""

    wanted_N: Tensor
    """bool: rows that hold a token, and whose sums go back."""
    counts: tuple[int, ...]
    """Tokens of each rank."""


class Simulated:
    """`Dispatcher` with a list over the ranks in place of every tensor.

    Args:
        ranks: R.
        experts, slots, budget, backend: as `make_dispatcher` takes them; all ranks share the
            budget.
        canary: what received rows hold that nobody sent. No result may depend on it.

    Raises:
        ValueError: experts that do not divide over the ranks.
    """

    def __init__(
        self,
        ranks: int,
        *,
        experts: int,
        slots: TokenChoices,
        budget: Budget,
        backend: str = "torch",
        canary: float = 0.0,
    ) -> None:
        if ranks < 1 or experts % ranks:
            raise ValueError(
                f"{experts} experts do not divide over {ranks} ranks: set ranks to a divisor"
            )
        self._ranks, self._local, self._canary = ranks, experts // ranks, canary
        self._planners = [
            BudgetPlanner(slots, budget, backend, ranks, rank * self._local, self._local)
            for rank in range(ranks)
        ]

    def dispatch(
        self,
        x_RTD: Sequence[Tensor],
        topk_idx_RTK: Sequence[Tensor],
        topk_prob_RTK: Sequence[Tensor],
    ) -> list[Received]:
        """Bring the tokens of all ranks to the experts of each.

        Ranks may have different numbers of tokens: those with fewer than T are filled up with
        tokens whose slots are all -1. Token t of rank r is row r * T + t of every rank that wants
        it; its gradients are added up over these in fp32 in their order, and rounded once.

        Args:
            x_RTD: tokens of each rank, bf16 or fp32.
            topk_idx_RTK: their experts, int32, -1 for an empty slot.
            topk_prob_RTK: their probabilities, fp32.

        Raises:
            ValueError: not one tensor for each rank, or shapes and dtypes that do not fit.
        """
        self._check(x_RTD, topk_idx_RTK, topk_prob_RTK)
        for planner, *given in zip(self._planners, x_RTD, topk_idx_RTK, topk_prob_RTK, strict=True):
            planner.check(*given)
        counts = tuple(len(x_TD) for x_TD in x_RTD)
        T = max(counts)
        idx_NK = torch.cat([_filled(idx_TK, T, -1) for idx_TK in topk_idx_RTK])
        x_RND = self._to_all([_filled(x_TD, T, 0) for x_TD in x_RTD])
        prob_RNK = self._to_all([_filled(prob_TK, T, 0) for prob_TK in topk_prob_RTK])
        received = []
        for rank, planner in enumerate(self._planners):
            wanted_N = (idx_NK // self._local == rank).any(1)  # floors: -1 is of no rank
            rows_ND = x_RND[rank].masked_fill(~wanted_N[:, None], self._canary)
            plan = planner(idx_NK, prob_RNK[rank])
            received.append(Received(rows_ND, plan, route=Route(wanted_N, counts)))
        return received

    def combine(self, out_RND: Sequence[Tensor], received: Sequence[Received]) -> list[Tensor]:
        """Bring the sums of each rank's experts back; rank by rank added in fp32, rounded once.

        Args:
            out_RND: of the experts of each rank.
            received: what they worked on.

        Returns:
            A rank's own tokens, without those that filled it up, in out's dtype; for each rank.

        Raises:
            ValueError: not one tensor for each rank.
        """
        self._check(out_RND, received)
        parts = [
            torch.where(at.route.wanted_N[:, None], out_ND.float(), 0.0)
            for out_ND, at in zip(out_RND, received, strict=True)
        ]
        total_ND = parts[0]
        for part_ND in parts[1:]:
            total_ND = total_ND + part_ND
        blocks_RTD = total_ND.to(out_RND[0].dtype).unflatten(0, (self._ranks, -1))
        counts = received[0].route.counts
        return [block[:count] for block, count in zip(blocks_RTD, counts, strict=True)]

    def _check(self, *lists: Sequence[object]) -> None:
        if any(len(given) != self._ranks for given in lists):
            lengths = ", ".join(str(len(given)) for given in lists)
            raise ValueError(f"lists of {lengths} for {self._ranks} ranks: give one item a rank")

    def _to_all(self, blocks: Sequence[Tensor]) -> list[Tensor]:
        """Rows of all ranks, rank-major, for each of them."""
        copies = [_copies(block, self._ranks) for block in blocks]
        return [torch.cat(of_rank) for of_rank in zip(*copies, strict=True)]


def _filled(rows: Tensor, T: int, value: int) -> Tensor:
    return torch.nn.functional.pad(rows, (0, 0, 0, T - len(rows)), value=value)


def _copies(x: Tensor, ranks: int) -> list[Tensor]:
    """x for each rank; gradients are added in the order of ranks in fp32 and rounded once.

    Autograd adds up the uses of a tensor as they come. In a chain of views each has two uses, one
    of which is the next view: the last one's gradient is the first to be complete, and is rank 0's.
    """
    chain, copies = x.float(), []
    for _ in range(ranks):
        copies.append(chain.to(x.dtype))
        chain = chain.view_as(chain)
    return copies[::-1]
