"""A transfer of a layer between its start and its end, which may be in different functions."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from phalanx.kernels.sm90.exchange.exchange import Exchange, Transfer


class InFlight:
    """One of the transfers of a layer, from its start until it has been waited for.

    Args:
        exchange: returns the exchange of the present pass. A transfer starts and ends in the same
            pass.
    """

    def __init__(self, exchange: "Callable[[], Exchange]") -> None:
        self._exchange = exchange
        self._transfer: Transfer | None = None
        self.rows: Tensor | None = None
        """Tensor of the receive buffer that the experts have returned to autograd."""

    def put(self, transfer: "Transfer") -> "Transfer":
        """Store a started transfer; returns it."""
        self._transfer = transfer
        return transfer

    def put_rows(self, transfer: "Transfer", rows_ND: Tensor) -> Tensor:
        """Store a started transfer and the tensor of its receive buffer; returns the latter."""
        self._transfer, self.rows = transfer, rows_ND
        return rows_ND

    @property
    def started(self) -> bool:
        """True from its start until it has been waited for."""
        return self._transfer is not None

    def get(self) -> "Transfer":
        """The transfer in flight."""
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
