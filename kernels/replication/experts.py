"""Replicas of other ranks' experts beside a rank's own experts.

Their weights arrive for a micro-batch, and their gradients are sent back to the owners. A plan then
has L own experts and, behind them, G replica slots. The transfers are a transport's
(`ReplicaExchange`); shapes are the same in every micro-batch, whether a slot is used or not. Every
operation runs for own experts and then for replicas, into the same tensors of rows: neither weights
nor gradients are copied to be contiguous with others, and the work of own experts overlaps the
transfer of replicas. The weights of the layer that runs first are sent first, and gradients of
replicas are computed and reduced layer by layer, so that the transfer of one layer overlaps the
work of the other.

Legend: L own experts, G replica slots, P = L + G local slots.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.main_grad import Buffer
from phalanx.kernels.expert_mlp.mlp_spec import MLPWeights
from phalanx.kernels.expert_mlp.weight_grads import WeightGrads
from phalanx.kernels.once import Once
from phalanx.kernels.routing.split_order import split_order

type Layer = Literal["fc1", "fc2"]
LAYERS: tuple[Layer, Layer] = ("fc1", "fc2")


def layer_pair[T](values: Sequence[T], layer: Layer) -> tuple[T, T]:
    """The entries of a layer's weight and bias among values of w1, w2, b1 and b2."""
    index = LAYERS.index(layer)
    return values[index], values[index + 2]


class ReplicaExchange(Protocol):
    """Transfers of replicas for one micro-batch in one layer of the model.

    All ranks of a group call each method together, in this order: up to `wait` in the forward pass,
    and all methods in the backward pass, except those up to `wait` if weights were kept, and the
    others if no weight has a gradient.
    """

    keep: bool
    """Weights stay from the forward to the backward pass; otherwise they are sent again."""

    def send_weights(self, own: MLPWeights, first: Layer) -> MLPWeights:
        """Start sending own experts [L, ...] to the ranks with their replicas, layer `first` first.

        Returns:
            Memory of this rank's replicas [G, ...], not to be read before `wait`; the content of an
            empty slot is undefined. None where `own` has None.
        """
        ...

    def ready(self, layer: Layer) -> Tensor | None:
        """Flags for a kernel that waits for the replicas' weights of a layer itself.

        It needs no `wait`, and starts with those that arrive first (`kernels.sm90.exchange.ready`).
        None: only `wait` is available.
        """
        ...

    def wait(self, layer: Layer) -> None:
        """Make the current stream wait for the replicas' weights of a layer.

        The layer that was sent first is waited for first, or not at all.
        """
        ...

    def grad_buffer(self, own: MLPWeights) -> MLPWeights:
        """fp32 [G, ...] for the gradients of this rank's replicas, uninitialized.

        None where `own` has None.
        """
        ...

    def send_grads(self, layer: Layer) -> None:
        """Start sending the complete gradients in `grad_buffer` to the owners, fc1's first."""
        ...

    def reduce_grads(self, layer: Layer, own: Sequence[Tensor | None]) -> None:
        """Add the gradients that other ranks computed for this rank's experts: fc1's, then fc2's.

        They are added in place and in the order of ranks. After the second call the current stream
        sees both complete. Work that is launched between the calls may overlap the first.

        Args:
            layer: fc1 or fc2.
            own: gradients [L, ...] of its weight and bias, fp32 or narrower: added to in fp32 and
                rounded once for each rank. None: not wanted.
        """
        ...


class BorrowedWeights(NamedTuple):
    """Weights of replicas in one pass."""

    weights: MLPWeights
    """Not to be read before `arrive`."""
    arrive: Callable[[Layer, bool], Tensor | None]
    """Waits for the weights of a layer and for their rows; repeated calls do nothing. If the
    caller's kernel can wait for weights itself (the second argument), it waits only for the rows
    and returns the flags for the kernel; None: nothing is left to wait for."""


def borrow_weights(
    replicas: ReplicaExchange,
    own: MLPWeights,
    kept: MLPWeights | None,
    wait_rows: Callable[[], None] | None,
    first: Layer,
) -> BorrowedWeights:
    """The weights of replicas for a pass.

    Args:
        replicas: transfers of the micro-batch.
        own: parameters.
        kept: weights that stayed from the forward pass; None: they are sent.
        wait_rows: waits for the rows that kernels of replicas read; None: they have arrived.
        first: layer that runs first.
    """
    weights = replicas.send_weights(own, first) if kept is None else kept
    wait_rows = None if wait_rows is None else Once(wait_rows)
    wait = Once(replicas.wait)

    def arrive(layer: Layer, kernel_waits: bool) -> Tensor | None:
        ready = replicas.ready(layer) if kernel_waits and kept is None else None
        if kept is None and ready is None:
            wait(layer)
        if wait_rows is not None:
            wait_rows()
        return ready

    return BorrowedWeights(weights, arrive)


def split_in_order(plan: ExpertPlan, num_own: int) -> tuple[ExpertPlan, ExpertPlan]:
    """`ExpertPlan.split`, each part in the order of the plan."""
    own, behind = plan.split(num_own)
    if plan.order_L is None:
        return own, behind
    own_order, replica_order = split_order(plan.order_L, num_own)
    return own._replace(order_L=own_order), behind._replace(order_L=replica_order)


def grads_with_replicas(
    work: WeightGrads, replicas: ReplicaExchange, own: MLPWeights, buffers: Sequence[Buffer | None]
) -> list[Tensor | None]:
    """Complete gradients of a rank's own weights and biases, with those of their replicas.

    Gradients of replicas are computed first, so that sending them overlaps the rest: fc1's, which
    are larger, are reduced while fc2's of own experts are computed.

    Args:
        work: operands of own experts and replicas.
        replicas: transfers of the micro-batch.
        own: parameters.
        buffers: destinations; None: a new tensor in fp32.
    """
    own_plan, replica_plan = split_in_order(work.plan, len(own.w1))
    compute = {"fc1": work.fc1_grads, "fc2": work.fc2_grads}
    grad_buffer = replicas.grad_buffer(own)
    # Nobody reads the gradient of an empty slot.
    replica_buffers = [
        None if w is None else Buffer(w, add=False, zeros=False) for w in grad_buffer
    ]
    for layer in LAYERS:
        if len(grad_buffer.w1):
            compute[layer](replica_plan, layer_pair(replica_buffers, layer), last=False)
        replicas.send_grads(layer)
    wanted = zip(work.needs, buffers, own, strict=True)
    own_buffers = [buffer or _scratch(w) if need else None for need, buffer, w in wanted]
    grads: dict[Layer, tuple[Tensor | None, Tensor | None]] = {}
    for layer in LAYERS:
        grads[layer] = compute[layer](own_plan, layer_pair(own_buffers, layer))
        replicas.reduce_grads(layer, grads[layer])
    return [grad for both in zip(*grads.values(), strict=True) for grad in both]


def _scratch(weight: Tensor | None) -> Buffer | None:
    """fp32 for a gradient that is added to before it is rounded."""
    if weight is None:
        return None
    return Buffer(torch.empty_like(weight, dtype=torch.float32), add=False)
