"""Exponential moving averages of the weights (`optim.ema`), on the device.

Each optimizer has, beside the moments, the fp32 average of what it updates on this rank: it is
saved, loaded and moved between layouts as they are. It follows every update, also one that is
captured, and no skipped step.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from phalanx.kernels.elementwise.adam import merged
from phalanx.parallel.megatron.updated import parts, updated

NAME = "ema"
"""Name of an average in the state of an optimizer, and in a checkpoint (`optimizer.state.ema`)."""
_SLICE = 16 << 20  # elements that are merged to master weights at a time: 64 MiB of fp32


class Averages:
    """Averages of all weights that an optimizer updates on this rank; they begin with the weights.

    Args:
        optimizer: that of Megatron-Core, whose own optimizers are `parallel.megatron.adam.AdamW`.
        decay: part of an average that an update leaves, between 0 and 1.
    """

    def __init__(self, optimizer: Any, decay: float) -> None:
        self._optimizer, self._decay = optimizer, decay
        begin(optimizer)

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages towards the weights, after an update: decay x old + rest x weights."""
        for state, main in _states(self._optimizer):
            for average, weights in _slices(state[NAME], main, state.get("remainder")):
                average.lerp_(weights, 1.0 - self._decay)


@torch.no_grad()
def begin(optimizer: Any) -> None:
    """Let the averages begin with the weights, as where a checkpoint has none."""
    for state, main in _states(optimizer):
        if NAME not in state:
            state[NAME] = torch.empty_like(main, dtype=torch.float32, requires_grad=False)
        for average, weights in _slices(state[NAME], main, state.get("remainder")):
            average.copy_(weights)


def has_averages(optimizer: Any) -> bool:
    """Return whether an optimizer of this rank has averages."""
    # The state of a weight that has none must not begin here: `state[p]` of a default dictionary
    # would add one, in an order that is not that of the optimizer.
    states = (each for part in parts(optimizer) for each in part.optimizer.state.values())
    return any(NAME in state for state in states)


def _states(optimizer: Any) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """State and master copy, or bf16 weight with a remainder, of all that is updated."""
    for part in parts(optimizer):
        for each in updated(part):
            yield part.optimizer.state[each.main], each.main.detach()


def _slices(
    average: Tensor, main: Tensor, remainder: Tensor | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """An average and its weights in fp32; in slices where these have to be merged."""
    average, main = average.view(-1), main.view(-1)
    if remainder is None:
        yield average, main
        return
    sizes = zip(average.split(_SLICE), main.split(_SLICE), strict=True)
    for (held, weight), rest in zip(sizes, remainder.view(-1).split(_SLICE), strict=True):
        yield held, merged(weight, rest)
