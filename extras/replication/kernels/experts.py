"""The passes of the expert MLP with replicas of other ranks' experts behind a rank's own experts.

Their weights arrive for a micro-batch, and their gradients are sent back to the owners. A plan then
has L own experts and, behind them, G replica slots. Shapes are the same in every micro-batch,
whether a slot is used or not. The weights of the layer that runs first are sent first, and
gradients of replicas are computed and reduced layer by layer, so that the transfer of one layer
overlaps the work of the other.

Legend: L own experts, G replica slots.
"""

import functools
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from phalanx.extras.replication.kernels.backend import BorrowedWeights, ReplicatedBackend
from phalanx.extras.replication.kernels.exchange import ReplicaExchange
from phalanx.kernels.expert_mlp.backend import Backend
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.main_grad import Buffer
from phalanx.kernels.expert_mlp.mlp_spec import LAYERS, Layer, MLPWeights, layer_pair
from phalanx.kernels.expert_mlp.weight_grads import WeightGrads
from phalanx.kernels.routing.split_order import split_order


class ReplicatedExperts:
    """`kernels.expert_mlp.autograd.Experts` of one call, with replicas behind own experts.

    Args:
        exchange: transfers of the micro-batch.
    """

    has_more: ClassVar[bool] = True

    def __init__(self, exchange: ReplicaExchange) -> None:
        self._exchange = exchange
        self._kept: MLPWeights | None = None
        """Weights of replicas that stay from the forward to the backward pass."""

    def start(
        self, own: MLPWeights, first: Layer, wait_rows: Callable[[], None] | None
    ) -> Callable[[Backend], Backend]:
        """Send the weights of replicas, unless they were kept."""
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
    """fp32 for a gradient that is added to before it is rounded."""
    if weight is None:
        return None
    return Buffer(torch.empty_like(weight, dtype=torch.float32), add=False)
