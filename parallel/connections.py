"""Memory that ranks share, with one owner in each process and a lifetime.

A `Runtime` owns those of its process, and whoever builds transports passes them on. The memory goes
before the process groups that made it, and never by itself: a process whose device has failed could
not free it, and an error in a destructor would end it without a word.
"""

import gc
from collections.abc import Callable, Hashable
from typing import ClassVar, Protocol, cast

import torch


class Connected(Protocol):
    """A resource that ranks create together and release together."""

    def begin(self) -> None:
        """Barrier of all ranks on their streams, where the resource needs one."""

    def release(self) -> None: ...

    def missing(self) -> str:
        """Error text on the rank that a wait timed out for; empty if none did."""
        ...


class Connections:
    """Resources of a process that it shares with other ranks, by their keys.

    All layers whose key is the same take one resource in turn. Ranks have to ask for new ones in
    the same order, and a resource lives until `release`, though nothing else may refer to it.
    """

    unreleased: ClassVar[set["Connections"]] = set()
    """Connections of this process that have resources, kept alive until their release."""

    def __init__(self) -> None:
        self._resources: dict[Hashable, Connected] = {}

    def __len__(self) -> int:
        return len(self._resources)

    def get[C: Connected](self, key: Hashable, make: Callable[[], C]) -> C:
        """Connections with resources of this process, kept alive until their release."""
        if key not in self._resources:
            self._resources[key] = make()
            self.unreleased.add(self)
        return cast(C, self._resources[key])

    def begin(self) -> None:
        """Call `begin` of all: first in a captured graph, at whose end buffers may be half full."""
        for resource in self._resources.values():
            resource.begin()

    def release(self) -> None:
        """Free the memory of all resources, in the order of creation.

        Graphs captured with them must not be replayed any more. It waits for this rank's work but
        for no other rank, which may be dead. A rank that still writes does no harm: the memory
        itself is freed with the last mapping of it. Raises RuntimeError if the device has failed.
        """
        if not self._resources:
            return
        torch.cuda.synchronize()
        for key in list(self._resources):
            self._resources.pop(key).release()
        self.unreleased.discard(self)
        gc.collect()  # a layer's last call may refer to them in a cycle

    def missing(self) -> str:
        return next((text for c in self._resources.values() if (text := c.missing())), "")
