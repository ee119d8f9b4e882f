"""Exchanges of side data alone: the routing that `symm` sends before tokens with replication.

Legend: T tokens per rank, D hidden, K expert ids of a token, R ranks.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.kernels.routing.wire import routing_size, unpack_routing
from phalanx.kernels.sm90.exchange.options import ExchangeOptions
from phalanx.kernels.sm90.exchange.peer_buffers import unpadded
from phalanx.parallel.connections import Connections
from phalanx.parallel.dispatcher.exchange import Connection

if TYPE_CHECKING:
    from phalanx.kernels.sm90.exchange.exchange import Exchange, Transfer

HIDDEN = 8  # columns of the one row, which is never sent: the fewest that an exchange allows


class Control:
    """Exchange of side data with all ranks, without rows, and its communication stream.

    Args:
        exchange: exchange of one token with one expert id, with the main one's side data.
        device: device of the tokens.
    """

    def __init__(self, exchange: "Exchange", device: torch.device) -> None:
        self._exchange = exchange
        self._row = torch.zeros(1, HIDDEN, dtype=torch.bfloat16, device=device)
        self._no_expert = torch.full((1, 1), -1, dtype=torch.int32, device=device)

    def send(self, side: Tensor) -> "Transfer":
        """Send after the current stream's work, with all SMs."""
        return self._exchange.start(self._row, self._no_expert, side, 1, all_sms=True)

    def run_on_comm_stream(self, launch: Callable[[], None]) -> Callable[[], None]:
        """Call `launch` on the stream of this exchange, after the current stream's work.

        Returns a function that lets the current stream wait for it.
        """
        return self._exchange.run_on_comm_stream(launch)

    def wait(self, transfer: "Transfer") -> None:
        """Wait for side data of all ranks."""
        self._exchange.wait(transfer)

    def all_routing(self, side: Tensor, tokens: int, slots: int) -> tuple[Tensor, Tensor]:
        """Exchange packed routing: expert ids and probabilities of all ranks, [N, K]."""
        transfer = self.send(side)
        self.wait(transfer)
        size = routing_size(tokens, slots)
        blocks = unpadded(self._exchange.side(transfer), self._exchange.ranks, size)
        return unpack_routing(blocks, tokens, slots)


class _Connection(Connection):
    def __init__(self, group: dist.ProcessGroup, pairs: int, options: ExchangeOptions) -> None:
        super().__init__(group, 1, HIDDEN, pairs, options)
        device = torch.device("cuda", torch.cuda.current_device())
        self.control = Control(self.exchange, device)

    def release(self) -> None:
        super().release()
        del self.control


def control_of(
    connections: Connections,
    group: dist.ProcessGroup,
    tokens: int,
    hidden: int,
    slots: int,
    options: ExchangeOptions,
) -> Control:
    """The control exchange of a group, for the routing of the exchange of a shape.

    It has a communication stream if the main exchange has one.
    """
    key = ("control", group, tokens, hidden, slots, options)
    return connections.get(key, lambda: _Connection(group, tokens * slots, options)).control
