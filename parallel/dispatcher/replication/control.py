"""Exchanges of side data alone between the GPUs of a node: what `symm` sends before it knows where
tokens go (`parallel.dispatcher.replication.options`).

Legend: T tokens per rank, D hidden, K slots of a token, R ranks.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.kernels.sm90.exchange.peer_buffers import unpadded
from phalanx.parallel.dispatcher.exchange import Connection, SymmOptions, connected

if TYPE_CHECKING:
    from phalanx.kernels.sm90.exchange.exchange import Exchange, Transfer

HIDDEN = 8
"""Columns of the one row, which is never sent: the fewest that there are."""


class Control:
    """Side data to all ranks, without rows, and a stream for what runs beside the experts.

    Args:
        exchange: of one token with one slot, as many pairs of side data as the main one.
        device: of the ranks' tokens.
    """

    def __init__(self, exchange: "Exchange", device: torch.device) -> None:
        self._exchange = exchange
        self._row = torch.zeros(1, HIDDEN, dtype=torch.bfloat16, device=device)
        self._nobody = torch.full((1, 1), -1, dtype=torch.int32, device=device)

    def send(self, side: Tensor) -> "Transfer":
        """After what the current stream has been given, with all SMs."""
        return self._exchange.start(self._row, self._nobody, side, 1, all_sms=True)

    def run_on_comm_stream(self, launch: Callable[[], None]) -> Callable[[], None]:
        """Call `launch` on the stream of this exchange, after what the current one has been given.
        Returns what lets the current one wait for that."""
        return self._exchange.run_on_comm_stream(launch)

    def wait(self, transfer: "Transfer") -> None:
        """Side data of all ranks have come."""
        self._exchange.wait(transfer)

    def side(self, transfer: "Transfer", size: int) -> Tensor:
        """Blocks of `size` int32 from all ranks: [R, size]."""
        return unpadded(self._exchange.side(transfer), self._exchange.ranks, size)


class _Connection(Connection):
    def __init__(self, group: dist.ProcessGroup, pairs: int, options: SymmOptions) -> None:
        super().__init__(group, 1, HIDDEN, pairs, options)
        device = torch.device("cuda", torch.cuda.current_device())
        self.control = Control(self.exchange, device)

    def release(self) -> None:
        super().release()
        del self.control


def control_of(
    group: dist.ProcessGroup, tokens: int, hidden: int, slots: int, options: SymmOptions
) -> Control:
    """That of a group, beside the exchange of a shape, whose routing it can send.

    It has a stream of its own if the exchange has.
    """
    key = ("control", group, tokens, hidden, slots, options)
    return connected(key, lambda: _Connection(group, tokens * slots, options)).control
