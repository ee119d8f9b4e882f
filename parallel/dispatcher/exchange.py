"""Symmetric memory of the GPUs of a node, for the exchanges of `kernels.sm90`.

Torch symmetric memory, without multicast, with all ranks of a group. There is one exchange
(`kernels.sm90.exchange.exchange`) per group and shape (`parallel.connections`).

Legend: T tokens per rank, D hidden, K expert ids of a token.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.kernels.sm90.exchange.peer_buffers import MAX_RANKS, BufferLayout, ExchangeOptions
from phalanx.kernels.sm90.jit.stand_ins import import_kernels
from phalanx.parallel.connections import Connections

if TYPE_CHECKING:
    from phalanx.kernels.sm90.exchange.exchange import Exchange, Transfer


class InFlight:
    """One of the transfers of a layer, from its start until it has been waited for.

    `exchange` returns that of the present pass; a transfer starts and ends in the same pass.
    """

    def __init__(self, exchange: "Callable[[], Exchange]") -> None:
        self._exchange = exchange
        self._transfer: Transfer | None = None
        self.rows: Tensor | None = None  # that the experts have returned to autograd

    def put(self, transfer: "Transfer") -> "Transfer":
        self._transfer = transfer
        return transfer

    def put_rows(self, transfer: "Transfer", rows_ND: Tensor) -> Tensor:
        """Store a started transfer and the tensor of its receive buffer; returns the latter."""
        self._transfer, self.rows = transfer, rows_ND
        return rows_ND

    @property
    def started(self) -> bool:
        return self._transfer is not None

    def get(self) -> "Transfer":
        assert self._transfer is not None
        return self._transfer

    def wait_side(self) -> "Transfer":
        """Wait for its side data; kernels wait for its rows from then on."""
        transfer = self.get()
        self._exchange().wait(transfer, side_only=True)
        return transfer

    def wait_rows(self) -> None:
        """Wait for all of it, without ending it: `wait` follows."""
        self._exchange().wait(self.get())

    def wait(self) -> "Transfer":
        """Wait for all of it, and end it."""
        transfer = self.get()
        self._transfer = self.rows = None
        self._exchange().wait(transfer)
        return transfer


if TYPE_CHECKING:
    from phalanx.kernels.sm90.exchange.exchange import Exchange


@dataclass(frozen=True)
class SymmOptions(ExchangeOptions):
    """Options of `symm` and `hier`: those of exchanges, what is saved."""

    keep: bool = False  # save received tokens for the backward pass, or resend them


def reaches_peers() -> bool:
    """Whether this rank's GPU can read and write the memory of all others of its host."""
    device = torch.cuda.current_device()
    others = (d for d in range(torch.cuda.device_count()) if d != device)
    return all(torch.cuda.can_device_access_peer(device, other) for other in others)


class PeerMemory:
    """Memory of this rank, on one node, that the other ranks of its group can read and write.

    `clear` writes its initial contents. Collective over the group.
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
        self.memory = symmetric.empty(size, dtype=torch.uint8, device=device)  # uint8 [size]
        clear(self.memory)
        torch.cuda.synchronize()
        self.handle = symmetric.rendezvous(self.memory, group)

    @property
    def addresses(self) -> list[int]:
        """Addresses of the memory of all ranks in the address space of this rank's GPU."""
        return list(self.handle.buffer_ptrs)


class Connection:
    """An exchange, and the symmetric memory that connects the ranks of its group.

    Collective over the group, on one node. Sizes are T, D and K. Raises ValueError for more ranks
    (16) than the kernels serve.
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
        self.exchange.release()
        del self._handle

    def missing(self) -> str:
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
