"""Experts of other ranks beside a rank's own: their weights come for a micro-batch, and the
gradients of these go back.

A plan has then places for L own experts and G guests. What brings weights and gradients is a
transport's (`Guests`); shapes are the same in every micro-batch, whether a guest has come or not.

Legend: L own experts, G guest slots.
"""

from typing import Protocol

import torch
from torch import Tensor

from phalanx.kernels.expert_mlp.main_grad import Buffer
from phalanx.kernels.expert_mlp.mlp_spec import MLPWeights


class Guests(Protocol):
    """Guests of one micro-batch in one layer. All ranks of a group call each method together."""

    keep: bool
    """The weights of guests stay until the backward pass; otherwise they come again."""

    def borrow(self, own: MLPWeights) -> MLPWeights:
        """Weights [G, ...] of this rank's guests for its own [L, ...]; any in an empty slot."""
        ...

    def give_back(self, grad_G: Tensor, own_L: Tensor) -> None:
        """Add the gradients of guests to those of their owners, in place and in the order of ranks.

        Args:
            grad_G: fp32 [G, ...], of this rank's guests; anything in an empty slot.
            own_L: fp32 or narrower [L, ...], of this rank's experts: what other ranks made for them
                is added in fp32, and rounded once for each rank.
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
