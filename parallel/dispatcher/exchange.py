"""Symmetric memory of the GPUs of a node, for the exchanges of `kernels.sm90`.

This module allocates Torch symmetric memory, without multicast, with all ranks of a group. There is
one exchange per group and shape (`parallel.connections`), which itself is
`kernels.sm90.exchange.exchange`.

Legend: T tokens per rank, D hidden, K expert ids of a token.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.kernels.sm90.exchange.options import ExchangeOptions
from phalanx.kernels.sm90.exchange.peer_buffers import MAX_RANKS, BufferLayout
from phalanx.kernels.sm90.jit.stand_ins import import_kernels
from phalanx.parallel.connections import Connections

if TYPE_CHECKING:
    from phalanx.kernels.sm90.exchange.exchange import Exchange


@dataclass(frozen=True)
class SymmOptions(ExchangeOptions):
    """Options of `symm` and `hier`: those of exchanges, what is saved."""

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
        import_kernels()
        from phalanx.kernels.sm90.exchange.exchange import Exchange

        layout = BufferLayout(group.size(), tokens, hidden, slots)
        peers = PeerMemory(group, layout.total, layout.clear)
        self.group, self._handle, self._options = group, peers.handle, options
        self._at_barrier = torch.zeros(1, dtype=torch.int32).pin_memory()
        self._yes_no = torch.tensor([[1], [0]], dtype=torch.int32, device=peers.memory.device)
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
        yes, no = self._yes_no
        # torch's barrier traps when its time is up, as any kernel's own fault would: the host then
        # reads here that the device was in it.
        self._at_barrier.copy_(yes, non_blocking=True)
        self._handle.barrier(channel=0, timeout_ms=self._options.limit_ms)
        self._at_barrier.copy_(no, non_blocking=True)
        self.exchange.restart()

    def release(self) -> None:
        """Free the memory, though something may still refer to the exchange."""
        self.exchange.release()
        del self._handle

    def missing(self) -> str:
        """Error text on the rank that a wait timed out for; empty if none did."""
        late = self.exchange.timed_out()
        if late is None:
            lost = self._at_barrier.item() and _has_failed()  # a barrier that goes on may yet end
            return "a rank has not reached the barrier of this step" if lost else ""
        rank, epoch, reached = late
        peer = dist.get_global_rank(self.group, rank)
        return f"rank {peer} has not reached exchange {epoch} of experts, only {reached}"


def _has_failed() -> bool:
    """Whether an error has stopped the device, which every call then reports."""
    try:
        torch.cuda.current_stream().query()
    except RuntimeError:
        return True
    return False


def exchange_of(
    connections: Connections,
    group: dist.ProcessGroup,
    tokens: int,
    hidden: int,
    slots: int,
    options: ExchangeOptions,
    kind: str = "",
) -> "Exchange":
    """The exchange of a group, a shape and a kind of pass: all layers take its buffers in turn."""
    given = (group, tokens, hidden, slots, options)
    return connections.get((*given, kind), lambda: Connection(*given)).exchange
