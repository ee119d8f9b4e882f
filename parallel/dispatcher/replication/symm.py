"""Expert replication over `symm`; `parallel.dispatcher.replication.options` has the contract.

Routing is sent first, then tokens to the ranks of their slots, and weights to replica slots under
the work of own experts. Sums come back as without replication; rows of a token that replicas
compute on several ranks come back one by one, and are added on arrival.

Legend: T tokens per rank, D hidden, K expert ids of a token, R ranks, N = R * T received rows, L
own experts, G replica slots.
"""

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.kernels.expert_mlp.mlp_spec import MLPWeights
from phalanx.kernels.quantize.recipe import Fp8Block
from phalanx.parallel.dispatcher.exchange import SymmOptions
from phalanx.parallel.dispatcher.fp8_rows import FP8Rows
from phalanx.parallel.dispatcher.received import OverlapFn, Planner, Received
from phalanx.parallel.dispatcher.replication import memory
from phalanx.parallel.dispatcher.replication.control import control_of
from phalanx.parallel.dispatcher.replication.options import ReplicationOptions
from phalanx.parallel.dispatcher.replication.pushed_replicas import Memory, PushedReplicas
from phalanx.parallel.dispatcher.replication.transfers import InOrder, Peers, ReplicatedTransfers
from phalanx.parallel.dispatcher.symm import Symm
from phalanx.parallel.dispatcher.transfers import saving

if TYPE_CHECKING:
    from phalanx.kernels.sm90.exchange.exchange import Exchange


class ReplicatedSymm(Symm):
    """The transport `symm` with expert replication.

    Args:
        group: the expert-parallel group, all on one node.
        plan: planner of the received routing, with ids of expert slots.
        replication: options of replication.
        local: L.
        options, waits, recipe: as in `Symm`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        plan: Planner,
        replication: ReplicationOptions,
        *,
        local: int,
        options: SymmOptions,
        waits: bool = False,
        recipe: Fp8Block | None = None,
    ) -> None:
        super().__init__(group, plan, local=local, options=options, waits=waits, recipe=recipe)
        self._replication = replication

    def dispatch(
        self,
        x_TD: Tensor,
        topk_idx_TK: Tensor,
        topk_prob_TK: Tensor,
        overlap_fn: OverlapFn = None,
        fp8: FP8Rows | None = None,
    ) -> Received:
        tokens = x_TD, topk_idx_TK, topk_prob_TK
        call, rows_ND, plan = self._bring(tokens, overlap_fn, fp8, self._transfers)
        call.planned(plan)
        keep = self._replication.keep and torch.is_grad_enabled()
        replicas = PushedReplicas(call, self._memory, keep=keep)
        fp8_inputs = None if call.fp8 is None else call.fp8.fp8_inputs
        received = Received(
            rows_ND,
            plan,
            None,
            fp8_inputs,
            call,
            replicas=replicas,
            replication_plan=call.replication,
        )
        if call.overlaps:
            return received._replace(overlap=call)
        rows_SD = InOrder.apply(rows_ND, call)
        in_order = plan._replace(row_index_S=None, inverse_NK=None)
        received = received._replace(rows_ND=rows_SD, plan=in_order)
        if fp8_inputs is not None:
            return received
        hooks = functools.partial(saving, rows_SD.detach(), call)
        return received._replace(saving=hooks)

    def _transfers(
        self, exchange: "Exchange", x_TD: Tensor, idx_TK: Tensor, **kwargs: Any
    ) -> ReplicatedTransfers:
        (T, D), K = x_TD.shape, idx_TK.shape[1]
        control = control_of(self._group, T, D, K, self._options)
        unreduced_rows = memory.unreduced_memory_of(self._group, T, D, K)
        peers = Peers(control, unreduced_rows, self._group)
        return ReplicatedTransfers(
            exchange, peers, idx_TK, self._local, self._replication, self._plan, **kwargs
        )

    def _memory(self, own: MLPWeights) -> Memory:
        """Memory of replicas of such weights."""
        return memory.replica_memory_of(self._group, self._replication.slots, own, self._options)
