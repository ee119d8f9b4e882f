"""Clones of hot experts over `symm`, as `parallel.dispatch.clones` asks for them.

Routing travels first, then tokens to the ranks of their places, and weights to guest slots under
the work of own experts. Sums come back as without clones; rows of a token that clones have parted
from each other come back by themselves and are added up where they arrive.

Legend: T tokens per rank, D hidden, K slots of a token, R ranks, N = R * T received rows, L own
experts, G guest slots.
"""

import functools

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.kernels.expert_mlp.mlp_spec import MLPWeights
from phalanx.parallel.dispatch import clone_memory
from phalanx.parallel.dispatch.cloned_transfers import ClonedTransfers, InOrder, Peers
from phalanx.parallel.dispatch.clones import Clones
from phalanx.parallel.dispatch.control import control_of
from phalanx.parallel.dispatch.exchange import SymmOptions, exchange_of
from phalanx.parallel.dispatch.fp8_rows import FP8Rows
from phalanx.parallel.dispatch.pushed_guests import Memory, PushedGuests
from phalanx.parallel.dispatch.received import Meanwhile, Planner, Received
from phalanx.parallel.dispatch.symm import Symm
from phalanx.parallel.dispatch.transfers import Dispatch, Receive, saving


class ClonedSymm(Symm):
    """The transport `symm` with clones.

    Args:
        group: expert-parallel, all on one node.
        plan: makes plans of received routing, of ids of places.
        clones: how many, and what they cost.
        local: L.
        options, waits: as of `Symm`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        plan: Planner,
        clones: Clones,
        *,
        local: int,
        options: SymmOptions,
        waits: bool = False,
    ) -> None:
        super().__init__(group, plan, local=local, options=options, waits=waits)
        self._clones = clones

    def dispatch(
        self,
        x_TD: Tensor,
        topk_idx_TK: Tensor,
        topk_prob_TK: Tensor,
        meanwhile: Meanwhile = None,
        fp8: FP8Rows | None = None,
    ) -> Received:
        assert fp8 is None, "rows of clones travel as they are"
        self._plan.check(x_TD, topk_idx_TK, topk_prob_TK)
        (T, D), K = x_TD.shape, topk_idx_TK.shape[1]
        exchange = exchange_of(self._group, T, D, K, self._options)
        control = control_of(self._group, T, D, K, self._options)
        singles = clone_memory.single_rows_of(self._group, T, D, K)
        call = ClonedTransfers(
            exchange,
            Peers(control, singles, self._group),
            topk_idx_TK.contiguous(),
            self._local,
            self._clones,
            self._plan,
            overlaps=exchange.overlaps and self._waits,
            keep=self._options.keep,
        )
        pushed_ND = Dispatch.apply(x_TD, topk_prob_TK, call)
        if meanwhile is not None:
            meanwhile()
        rows_ND, place_NK, prob_NK = Receive.apply(pushed_ND, call)
        plan = self._plan(place_NK, prob_NK)
        call.planned(plan)
        keep = self._clones.keep and torch.is_grad_enabled()
        guests = PushedGuests(call, self._memory, keep=keep)
        received = Received(rows_ND, plan, route=call, guests=guests, clones=call.clones)
        if call.overlaps:
            return received._replace(overlap=call)
        rows_SD = InOrder.apply(rows_ND, call)
        in_order = plan._replace(row_index_S=None, inverse_NK=None)
        hooks = functools.partial(saving, rows_SD.detach(), call)
        return received._replace(rows_ND=rows_SD, plan=in_order, saving=hooks)

    def _memory(self, own: MLPWeights) -> Memory:
        """Of guests of such weights."""
        sms = self._options.comm_sms
        return clone_memory.guest_memory_of(self._group, self._clones.slots, own, sms)
