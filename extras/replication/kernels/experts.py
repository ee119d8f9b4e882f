"""The passes of the expert MLP with replicas of other ranks' experts behind a rank's own experts.

Their weights arrive for a micro-batch, and their gradients are sent back to the owners, by a
transport's `ReplicaExchange`. A plan then has L own experts and, behind them, G replica slots.
Shapes are the same in every micro-batch, whether a slot is used or not. The weights of the layer
that runs first are sent first, and gradients of replicas are computed and reduced layer by layer,
so that the transfer of one layer overlaps the work of the other.

`ReplicatedBackend` gives a call for rows to the backend of own experts first and then, once their
weights have arrived, for replicas into the same tensors, if that backend can (`takes_parts`):
neither weights nor gradients are copied to be contiguous with others, and the work of own experts
overlaps the transfer of replicas. Other backends take all experts in one call, with concatenated
weights.

Legend: L own experts, G replica slots of a rank, P = L + G experts of a plan.
"""

import functools
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from phalanx.kernels.expert_mlp.backend import (
    Backend,
    DelegatingMixin,
    HiddenGrads,
    takes_parts,
)
from phalanx.kernels.expert_mlp.calls import (
    Fc1Call,
    Fc2DgradCall,
    Linear,
    Operand,
    Rows,
    RowsCall,
)
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.main_grad import Buffer
from phalanx.kernels.expert_mlp.mlp_spec import LAYERS, Layer, MLPWeights, layer_pair
from phalanx.kernels.expert_mlp.weight_grads import WeightGrads
from phalanx.kernels.routing.plan import split_order


class BorrowedWeights(NamedTuple):
    """Weights of replicas in one pass."""

    weights: MLPWeights  # [G, ...], not to be read before `arrive`
    arrive: Callable[[Layer, bool], Tensor | None]
    """Waits for the weights of a layer and for their rows; repeated calls do nothing. If the
    caller's kernel can wait for weights itself (the second argument), it waits only for the rows
    and returns the flags for the kernel; None: nothing is left to wait for."""


