"""Expert replication over `symm`; `extras.replication.options` has the contract.

Routing is sent first, then tokens to the ranks of their slots, and weights to replica slots under
the work of own experts: owners write weights to other ranks' slots and read gradients from there.
Sums come back as without replication; rows of a token that replicas compute on several ranks come
back one by one, and are added on arrival. `extras.replication.transfers` states what orders all
this.

Legend: T tokens per rank, D hidden, K expert ids of a token, R ranks, N = R * T received rows, L
own experts, G replica slots.
"""

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from phalanx.extras.replication import memory
from phalanx.extras.replication.kernels.experts import ReplicatedExperts
from phalanx.extras.replication.kernels.replication_plan import ReplicationPlan
from phalanx.extras.replication.kernels.rows import ExpertOwner
from phalanx.extras.replication.options import ReplicaCounts, ReplicationOptions, plan_replicas
from phalanx.extras.replication.transfers import (
    Control,
    InOrder,
    Peers,
    ReplicatedCall,
    ReplicatedRouting,
    control_of,
)
from phalanx.kernels.expert_mlp.mlp_spec import Layer, MLPWeights, layer_pair
from phalanx.parallel.dispatcher.fp8_rows import FP8Rows
from phalanx.parallel.dispatcher.overlap import ExpertOverlap
from phalanx.parallel.dispatcher.symm import Symm
from phalanx.parallel.dispatcher.transfers import Receive, saving, sent_routing
from phalanx.parallel.dispatcher.transport_class import DispatchContext, Received


class Memory(Protocol):
    """Replica slots of every rank, as `extras.replication.memory.ReplicaMemory`."""

    weights: MLPWeights
    grads: MLPWeights

    def send_weights(self, own: MLPWeights, expert_RG: Tensor, first: Layer) -> None: ...

    @property
    def ready(self) -> Tensor | None: ...

    def wait_sending(self) -> None: ...

    def wait(self, *, second: bool) -> None: ...

    def send_grads(self, layer: Layer) -> None: ...

    def reduce_grads(
        self, layer: Layer, own: Sequence[Tensor | None], expert_RG: Tensor, *, overlapped: bool
    ) -> None: ...

    def wait_reducing(self) -> None: ...


class PushedReplicas:
    """`extras.replication.kernels.experts.ReplicaExchange` of one call.

    Args:
        control: exchange with a communication stream.
        memory: function of weights that returns the memory of slots for them, the same on all
            ranks.
        keep: weights are saved for the backward pass.
    """

    def __init__(
        self,
        control: Control,
        plan: ReplicationPlan,
        memory: Callable[[MLPWeights], Memory],
        *,
        keep: bool,
    ) -> None:
        self._control, self._memory_of = control, memory
        self._expert_RG, self.keep = plan.expert_RN, keep
        self._memory: Memory
        self._first: Layer  # layer whose weights were sent first
        self._join: Callable[[], None]
        """Function that lets the current stream wait for the communication stream."""
        self._saved: MLPWeights | None = None

    def send_weights(self, own: MLPWeights, first: Layer) -> MLPWeights:
        memory = self._memory = self._memory_of(own)
        self._first = first
        self._join = self._control.run_on_comm_stream(
            lambda: memory.send_weights(own, self._expert_RG, first)
        )
        memory.wait_sending()
        if not self.keep:
            return memory.weights
        # The next layer takes the slots after this one's forward pass.
        copies = (None if w is None else torch.empty_like(w) for w in memory.weights)
        self._saved = MLPWeights(*copies)  # type: ignore[arg-type]
        return self._saved

    def ready(self, layer: Layer) -> Tensor | None:
        # Saved weights are copied once all have arrived.
        return self._memory.ready if layer == self._first and self._saved is None else None

    def wait(self, layer: Layer) -> None:
        self._memory.wait(second=layer != self._first)
        if layer != self._first:
            self._join()
        if self._saved is not None:
            pairs = (layer_pair(w, layer) for w in (self._saved, self._memory.weights))
            for saved, received in zip(*pairs, strict=True):
                if saved is not None and received is not None:
                    saved.copy_(received)

    def grad_buffer(self, own: MLPWeights) -> MLPWeights:
        self._memory = self._memory_of(own)
        return self._memory.grads

    def send_grads(self, layer: Layer) -> None:
        self._memory.send_grads(layer)

    def reduce_grads(self, layer: Layer, own: Sequence[Tensor | None]) -> None:
        add = partial(self._memory.reduce_grads, layer, own, self._expert_RG)
        if layer == "fc1":
            self._join = self._control.run_on_comm_stream(partial(add, overlapped=True))
            self._memory.wait_reducing()
        else:
            self._join()
            add(overlapped=False)


class ReplicatedSymm(Symm):
    """The transport `symm` with expert replication, and a planner of expert slots."""

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
        slots = self._replication.slots
        return memory.replica_memory_of(self._connections, self._group, slots, own, self._options)
