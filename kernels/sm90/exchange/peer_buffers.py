"""Memory that ranks of an expert-parallel group write to each other, and options of exchanges.

Every rank has one block of symmetric memory: its flags, then the receive buffers of `SLOTS`
exchanges, each [R * T, D] rows in bf16 and R blocks of side data. `parallel.dispatcher.exchange`
maps the memory on all ranks and passes the addresses in; nothing here needs a GPU or a compiler.

Legend: R ranks, T tokens of a rank, D hidden, K slots of a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.kernels.limits import MAX_WAVES


@dataclass(frozen=True)
class ExchangeOptions:
    """SMs that exchange, and the limit of a wait."""

    comm_sms: int = 0  # SMs that push while other kernels run; 0 takes all, and nothing overlaps
    timeout: float = 600  # timeout in seconds of a wait for a peer
    two_passes: bool = False
    """True if passes of two micro-batches exchange at a time. Each pass then pushes with its
    reserved SMs alone, and no kernel that computes waits for rows: so every push runs, and no pass
    can keep the other one from what it waits for."""

    @property
    def overlaps(self) -> bool:
        """True if exchanges run under other kernels, on SMs of their own."""
        return self.comm_sms > 0

    @property
    def in_waves(self) -> bool:
        return self.overlaps and not self.two_passes

    @property
    def limit_ms(self) -> int:
        return int(1000 * self.timeout)

    def sms(self, device: torch.device, *, all_sms: bool = False) -> int:
        """Number of SMs of a kernel that exchanges; `all_sms`: no other one of this pass runs."""
        if self.overlaps and (self.two_passes or not all_sms):
            return self.comm_sms
        return torch.cuda.get_device_properties(device).multi_processor_count


MAX_RANKS = 16
WAVES = 7
"""Waves of a rank's experts on the way to them: the first has 1/31 of the experts, the last 6/31.
On the way back the last wave is the smallest (`kernels.sm90.exchange.waves`)."""
ALLOWED = (1 + MAX_WAVES) * MAX_RANKS
"""A rank's flags, int32. Those of part p begin at p * MAX_RANKS, part 0 for side data and part
w + 1 for wave w: flag r is the last exchange whose part p has arrived from rank r. From
ALLOWED on, flag r is the last exchange that rank r allows this one to push."""
FLAGS = ALLOWED + MAX_RANKS
EPOCH, SEEN, CLAIMED, FINISHED_CTAS = 0, 1, 2, 3
STATE = FINISHED_CTAS + 1 + MAX_WAVES
"""int32 counters of a rank: exchanges pushed, the one waited for last, chunks of rows that were
claimed, and CTAs that have finished the side data and each wave."""
SEEN_BYTES = 4 * SEEN

SLOTS = 4
"""Receive buffers, used in rotation. When exchange u is started, those of exchange
u - 3 and earlier ones are free; u - 2 (the gradient of the sums) and u - 1 (the recomputed tokens)
may still be read by weight gradients while u (the gradient of the tokens) leaves."""
SIDE_ALIGN = 16  # alignment of a block of side data, in bytes
_ALIGN = 256


class PeerBuffers(NamedTuple):
    """Buffers and flags of an exchange of a rank; addresses are int64 on the device."""

    rows_R: Tensor  # addresses of the [R * T, D] rows that each rank receives
    side_R: Tensor  # addresses of each rank's blocks of side data
    flags_R: Tensor  # addresses of int32 [FLAGS] of each rank, initially 0, and 1 from ALLOWED on
    state: Tensor  # int32 [STATE] of this rank, initially 0
    report: Tensor
    """int32 [4] in pinned memory, initially 0: 1 + the rank for which a wait timed out, the epoch
    that was waited for, and the flag's value."""
    rank: int  # this rank
    limit_ms: int  # milliseconds after which a wait times out

    def arguments(self) -> dict[str, Any]:
        fields = self._asdict()
        fields["limit"] = fields.pop("limit_ms")
        return fields


@dataclass(frozen=True)
class BufferLayout:
    """Bytes of a rank's symmetric memory."""

    ranks: int
    tokens: int
    hidden: int
    slots: int  # K

    @property
    def row_bytes(self) -> int:
        return 2 * self.ranks * self.tokens * self.hidden

    @property
    def side_bytes(self) -> int:
        """Bytes of side data that a rank receives in an exchange: at most ids and probabilities."""
        return self.ranks * (8 * self.tokens * self.slots + SIDE_ALIGN)

    @property
    def total(self) -> int:
        return self.rows_at(SLOTS)

    def rows_at(self, slot: int) -> int:
        # Flags come first: the address of a rank's memory is that of its flags.
        return _aligned(4 * FLAGS) + slot * (_aligned(self.row_bytes) + _aligned(self.side_bytes))

    def side_at(self, slot: int) -> int:
        return self.rows_at(slot) + _aligned(self.row_bytes)

    def clear(self, memory: Tensor) -> None:
        memory.zero_()  # rows that never arrive must at least be finite
        # Exchange 1 is allowed from the start; each exchange then allows the next one.
        memory[: 4 * FLAGS].view(torch.int32)[ALLOWED:] = 1

    def rows(self, memory: Tensor, slot: int) -> Tensor:
        at = self.rows_at(slot)
        return memory[at : at + self.row_bytes].view(torch.bfloat16).view(-1, self.hidden)

    def side(self, memory: Tensor, slot: int) -> Tensor:
        at = self.side_at(slot)
        return memory[at : at + _aligned(self.side_bytes)]


def wave_begins(local: int, waves: int) -> list[int]:
    """First expert of each wave (`kernels.sm90.exchange.waves`), and the end of the last wave."""
    before: Sequence[int] = range(waves + 1)
    if waves < local:
        # As `waves.parts_before`, which counts on the device.
        before = [2**w - 1 if w <= 3 else 6 * w - 11 for w in before]
    return [-(-local * parts // before[-1]) for parts in before]


def padded(blocks_RX: Tensor) -> Tensor:
    """Blocks of int32 padded to multiples of SIDE_ALIGN bytes, as side data are."""
    padding = -blocks_RX.shape[1] % (SIDE_ALIGN // 4)
    return torch.nn.functional.pad(blocks_RX, (0, padding)) if padding else blocks_RX


def unpadded(side: Tensor, ranks: int, size: int) -> Tensor:
    """Inverse of `padded` at the receiver: blocks [R, size] of int32, contiguous."""
    pitch = SIDE_ALIGN * -(-4 * size // SIDE_ALIGN)
    return side[: ranks * pitch].view(torch.int32).view(ranks, -1)[:, :size].contiguous()


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