class ReplicatedBackend(DelegatingMixin):
    """`kernels.expert_mlp.backend.Backend` of one pass, around that of a rank's own experts.

    An operation waits for the weights of replicas that it reads, and for their rows. wgrad and
    bias_grad take one part of the plan. `own` are weights of own experts [L, ...]; the `source` of
    a layer is one of them.
    """

    writes_into_out: ClassVar[bool] = False

    def __init__(self, inner: Backend, own: MLPWeights, replicas: BorrowedWeights) -> None:
        self._inner, self._own, self._borrowed = inner, own, replicas

    @property
    def fuses_gather(self) -> bool:
        return self._inner.fuses_gather

    def rows_and_columns(
        self,
        call: RowsCall | None,
        plan: ExpertPlan,
        operands: Sequence[Operand],
        rows: Callable[[RowsCall], Tensor] | None = None,
    ) -> tuple[Tensor | None, list[Operand]]:
        return self._inner.rows_and_columns(call, plan, operands, rows or self.rows)

    def fc1_act(self, call: Fc1Call) -> tuple[Rows | None, Rows]:
        inner = self._inner
        if not takes_parts(inner):
            return inner.fc1_act(call._replace(fc1=self._concatenated(call.fc1), ready=None))
        own_plan, replica_plan = self._split(call.plan)
        out = inner.fc1_act(call._replace(plan=own_plan))
        ready = self._arrive(call.fc1, call.plan.row_index_S is not None)
        replicas = self._replicas(call.fc1)
        if not len(replicas.weight_LOI):
            return out
        return inner.fc1_act(call._replace(fc1=replicas, plan=replica_plan, ready=ready, out=out))

    def rows(self, call: RowsCall) -> Tensor:
        inner = self._inner
        if call.signal is None and not takes_parts(inner):
            return inner.rows(call._replace(linear=self._concatenated(call.linear)))
        own_plan, replica_plan = self._split(call.plan)
        y_SO = inner.rows(call._replace(plan=own_plan))
        if call.after_signal is not None:
            call.after_signal()
        self._arrive(call.linear)
        replicas = self._replicas(call.linear)
        if not len(replicas.weight_LOI):
            return y_SO
        call = call._replace(linear=replicas, plan=replica_plan, signal=None, out=y_SO)
        return inner.rows(call)

    def fc2_dgrad_dact(self, call: Fc2DgradCall) -> HiddenGrads:
        inner, fc2, plan = self._inner, call.fc2, call.plan
        if not takes_parts(inner):
            return inner.fc2_dgrad_dact(call._replace(fc2=self._concatenated(fc2), ready=None))
        own_plan, replica_plan = self._split(plan)
        rows = inner.fc2_dgrad_rows(call._replace(plan=own_plan))
        ready = self._arrive(fc2, call.dy.gather and plan.row_index_S is not None)
        replicas = self._replicas(fc2)
        if len(replicas.weight_LOI):
            rows = inner.fc2_dgrad_rows(
                call._replace(fc2=replicas, plan=replica_plan, ready=ready, out=rows)
            )
        if plan.row_prob_S is not None and fc2.bias_LO is not None:
            self._arrive(fc2)  # what reads biases does not wait
            fc2 = fc2._replace(bias_LO=_cat(fc2.bias_LO, replicas.bias_LO))
        return inner.finish_fc2_dgrad(rows, call._replace(fc2=fc2))

    def _split(self, plan: ExpertPlan) -> tuple[ExpertPlan, ExpertPlan]:
        return plan.split(len(self._own.w1))

    def _layer(self, linear: Linear) -> Layer:
        return "fc1" if linear.source is self._own.w1 else "fc2"

    def _arrive(self, linear: Linear, gathers: bool = False) -> Tensor | None:
        """Wait for replicas of a layer, or return the flags for a kernel that gathers its rows."""
        inner = self._inner
        kernel_waits = gathers and takes_parts(inner) and inner.waits_for_weights
        return self._borrowed.arrive(self._layer(linear), kernel_waits)

    def _replicas(self, linear: Linear) -> Linear:
        """The same layer of the replicas, not to be read before `_arrive`."""
        w_GOI, bias_GO = layer_pair(self._borrowed.weights, self._layer(linear))
        assert w_GOI is not None
        return linear._replace(
            weight_LOI=w_GOI.mT if linear.is_transposed else w_GOI,
            bias_LO=None if linear.bias_LO is None else bias_GO,
            source=None,
        )

    def _concatenated(self, linear: Linear) -> Linear:
        """Own experts and replicas in one layer: a copy of all weights."""
        self._arrive(linear)
        replicas = self._replicas(linear)
        both = linear.weight_LOI, replicas.weight_LOI
        if linear.is_transposed:
            weight_POI = torch.cat([w_LOI.mT for w_LOI in both]).mT
        else:
            weight_POI = torch.cat(both)
        bias_PO = _cat(linear.bias_LO, replicas.bias_LO)
        return linear._replace(weight_LOI=weight_POI, bias_LO=bias_PO, source=None)


def _cat(own: Tensor | None, replicas: Tensor | None) -> Tensor | None:
    return None if own is None or replicas is None else torch.cat([own, replicas])


class ReplicaExchange(Protocol):
    """Transfers of replicas for one micro-batch in one layer of the model.

    All ranks of a group call each method together, in this order: up to `wait` in the forward pass,
    and all methods in the backward pass, except those up to `wait` if weights were kept, and the
    others if no weight has a gradient.
    """

    keep: bool  # weights stay from the forward to the backward pass; otherwise they are sent again

    def send_weights(self, own: MLPWeights, first: Layer) -> MLPWeights:
        """Start sending own experts [L, ...] to the ranks with their replicas, layer `first` first.

        Returns memory of this rank's replicas [G, ...], not to be read before `wait`, None where
        `own` has None; the content of an empty slot is undefined.
        """
        ...

    def ready(self, layer: Layer) -> Tensor | None:
        """Flags (`kernels.sm90.exchange.waves`) for a kernel that waits for weights itself.

        It needs no `wait`, and starts with those that arrive first. None: only `wait` is available.
        """
        ...

    def wait(self, layer: Layer) -> None:
        """Make the current stream wait for the replicas' weights of a layer.

        The layer that was sent first is waited for first, or not at all.
        """
        ...

    def grad_buffer(self, own: MLPWeights) -> MLPWeights:
        """Uninitialized fp32 [G, ...] for gradients of replicas; None where `own` has None."""
        ...

    def send_grads(self, layer: Layer) -> None:
        """Start sending the complete gradients in `grad_buffer` to the owners, fc1's first."""
        ...

    def reduce_grads(self, layer: Layer, own: Sequence[Tensor | None]) -> None:
        """Add the gradients that other ranks computed for this rank's experts: fc1's, then fc2's.

        They are added in place and in the order of ranks. After the second call the current stream
        sees both complete. Work that is launched between the calls may overlap the first. `own` are
        gradients [L, ...] of the layer's weight and bias, fp32 or narrower: added to in fp32 and
        rounded once for each rank. None: not wanted.
        """
        ...


