"""Symmetric memory of the GPUs of a node, for the exchanges of `kernels.sm90`.

This module allocates Torch symmetric memory, without multicast, with all ranks of a group, and
caches one exchange per group and shape until the process leaves the job. The exchange itself is
`kernels.sm90.exchange.exchange`.

Legend: T tokens per rank, D hidden, K expert ids of a token.
"""

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.kernels.sm90.exchange.options import ExchangeOptions
from phalanx.kernels.sm90.exchange.peer_buffers import MAX_RANKS, BufferLayout

if TYPE_CHECKING:
    from phalanx.kernels.sm90.exchange.exchange import Exchange


@dataclass(frozen=True)
class SymmOptions(ExchangeOptions):
    """Options of `symm`: those of its exchanges, and what is saved."""

    keep: bool = False
    """True if received tokens are saved for the backward pass; otherwise they are resent."""


class PeerMemory:
    """Memory of this rank that the other ranks of its group can read and write.

    Args:
        group: the expert-parallel group, on one node.
        size: number of bytes.
        clear: function that writes its initial contents.

    Collective over the group.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        size: int,
        clear: Callable[[Tensor], Any] = Tensor.zero_,
    ) -> None:
        # NVLink multicast is not used; torch reads this at its first allocation.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        import torch.distributed._symmetric_memory as symmetric

        device = torch.device("cuda", torch.cuda.current_device())
        self.memory = symmetric.empty(size, dtype=torch.uint8, device=device)
        """uint8 [size]."""
        clear(self.memory)
        torch.cuda.synchronize()
        self.handle = symmetric.rendezvous(self.memory, group)

    @property
    def addresses(self) -> list[int]:
        """Addresses of the memory of all ranks in the address space of this rank's GPU."""
        return list(self.handle.buffer_ptrs)


class Connected(Protocol):
    """A resource that ranks create together and release together."""

    def begin(self) -> None:
        """Barrier of all ranks on their streams, where the resource needs one."""

    def release(self) -> None:
        """Free the memory, though something may still refer to this."""

    def missing(self) -> str:
        """Error text on the rank that a wait timed out for; empty if none did."""
        ...


class Connection:
    """An exchange, and the symmetric memory that connects the ranks of its group.

    Args:
        group: the expert-parallel group; one node, at most 16 ranks.
        tokens, hidden, slots: T, D and K.
        options: options of the exchange.

    Collective over the group.

    Raises:
        ValueError: more ranks than the kernels serve.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        tokens: int,
        hidden: int,
        slots: int,
        options: ExchangeOptions,
    ) -> None:
        if group.size() > MAX_RANKS:
            raise ValueError(
                f"parallel.dispatch=symm serves {MAX_RANKS} ranks, but parallel.expert is "
                f"{group.size()}: set parallel.dispatch=alltoall"
            )
        from phalanx.kernels.sm90.exchange.exchange import Exchange

        layout = BufferLayout(group.size(), tokens, hidden, slots)
        peers = PeerMemory(group, layout.total, layout.clear)
        self.group, self._handle, self._options = group, peers.handle, options
        self.exchange = Exchange(
            peers.memory,
            peers.addresses,
            rank=group.rank(),
            layout=layout,
            options=options,
        )
        dist.barrier(group)

    def begin(self) -> None:
        """Barrier of all ranks on their streams, then restart with the first buffers."""
        self._handle.barrier(channel=0, timeout_ms=self._options.limit_ms)
        self.exchange.restart()

    def release(self) -> None:
        """Free the memory, though something may still refer to the exchange."""
        self.exchange.release()
        del self._handle

    def missing(self) -> str:
        """Error text on the rank that a wait timed out for; empty if none did."""
        late = self.exchange.timed_out()
        if late is None:
            return ""
        rank, epoch, reached = late
        peer = dist.get_global_rank(self.group, rank)
        return f"rank {peer} has not reached exchange {epoch} of experts, only {reached}"


_CONNECTIONS: dict[tuple[Any, ...], Any] = {}
"""Resources of this process by their keys, in the order of creation."""


def exchange_of(
    group: dist.ProcessGroup, tokens: int, hidden: int, slots: int, options: ExchangeOptions
) -> "Exchange":
    """The exchange of a group and a shape: one, as all layers take its buffers in turn."""
    key = (group, tokens, hidden, slots, options)
    return connected(key, lambda: Connection(*key)).exchange


def connected[C: Connected](key: tuple[Any, ...], make: Callable[[], C]) -> C:
    """The resource of a key, created at the first call, by all ranks of a group together.

    It lives until `release_exchanges`.
    """
    if key not in _CONNECTIONS:
        _CONNECTIONS[key] = make()
    resource: C = _CONNECTIONS[key]
    return resource


def begin_exchanges() -> None:
    """Call `Connection.begin` of all.

    Captured first in a CUDA graph, whose exchanges need not fill all buffers at its end.
    """
    for connection in _CONNECTIONS.values():
        connection.begin()


def release_exchanges() -> None:
    """Free the memory of all exchanges, in the order of creation.

    Graphs captured with them must not be replayed any more. It waits for this rank's work but for
    no other rank, which may be dead. A rank that still writes, because it was interrupted in a
    step, does no harm: the memory itself is freed with the last mapping of it.

    Raises:
        RuntimeError: the device has failed, so that its memory cannot be freed.
    """
    if not _CONNECTIONS:
        return
    torch.cuda.synchronize()
    for key in list(_CONNECTIONS):
        _CONNECTIONS.pop(key).release()
    gc.collect()  # a layer's last call may refer to them in a cycle


def missing() -> str:
    """Error text on the rank whose tokens timed out; empty if none did."""
    return next((text for c in _CONNECTIONS.values() if (text := c.missing())), "")
