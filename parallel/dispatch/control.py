"""Exchanges of side data alone between the GPUs of a node, and signals: what `symm` sends before it
knows where tokens go, and when memory of others has been written (`parallel.dispatch.clones`).

Legend: T tokens per rank, D hidden, K slots of a token, R ranks.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.kernels.sm90.exchange.peer_buffers import unpadded
from phalanx.parallel.dispatch.exchange import Connection, SymmOptions, connected

if TYPE_CHECKING:
    from phalanx.kernels.sm90.exchange.exchange import Exchange, Transfer

HIDDEN = 8
"""Columns of the one row, which is never sent: the fewest that there are."""


class Control:
    """Side data to all ranks, and signals to them, without rows.

    Args:
        exchange: of one token with one slot, as many pairs of side data as the main one.
        device: of the ranks' tokens.
    """

    def __init__(self, exchange: "Exchange", device: torch.device) -> None:
        self._exchange = exchange
        self._row = torch.zeros(1, HIDDEN, dtype=torch.bfloat16, device=device)
        self._nobody = torch.full((1, 1), -1, dtype=torch.int32, device=device)

    def send(self, side: Tensor | None = None) -> "Transfer":
        """After what the current stream has been given."""
        sent = self._row.new_empty(0) if side is None else side
        return self._exchange.start(self._row, self._nobody, sent, 1, all_sms=side is not None)

    def aside(self, launch: Callable[[], None]) -> Callable[[], None]:
        """Call `launch` on the stream of signals, after what the current one has been given and
        before the next signal. Returns what lets the current one wait for that."""
        return self._exchange.aside(launch)

    def wait(self, transfer: "Transfer") -> None:
        """What all ranks have written before they sent it is there."""
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

    It has a stream of its own if the exchange has, on which a push has one SM unless it gets all.
    """
    key = ("control", group, tokens, hidden, slots, options)
    how = replace(options, comm_sms=min(options.comm_sms, 1))
    return connected(key, lambda: _Connection(group, tokens * slots, how)).control
