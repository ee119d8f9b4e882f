"""Experts of other ranks beside a rank's own: their weights come for a micro-batch, and the
gradients of these go back.

A plan has then places for L own experts and, behind them, G replicas. What brings weights and
gradients is a transport's (`ReplicaExchange`); shapes are the same in every micro-batch, whether a
replica has come or not. Every operation is run for own experts and then for replicas, into the same
tensors of
rows: no weight is copied to lie beside others, no gradient either, and what own experts do hides
the replicas' way. Of the two layers of an expert the one whose turn is first comes first, and
replicas' gradients are made and taken back layer by layer, so that the way of one is under the work
of the other.

Legend: L own experts, G replica slots, P = L + G places.
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
    """Of values of w1, w2, b1 and b2 those of a layer's weight and bias."""
    first = LAYERS.index(layer)
    return values[first], values[first + 2]


class ReplicaExchange(Protocol):
    """Replicas of one micro-batch in one layer of the model. All ranks of a group call each method
    together, in this order: in the forward pass up to `wait`, and all in the backward pass, but for
    those up to `wait` if weights were kept and for the rest if no weight has a gradient."""

    keep: bool
    """Weights stay from the forward pass to the backward pass; otherwise they are lent again."""

    def send_weights(self, own: MLPWeights, first: Layer) -> MLPWeights:
        """Own experts [L, ...] start on their way to the ranks that borrow them, those of layer
        `first` before the others.

        Returns:
            Where this rank's replicas [G, ...] arrive, not to be read before `wait`; any numbers in
            an empty slot. What is None in `own` is None.
        """
        ...

    def ready(self, layer: Layer) -> Tensor | None:
        """What a kernel has to wait for itself before it reads the replicas' weights of a layer
        (`kernels.sm90.exchange.ready`), in place of `wait`, so that it begins with those that come
        first. None: there is `wait` alone."""
        ...

    def wait(self, layer: Layer) -> None:
        """What the current stream does from here on finds the replicas' weights of a layer there.
        Those that were lent first are waited for first, or not at all."""
        ...

    def grad_buffer(self, own: MLPWeights) -> MLPWeights:
        """fp32 [G, ...] for the gradients of this rank's replicas; anything may be in it. What is
        None in `own` is None."""
        ...

    def send_grads(self, layer: Layer) -> None:
        """The gradients of a layer in `grad_buffer` are complete, of those weights that have some,
        and start on their way to the owners: fc1's, then fc2's."""
        ...

    def reduce_grads(self, layer: Layer, own: Sequence[Tensor | None]) -> None:
        """Add what other ranks made for this rank's experts, in place and in the order of ranks:
        fc1's, then fc2's, after which what the current stream does finds both complete. What it is
        given in between may run beside that.

        Args:
            layer: whose.
            own: gradients [L, ...] of its weight and bias, fp32 or narrower: added to in fp32, and
                rounded once for each rank. None: of that there are none.
        """
        ...


class BorrowedWeights(NamedTuple):
    """Replicas of one pass."""

    weights: MLPWeights
    """Not to be read before `arrive`."""
    arrive: Callable[[Layer, bool], Tensor | None]
    """Waits for those of a layer, and for their rows; only the first call does anything. Or, if the
    caller's kernel can wait for weights itself, for the rows, and returns what it has to wait for;
    None: nothing."""


def borrow_weights(
    replicas: ReplicaExchange,
    own: MLPWeights,
    kept: MLPWeights | None,
    rows: Callable[[], None] | None,
    first: Layer,
) -> BorrowedWeights:
    """The replicas' weights for a pass.

    Args:
        replicas: of the micro-batch.
        own: parameters.
        kept: weights that are here since the forward pass; None: they are lent.
        rows: waits for rows that replicas' kernels read; None: all are here.
        first: layer whose turn is first.
    """
    weights = replicas.send_weights(own, first) if kept is None else kept
    rows = None if rows is None else functools.cache(rows)

    wait = functools.cache(replicas.wait)

    def arrive(layer: Layer, waits: bool) -> Tensor | None:
        ready = replicas.ready(layer) if waits and kept is None else None
        if kept is None and ready is None:
            wait(layer)
        if rows is not None:
            rows()
        return ready

    return BorrowedWeights(weights, arrive)


def in_turn(plan: ExpertPlan, own: int) -> tuple[ExpertPlan, ExpertPlan]:
    """`ExpertPlan.split`, each part in the order of the whole."""
    first, behind = plan.split(own)
    if plan.order_L is None:
        return first, behind
    of_own, of_replicas = split_order(plan.order_L, own)
    return first._replace(order_L=of_own), behind._replace(order_L=of_replicas)


def shared_grads(
    work: WeightGrads, replicas: ReplicaExchange, own: MLPWeights, buffers: Sequence[Buffer | None]
) -> list[Tensor | None]:
    """Gradients of a rank's own weights and biases, complete: with what other ranks made of them.

    Those of replicas are made first, so that they travel under the rest: fc1's, which are larger,
    are added under the work of fc2's own ones.

    Args:
        work: of all places.
        replicas: of the micro-batch.
        own: parameters.
        buffers: where gradients go; None: to a new tensor in fp32.
    """
    first, behind = in_turn(work.plan, len(own.w1))
    make = {"fc1": work.of_fc1, "fc2": work.of_fc2}
    grad_buffer = replicas.grad_buffer(own)
    # Nobody reads the gradient of an empty slot.
    grad_buffers = [None if w is None else Buffer(w, add=False, zeros=False) for w in grad_buffer]
    for layer in LAYERS:
        if len(grad_buffer.w1):
            make[layer](behind, of_layer(grad_buffers, layer), last=False)
        replicas.send_grads(layer)
    wanted = zip(work.needs, buffers, own, strict=True)
    into = [buffer or _scratch(w) if need else None for need, buffer, w in wanted]
    made: dict[Layer, tuple[Tensor | None, Tensor | None]] = {}
    for layer in LAYERS:
        made[layer] = make[layer](first, of_layer(into, layer))
        replicas.reduce_grads(layer, made[layer])
    return [grad for both in zip(*made.values(), strict=True) for grad in both]


def _scratch(weight: Tensor | None) -> Buffer | None:
    """fp32 for a gradient that is added to before it is rounded."""
    if weight is None:
        return None
    return Buffer(torch.empty_like(weight, dtype=torch.float32), add=False)
