"""Work between steps."""

from abc import ABC, abstractmethod


class Callback(ABC):
    """Work after every so many steps, on all ranks.

    Args:
        every: number of steps; 0 or less for never.
    """

    def __init__(self, every: int) -> None:
        self._every = every

    def due(self, step: int) -> bool:
        """Whether the work is done after a step."""
        return self._every > 0 and step % self._every == 0

    @abstractmethod
    def __call__(self, step: int) -> None:
        """Do the work after a step. Collective."""