class ReplicatedExperts:
    """`kernels.expert_mlp.interfaces.Experts` of one call, with replicas behind own experts."""

    has_more: ClassVar[bool] = True

    def __init__(self, exchange: ReplicaExchange) -> None:
        self._exchange = exchange
        self._kept: MLPWeights | None = None
        """Weights of replicas that stay from the forward to the backward pass."""

    def start(
        self, own: MLPWeights, first: Layer, wait_rows: Callable[[], None] | None
    ) -> Callable[[Backend], Backend]:
        exchange, kept = self._exchange, self._kept
        weights = exchange.send_weights(own, first) if kept is None else kept
        if exchange.keep:
            self._kept = weights
        # Several kernels use the rows, and a layer's weights: the stream waits once for each.
        wait_rows = None if wait_rows is None else functools.cache(wait_rows)
        wait = functools.cache(exchange.wait)

        def arrive(layer: Layer, kernel_waits: bool) -> Tensor | None:
            ready = exchange.ready(layer) if kernel_waits and kept is None else None
            if kept is None and ready is None:
                wait(layer)
            if wait_rows is not None:
                wait_rows()
            return ready

        replicas = BorrowedWeights(weights, arrive)
        return lambda inner: ReplicatedBackend(inner, own, replicas)

    def weight_grads(
        self, work: WeightGrads, own: MLPWeights, buffers: Sequence[Buffer | None]
    ) -> list[Tensor | None]:
        """Complete gradients of own weights and biases, with those of their replicas.

        Gradients of replicas are computed first, so that sending them overlaps the rest: fc1's,
        which are larger, are reduced while fc2's of own experts are computed. Without a buffer a
        gradient is a new tensor in fp32.
        """
        if not any(work.needs):
            return work.all(buffers)
        exchange = self._exchange
        own_plan, replica_plan = split_in_order(work.plan, len(own.w1))
        compute = {"fc1": work.fc1_grads, "fc2": work.fc2_grads}
        grad_buffer = exchange.grad_buffer(own)
        # Nobody reads the gradient of an empty slot.
        replica_buffers = [
            None if w is None else Buffer(w, add=False, zeros=False) for w in grad_buffer
        ]
        for layer in LAYERS:
            if len(grad_buffer.w1):
                compute[layer](replica_plan, layer_pair(replica_buffers, layer), last=False)
            exchange.send_grads(layer)
        wanted = zip(work.needs, buffers, own, strict=True)
        own_buffers = [buffer or _scratch(w) if need else None for need, buffer, w in wanted]
        grads: dict[Layer, tuple[Tensor | None, Tensor | None]] = {}
        for layer in LAYERS:
            grads[layer] = compute[layer](own_plan, layer_pair(own_buffers, layer))
            exchange.reduce_grads(layer, grads[layer])
        return [grad for both in zip(*grads.values(), strict=True) for grad in both]


def split_in_order(plan: ExpertPlan, num_own: int) -> tuple[ExpertPlan, ExpertPlan]:
    """`ExpertPlan.split`, each part in the order of the plan."""
    own, behind = plan.split(num_own)
    if plan.order_L is None:
        return own, behind
    own_order, replica_order = split_order(plan.order_L, num_own)
    return own._replace(order_L=own_order), behind._replace(order_L=replica_order)


def _scratch(weight: Tensor | None) -> Buffer | None:
    if weight is None:
        return None
    return Buffer(torch.empty_like(weight, dtype=torch.float32), add=False)
