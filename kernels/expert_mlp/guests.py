"""Experts of other ranks beside a rank's own: their weights come for a micro-batch, and the
gradients of these go back.

A plan has then places for L own experts and, behind them, G guests. What brings weights and
gradients is a transport's (`Guests`); shapes are the same in every micro-batch, whether a guest has
come or not. Every operation is run for own experts and then for guests, into the same tensors of
rows: no weight is copied to lie beside others, no gradient either, and what own experts do hides
the guests' way.

Legend: L own experts, G guest slots, P = L + G places.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.main_grad import Buffer
from phalanx.kernels.expert_mlp.mlp_spec import MLPWeights
from phalanx.kernels.expert_mlp.weight_grads import WeightGrads
from phalanx.kernels.routing.split_order import split_order


class Guests(Protocol):
    """Guests of one micro-batch in one layer. All ranks of a group call each method together, in
    this order: in the forward pass up to `wait`, and all in the backward pass, but for the first
    two if weights were kept and for the rest if no weight has a gradient."""

    keep: bool
    """Weights stay from the forward pass to the backward pass; otherwise they are lent again."""

    def lend(self, own: MLPWeights) -> MLPWeights:
        """Own experts [L, ...] start on their way to the ranks that borrow them.

        Returns:
            Where this rank's guests [G, ...] arrive, not to be read before `wait`; any numbers in
            an empty slot. What is None in `own` is None.
        """
        ...

    def wait(self) -> None:
        """What the current stream does from here on finds the guests there."""
        ...

    def room(self, own: MLPWeights) -> MLPWeights:
        """fp32 [G, ...] for the gradients of this rank's guests; anything may be in it. What is
        None in `own` is None."""
        ...

    def give_back(self) -> None:
        """The gradients in `room` are complete, of those weights that have some, and start on their
        way to the owners."""
        ...

    def take_back(self, own: Sequence[Tensor | None]) -> None:
        """Add what other ranks made for this rank's experts, in place and in the order of ranks.

        Args:
            own: gradients [L, ...] of w1, w2, b1 and b2, fp32 or narrower: added to in fp32, and
                rounded once for each rank. None: of that there are none.
        """
        ...


class Lent(NamedTuple):
    """Guests of one pass."""

    weights: MLPWeights
    """Not to be read before `arrive`."""
    arrive: Callable[[], None]
    """Waits for them and their rows; only the first call does anything."""


def lent(
    guests: Guests, own: MLPWeights, kept: MLPWeights | None, rows: Callable[[], None] | None
) -> Lent:
    """The guests' weights for a pass.

    Args:
        guests: of the micro-batch.
        own: parameters.
        kept: weights that are here since the forward pass; None: they are lent.
        rows: waits for rows that guests' kernels read; None: all are here.
    """
    weights = guests.lend(own) if kept is None else kept

    @functools.cache
    def arrive() -> None:
        if kept is None:
            guests.wait()
        if rows is not None:
            rows()

    return Lent(weights, arrive)


def in_turn(plan: ExpertPlan, own: int) -> tuple[ExpertPlan, ExpertPlan]:
    """`ExpertPlan.split`, each part in the order of the whole."""
    first, behind = plan.split(own)
    if plan.order_L is None:
        return first, behind
    of_own, of_guests = split_order(plan.order_L, own)
    return first._replace(order_L=of_own), behind._replace(order_L=of_guests)


def shared_grads(
    work: WeightGrads, guests: Guests, own: MLPWeights, buffers: Sequence[Buffer | None]
) -> list[Tensor | None]:
    """Gradients of a rank's own weights and biases, complete: with what other ranks made of them.

    Those of guests are made first, so that they travel under the rest.

    Args:
        work: of all places.
        guests: of the micro-batch.
        own: parameters.
        buffers: where gradients go; None: to a new tensor in fp32.
    """
    first, behind = in_turn(work.plan, len(own.w1))
    room = guests.room(own)
    if len(room.w1):
        into = [None if w is None else Buffer(w, add=False) for w in room]
        work.make(behind, into, last=False)
    guests.give_back()
    wanted = zip(work.needs, buffers, own, strict=True)
    grads = work.make(first, [into or _scratch(w) if need else None for need, into, w in wanted])
    guests.take_back(grads)
    return grads


def _scratch(weight: Tensor | None) -> Buffer | None:
    """fp32 for a gradient that is added to before it is rounded."""
    if weight is None:
        return None
    return Buffer(torch.empty_like(weight, dtype=torch.float32), add=False)
