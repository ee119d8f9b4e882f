"""Experts of other ranks beside a rank's own: their weights come for a micro-batch, and the
gradients of these go back.

A plan has then places for L own experts and G guests. What brings weights and gradients is a
transport's (`Guests`); shapes are the same in every micro-batch, whether a guest has come or not.

Legend: L own experts, G guest slots.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from phalanx.kernels.expert_mlp.main_grad import Buffer
from phalanx.kernels.expert_mlp.mlp_spec import MLPWeights


class Guests(Protocol):
    """Guests of one micro-batch in one layer. All ranks of a group call each method together, in
    this order: once in the forward pass up to `wait`, and once in the backward pass, which begins
    with `room` if weights were kept."""

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


def beside(own: MLPWeights, guests: MLPWeights) -> MLPWeights:
    """[L + G, ...] of each."""
    w1, w2 = torch.cat((own.w1, guests.w1)), torch.cat((own.w2, guests.w2))
    b1, b2 = (
        None if own_bias is None or bias is None else torch.cat((own_bias, bias))
        for own_bias, bias in ((own.b1, guests.b1), (own.b2, guests.b2))
    )
    return MLPWeights(w1, w2, b1, b2)


def scratch(weight: Tensor) -> Buffer:
    """fp32 for gradients of own experts and guests, before they part."""
    return Buffer(torch.empty_like(weight, dtype=torch.float32), add=False)


def settle(grad: Tensor, own: Tensor, into: Buffer | None, guests: Guests) -> Tensor:
    """Gradients [L, ...] of own experts, complete.

    Args:
        grad: fp32 [L + G, ...], of this rank's rows.
        own: the parameter.
        into: where they go; None: to a new tensor of the parameter's dtype.
        guests: of the micro-batch.
    """
    own_L, grad_G = grad.split([len(own), len(grad) - len(own)])
    if into is None:
        out = own_L
    else:
        out = into.out.add_(own_L) if into.add else into.out.copy_(own_L)
    guests.give_back(grad_G, out)
    return out if into is not None else out.to(own.dtype)
