"""Replicas of experts of other ranks: their weights for a micro-batch, and their gradients.

A plan then has slots for L own experts and, behind them, G replicas. A transport exchanges weights
and gradients (`ReplicaExchange`); shapes are the same in every micro-batch, whether a slot is empty
or not. Every operation runs for own experts and then for replicas, into the same tensors of rows:
no weight or gradient is copied to be contiguous with others, and the work of own experts hides the
exchange. Of the two layers of an expert the one that is used first is sent first, and the replicas'
gradients are computed and reduced layer by layer, so that the exchange of one overlaps the other.

Legend: L own experts, G replica slots, P = L + G slots.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.main_grad import Buffer
from phalanx.kernels.expert_mlp.mlp_spec import MLPWeights
from phalanx.kernels.expert_mlp.weight_grads import WeightGrads
from phalanx.kernels.routing.split_order import split_order

type Layer = Literal["fc1", "fc2"]
LAYERS: tuple[Layer, Layer] = ("fc1", "fc2")


def of_layer[T](values: Sequence[T], layer: Layer) -> tuple[T, T]:
    """Select a layer's weight and bias from values of w1, w2, b1 and b2."""
    first = LAYERS.index(layer)
    return values[first], values[first + 2]


class ReplicaExchange(Protocol):
    """Exchange of replicas of one micro-batch in one layer of the model.

    All ranks of a group call each method together, in the order of the methods: in the forward pass
    up to `wait`, and all in the backward pass, but for those up to `wait` if weights were saved,
    and for the rest if no weight has a gradient.
    """

    keep: bool
    """True if weights are saved for the backward pass; otherwise they are resent."""

    def send_weights(self, own: MLPWeights, first: Layer) -> MLPWeights:
        """Start to send own experts [L, ...] to their borrowers, those of layer `first` first.

        Returns:
            Weights [G, ...] of this rank's replicas, not to be read before `wait`; undefined in an
            empty slot. None where `own` is None.
        """
        ...

    def ready(self, layer: Layer) -> Tensor | None:
        """Flags that a kernel waits for itself before it reads the replicas' weights of a layer.

        It then starts with those that arrive first (`kernels.sm90.exchange.ready`), in place of
        `wait`. None: there is only `wait`.
        """
        ...

    def wait(self, layer: Layer) -> None:
        """Let the current stream wait for the replicas' weights of a layer.

        The layer that was sent first is waited for first, or not at all.
        """
        ...

    def grad_buffer(self, own: MLPWeights) -> MLPWeights:
        """Buffers [G, ...] of the gradients of this rank's replicas, fp32, with undefined contents.

        None where `own` is None.
        """
        ...

    def send_grads(self, layer: Layer) -> None:
        """Start to send the gradients of a layer in `grad_buffer` to owners: fc1, then fc2."""
        ...

    def reduce_grads(self, layer: Layer, own: Sequence[Tensor | None]) -> None:
        """Add the gradients of replicas of this rank's experts, in place, in the order of ranks.

        fc1, then fc2, after which the current stream finds both complete. Work of the current
        stream in between may overlap.

        Args:
            layer: layer of the gradients.
            own: gradients [L, ...] of its weight and bias, fp32 or narrower: the sum is in fp32,
                with one rounding for each rank. None: there is no such gradient.
        """
        ...


class BorrowedWeights(NamedTuple):
    """Weights of replicas in one pass."""

    weights: MLPWeights
    """Weights, not to be read before `arrive`."""
    arrive: Callable[[Layer, bool], Tensor | None]
    """Function that waits for the weights of a layer, and for their rows, at its first call.

    If the caller's kernel can wait for weights itself, it waits for rows only and returns the flags
    of the weights, or None.
    """


def borrow_weights(
    replicas: ReplicaExchange,
    own: MLPWeights,
    saved: MLPWeights | None,
    rows: Callable[[], None] | None,
    first: Layer,
) -> BorrowedWeights:
    """Borrow the replicas' weights for a pass.

    Args:
        replicas: exchange of the micro-batch.
        own: parameters.
        saved: weights saved in the forward pass; None: they are sent.
        rows: function that waits for rows that replicas' kernels read; None: all have arrived.
        first: layer that is used first.
    """
    weights = replicas.send_weights(own, first) if saved is None else saved
    rows = None if rows is None else functools.cache(rows)

    wait = functools.cache(replicas.wait)

    def arrive(layer: Layer, waits: bool) -> Tensor | None:
        ready = replicas.ready(layer) if waits and saved is None else None
        if saved is None and ready is None:
            wait(layer)
        if rows is not None:
            rows()
        return ready

    return BorrowedWeights(weights, arrive)


def split_plan(plan: ExpertPlan, own: int) -> tuple[ExpertPlan, ExpertPlan]:
    """`ExpertPlan.split` with the scheduling order split accordingly."""
    first, behind = plan.split(own)
    if plan.order_L is None:
        return first, behind
    of_own, of_replicas = split_order(plan.order_L, own)
    return first._replace(order_L=of_own), behind._replace(order_L=of_replicas)


def shared_grads(
    work: WeightGrads, replicas: ReplicaExchange, own: MLPWeights, buffers: Sequence[Buffer | None]
) -> list[Tensor | None]:
    """Complete gradients of a rank's own weights and biases, replicas included.

    The replicas' gradients are computed first, so that their exchange overlaps the rest: fc1's,
    which are larger, are added while fc2's own ones are computed.

    Args:
        work: gradient computation of all slots.
        replicas: exchange of the micro-batch.
        own: parameters.
        buffers: destinations of gradients; None: a new tensor in fp32.
    """
    first, behind = split_plan(work.plan, len(own.w1))
    compute = {"fc1": work.of_fc1, "fc2": work.of_fc2}
    grad_buffer = replicas.grad_buffer(own)
    # No rank reads the gradient of an empty slot.
    grad_buffers = [None if w is None else Buffer(w, add=False, zeros=False) for w in grad_buffer]
    for layer in LAYERS:
        if len(grad_buffer.w1):
            compute[layer](behind, of_layer(grad_buffers, layer), last=False)
        replicas.send_grads(layer)
    items = zip(work.needs, buffers, own, strict=True)
    outputs = [buffer or _scratch(w) if need else None for need, buffer, w in items]
    grads: dict[Layer, tuple[Tensor | None, Tensor | None]] = {}
    for layer in LAYERS:
        grads[layer] = compute[layer](first, of_layer(outputs, layer))
        replicas.reduce_grads(layer, grads[layer])
    return [grad for pair in zip(*grads.values(), strict=True) for grad in pair]


def _scratch(weight: Tensor | None) -> Buffer | None:
    """fp32 buffer of a gradient that is added to before it is rounded."""
    if weight is None:
        return None
    return Buffer(torch.empty_like(weight, dtype=torch.float32), add=False)
