"""Places in the layers at which a forward pass follows the backward pass beside it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from phalanx.extras.overlap.streams import Event


class Places:
    """A place in each layer at which forward passes wait for the backward pass beside them.

    Args:
        event: makes an event on the current stream.
    """

    def __init__(self, event: Callable[[], Event]) -> None:
        self._event = event
        self.reached: list[Event] = []
        """Events at the places of the backward pass that was issued last, in its order."""
        self._awaited: Iterator[Event] = iter(())

    @contextmanager
    def follow(self) -> Iterator[None]:
        """Inside is a forward pass beside the backward pass that was issued last, if any.

        The next backward pass reaches places anew.
        """
        self._awaited, self.reached = iter(self.reached), []
        try:
            yield
        finally:
            self._awaited = iter(())

    def next(self) -> Event:
        """Event that the next place of a forward pass waits for; None if there is none."""
        return next(self._awaited, None)

    def note(self, tensor: torch.Tensor) -> None:
        """Let the backward pass reach the place when it has the gradient of a tensor."""
        if tensor.requires_grad:
            tensor.register_hook(lambda _: self.reached.append(self._event()))
