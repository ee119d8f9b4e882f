"""Memory that the GPUs of a node can write to each other, for the exchanges of `kernels.sm90`.

Torch symmetric memory, without multicast: this module makes it known to all ranks of a group, and
keeps one exchange a group and shape until the process leaves the job. What is exchanged how is
`kernels.sm90.exchange.exchange`.

Legend: T tokens per rank, D hidden, K slots of a token.
"""

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.kernels.sm90.exchange.peer_buffers import MAX_RANKS, BufferLayout

if TYPE_CHECKING:
    from phalanx.kernels.sm90.exchange.exchange import Exchange


@dataclass(frozen=True)
class SymmOptions:
    """How `symm` works."""

    keep: bool = False
    """Keep received tokens for the backward pass; otherwise they are sent again."""
    comm_sms: int = 0
    """SMs that push, beside the experts' kernels; 0 takes all, and nothing overlaps."""
    timeout: float = 600
    """Seconds that a wait for a peer may take."""


class PeerMemory:
    """Memory of this rank that the others of its group can read and write.

    Args:
        group: expert-parallel, on one node.
        size: bytes.
        clear: writes its first contents.

    All ranks of the group make it together.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        size: int,
        clear: Callable[[Tensor], Any] = Tensor.zero_,
    ) -> None:
        # NVLink multicast is not used; torch reads this when it first makes symmetric memory.
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
        """Of the memory of all ranks, as this one's GPU sees them."""
        return list(self.handle.buffer_ptrs)


class Connected(Protocol):
    """What ranks have made together and leave together."""

    def begin(self) -> None:
        """All ranks meet on their streams, if it matters to them."""

    def release(self) -> None:
        """Give the memory back, though something may still refer to this."""

    def missing(self) -> str:
        """Who did not come within the timeout, if that ended the run; empty if all did."""
        ...


class Connection:
    """An exchange, and the symmetric memory that connects the ranks of its group.

    Args:
        group: expert-parallel; one node, at most 16 ranks.
        tokens, hidden, slots: T, D and K.
        options: SMs and timeout.

    All ranks of the group make it together.

    Raises:
        ValueError: more ranks than the kernels serve.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        tokens: int,
        hidden: int,
        slots: int,
        options: SymmOptions,
    ) -> None:
        if group.size() > MAX_RANKS:
            raise ValueError(
                f"parallel.dispatch=symm serves {MAX_RANKS} ranks, but parallel.expert is "
                f"{group.size()}: set parallel.dispatch=alltoall"
            )
        from phalanx.kernels.sm90.exchange.exchange import Exchange

        layout = BufferLayout(group.size(), tokens, hidden, slots)
        peers = PeerMemory(group, layout.total, layout.clear)
        self.group, self._handle = group, peers.handle
        self.exchange = Exchange(
            peers.memory,
            peers.addresses,
            rank=group.rank(),
            layout=layout,
            comm_sms=options.comm_sms,
            timeout=options.timeout,
        )
        dist.barrier(group)

    def begin(self) -> None:
        """Let all ranks meet on their streams, and begin with the first buffers again."""
        self._handle.barrier(channel=0, timeout_ms=self.exchange.limit_ms)
        self.exchange.restart()

    def release(self) -> None:
        """Give the memory back, though something may still refer to the exchange."""
        self.exchange.release()
        del self._handle

    def missing(self) -> str:
        """Who did not come within the timeout, if that ended the run; empty if all did."""
        late = self.exchange.timed_out()
        if late is None:
            return ""
        rank, epoch, reached = late
        peer = dist.get_global_rank(self.group, rank)
        return f"rank {peer} has not reached exchange {epoch} of experts, only {reached}"


_CONNECTIONS: dict[tuple[Any, ...], Any] = {}
"""`Connected`, by what they are for."""


def exchange_of(
    group: dist.ProcessGroup, tokens: int, hidden: int, slots: int, options: SymmOptions
) -> "Exchange":
    """The exchange of a group and a shape: one, as its buffers are taken in turn by all layers."""
    key = (group, tokens, hidden, slots, options)
    return connected(key, lambda: Connection(*key)).exchange


def connected[C: Connected](key: tuple[Any, ...], make: Callable[[], C]) -> C:
    """What a key stands for: one until the process leaves the job, made when it is first asked
    for, by all ranks of a group together."""
    if key not in _CONNECTIONS:
        _CONNECTIONS[key] = make()
    found: C = _CONNECTIONS[key]
    return found


def begin_exchanges() -> None:
    """`Connection.begin` of all.

    To be captured first in a CUDA graph, whose exchanges need not fill all buffers at its end.
    """
    for connection in _CONNECTIONS.values():
        connection.begin()


def release_exchanges() -> None:
    """Free the memory of all exchanges, in the order in which they were made.

    Whatever was captured with them must not be replayed any more. It waits for this rank's own work
    but for no other rank, which may be dead. One that still writes, because it has been cut off in
    the middle of a step, does no harm: the memory itself goes with the last mapping of it.

    Raises:
        RuntimeError: the device has failed, and with it every way to free what was on it.
    """
    if not _CONNECTIONS:
        return
    torch.cuda.synchronize()
    for key in list(_CONNECTIONS):
        _CONNECTIONS.pop(key).release()
    gc.collect()  # of what a layer's last call still refers to


def missing() -> str:
    """Whose tokens did not come within the timeout, if that ended the run; else empty."""
    return next((text for c in _CONNECTIONS.values() if (text := c.missing())), "")
