"""Expert replication over `symm`; `extras.replication.options` has the contract.

Routing is sent first, then tokens to the ranks of their slots, and weights to replica slots under
the work of own experts. Sums come back as without replication; rows of a token that replicas
compute on several ranks come back one by one, and are added on arrival.

Legend: T tokens per rank, D hidden, K expert ids of a token, R ranks, N = R * T received rows, L
own experts, G replica slots.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from phalanx.extras.replication import memory
from phalanx.extras.replication.control import control_of
from phalanx.extras.replication.counts import ReplicaCounts
from phalanx.extras.replication.kernels.experts import ReplicatedExperts
from phalanx.extras.replication.kernels.rows import ExpertOwner
from phalanx.extras.replication.options import ReplicationOptions, plan_replicas
from phalanx.extras.replication.pushed_replicas import Memory, PushedReplicas
from phalanx.extras.replication.transfers import (
    InOrder,
    Peers,
    ReplicatedCall,
    ReplicatedRouting,
)
from phalanx.kernels.expert_mlp.mlp_spec import MLPWeights
from phalanx.parallel.dispatcher.fp8_rows import FP8Rows
from phalanx.parallel.dispatcher.overlap import ExpertOverlap
from phalanx.parallel.dispatcher.received import Received
from phalanx.parallel.dispatcher.symm import Symm
from phalanx.parallel.dispatcher.transfers import Receive, saving, sent_routing
from phalanx.parallel.dispatcher.transport_class import DispatchContext


class ReplicatedSymm(Symm):
    """The transport `symm` with expert replication.

    Args:
        context: arguments of the transport, as for `Symm`, with a planner of expert slots and
            options of replication.
    """

    load_counts = ReplicaCounts()

    def __init__(self, context: DispatchContext) -> None:
        super().__init__(context)
        assert isinstance(context.transport.replication, ReplicationOptions)
        self._replication = context.transport.replication

    def receive_tokens(self, sent: Any) -> Received:
        call, pushed_ND = sent
        rows_ND, slot_NK, prob_NK = Receive.apply(pushed_ND, call)
        plan = self._plan(slot_NK, prob_NK)
        call.plan_returns(plan)
        keep = self._replication.keep and torch.is_grad_enabled()
        replicas = PushedReplicas(call.control, call.replication, self._memory, keep=keep)
        fp8_inputs = None if call.fp8 is None else call.fp8.fp8_inputs
        received = Received(
            rows_ND,
            plan,
            fp8_inputs=fp8_inputs,
            route=call,
            experts=ReplicatedExperts(replicas),
            statistics=call.replication,
        )
        if call.overlaps:
            return received._replace(overlap=ExpertOverlap(call))
        rows_SD = InOrder.apply(rows_ND, call)
        in_order = plan._replace(row_index_S=None, inverse_NK=None)
        received = received._replace(rows_ND=rows_SD, plan=in_order)
        if fp8_inputs is not None:
            return received
        hooks = functools.partial(saving, rows_SD.detach(), call)
        return received._replace(saving=hooks)

    def _call(
        self, x_TD: Tensor, idx_TK: Tensor, prob_TK: Tensor, fp8: FP8Rows | None
    ) -> ReplicatedCall:
        """Exchange the routing, plan replicas, and map expert ids to slots."""
        (T, D), K, local = x_TD.shape, idx_TK.shape[1], self._local
        exchange = self._exchange(x_TD, idx_TK)
        ranks, rank = exchange.ranks, self._group.rank()
        control = control_of(self._connections, self._group, T, D, K, self._options)
        sent = sent_routing(idx_TK, prob_TK, ranks=ranks, local=local)
        expert_NK, prob_NK = control.all_routing(sent.side, T, K)
        size = self._replication.size(ranks)
        plan, slot_NK = plan_replicas(self._plan, expert_NK, ranks * local, size)
        return ReplicatedCall(
            lambda: exchange,
            Peers(control, memory.unreduced_memory_of(self._connections, self._group, T, D, K)),
            ReplicatedRouting(plan, expert_NK, slot_NK, prob_NK),
            idx_TK,
            # Tokens go by slots, and their routing has been sent.
            sent._replace(table_TK=slot_NK.narrow(0, rank * T, T), side=x_TD.new_empty(0)),
            ExpertOwner(rank, local, local + self._replication.slots),
            **self._call_options(x_TD, fp8),
        )

    def _memory(self, own: MLPWeights) -> Memory:
        """Memory of replicas of such weights."""
        slots = self._replication.slots
        return memory.replica_memory_of(self._connections, self._group, slots, own, self._options)
