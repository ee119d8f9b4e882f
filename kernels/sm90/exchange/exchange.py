"""Exchanges of rows between the GPUs of a node: the host side of `push` and `combine_push`.

Every rank of a group starts exchanges in the same order, and waits for them in that order. No count
is read, by host or device, before rows are sent; epochs are counted on the device, so that
exchanges can be captured in a CUDA graph. This side rotates over the receive buffers (`SLOTS`),
orders streams and chooses the kernels' arguments; it allocates no memory that others see and calls
no collective (see `parallel.dispatcher.exchange`).

    start        push rows to the ranks that want them            -> Transfer
    wait         let the stream wait for all ranks' rows, or for their side data alone
    rows, side   the received tensors
    ready_words  for kernels that wait for waves of rows themselves, after the side data

With SMs reserved for them (`ExchangeOptions`) pushes run on a stream of their own under other
kernels, and

    tile_signal, send_sums   sums leave as fc2 finishes experts
    send_gradient            the gradient of tokens leaves under the weight gradients
    run_on_comm_stream       other transfers, in order with these

Legend: T tokens of a rank, D hidden, K slots of a token, R ranks, N = R * T received rows, S expert
rows.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.kernels.expert_mlp.calls import Rows
from phalanx.kernels.sm90.exchange.combine_push import UnreducedRows, combine_push
from phalanx.kernels.sm90.exchange.peer_buffers import (
    MAX_RANKS,
    SEEN_BYTES,
    SLOTS,
    STATE,
    WAVES,
    BufferLayout,
    ExchangeOptions,
    PeerBuffers,
)
from phalanx.kernels.sm90.exchange.push import push, wait_peers
from phalanx.kernels.sm90.exchange.waves import PROGRESS, ReadyRows, TileSignal, ready_words
from phalanx.kernels.sm90.experts.tile_choice import choose
from phalanx.kernels.sm90.gemm.operands import data_of

SLICES = 16  # with fewer experts their rows are sent back in slices, so that waves are small
YIELD_AFTER = 0.5  # fraction of experts after which fc2 yields SMs to the sums of finished ones


class Transfer(NamedTuple):
    """An exchange that this rank has started."""

    slot: int  # index of its receive buffer
    number: int  # number in the order of starts, from 1
    waves: int  # parts of its rows that have flags of their own, after the side data
    pushed: torch.cuda.Event  # recorded after this rank's push
    sources: tuple[Tensor, ...]  # tensors that are being pushed, referenced until then


class Exchange:
    """Receive buffers, flags and epochs of one group, shared by all layers of a shape.

    Args:
        memory: this rank's symmetric memory, uint8 [layout.total], after `layout.clear`.
        addresses: of the memory of all ranks, as this one's GPU sees them.
        options: reserved SMs, which push under other kernels on a stream of their own, and timeout.
            Without such SMs pushes take all of them, on the current stream.
    """

    def __init__(
        self,
        memory: Tensor,
        addresses: Sequence[int],
        *,
        rank: int,
        layout: BufferLayout,
        options: ExchangeOptions,
    ) -> None:
        self.ranks, self.tokens = layout.ranks, layout.tokens
        # Kept alive: the tensors below are views of it, and peers write to it by address.
        self._memory, self._options = memory, options
        # The next receive buffer, exchanges started, and the last one waited for. Kernels count
        # epochs themselves, and are told only how far ahead of the last wait they are.
        self._next, self._started, self._waited = 0, 0, 0
        self._ready_words: dict[int, Tensor] = {}
        device = memory.device
        # High priority: CTAs of pushes are placed before those of kernels that wait for SMs.
        self._stream = torch.cuda.Stream(device, priority=-1) if options.overlaps else None
        # Progress of fc2; and one that is always complete, for the gradient of expert rows.
        self._progress, self._complete = torch.zeros(2, PROGRESS, dtype=torch.int32, device=device)
        bases, slots = torch.tensor(addresses, dtype=torch.int64), range(SLOTS)
        # One set of flags and counters for all buffers: exchanges follow one another. The report is
        # pinned, as the host reads it after the kernel that wrote it has trapped.
        shared = dict(
            flags_R=bases.to(device),
            state=torch.zeros(STATE, dtype=torch.int32, device=device),
            report=torch.zeros(4, dtype=torch.int32).pin_memory(),
        )
        self._buffers = [
            PeerBuffers(
                rows_R=(bases + layout.rows_at(slot)).to(device),
                side_R=(bases + layout.side_at(slot)).to(device),
                **shared,
                rank=rank,
                limit_ms=options.limit_ms,
            )
            for slot in slots
        ]
        self._rows = [layout.rows(memory, slot) for slot in slots]
        self._side = [layout.side(memory, slot) for slot in slots]

    def start(
        self,
        rows: Tensor,
        table: Tensor,
        side: Tensor,
        local: int,
        *,
        back: bool = False,
        all_sms: bool = False,
    ) -> Transfer:
        """Start to push rows, after all work so far on the current stream.

        Arguments are those of `push`; `all_sms` takes all SMs, as nothing is to overlap.
        """
        # Copied, if at all, on the current stream: the push comes after all of its work.
        sources = (rows.contiguous(), table, side)
        # Sums back are waited for as a whole: only experts read rows in waves.
        waves = 1 if back else self._waves(local)
        with self._next_transfer(sources, waves) as (transfer, buffers):
            push(
                *sources,
                buffers,
                tokens=self.tokens,
                local_experts=local,
                back=back,
                ctas=self._ctas(all_sms),
                waves=waves,
            )
        return transfer

    def tile_signal(self, y_SD: Tensor, a_SF: Rows, local: int) -> TileSignal:
        """Request to signal tiles of fc2's launch, a_SF to y_SD, whose sums `send_sums` sends."""
        # The launch takes this tile from the signal, as the counts that its reader waits for follow
        # from it: with another one they would never be reached, or be reached early.
        loop = choose("grouped_gemm", a_SF, y_SD.shape[1], data_of(a_SF).shape[1])
        # The fewest bits with which all experts have SLICES slices together.
        slice_bits = (-(-SLICES // local) - 1).bit_length()
        waves = self._waves(local << slice_bits)
        return TileSignal(y_SD, self._progress, waves, loop, self._ctas(), YIELD_AFTER, slice_bits)

    def send_sums(
        self,
        signal: TileSignal,
        index_S: Tensor,
        inverse_NK: Tensor,
        offsets: Tensor,
        after: torch.cuda.Event,
        *,
        unreduced_rows: UnreducedRows | None = None,
    ) -> tuple[Transfer, Callable[[], None]]:
        """Send sums back as experts finish; only with `overlaps`.

        Args:
            signal: request of the fc2 launch, which precedes this call: nothing here may be waited
                for before it.
            index_S, inverse_NK, offsets, unreduced_rows: as for `combine_push`.
            after: recorded before that launch.

        Returns:
            The transfer, and a function that sends the rest, to be called before the wait.
        """
        sources = (index_S, inverse_NK, offsets)
        beside, everywhere = self._ctas(), self._ctas(all_sms=True)
        send = functools.partial(
            combine_push,
            signal.ready_rows,
            *sources,
            tokens=self.tokens,
            # Both launches are one exchange: the last CTA of either ends it.
            total_ctas=beside + everywhere,
        )
        # From before fc2, not after it: this kernel runs beside fc2, and waits for its counts.
        with self._next_transfer((signal.out_SN, *sources), after=after) as (transfer, buffers):
            send(buffers, ctas=beside)
        # The second launch, on the stream of fc2 and after it. It claims from the same counter.
        return transfer, functools.partial(
            send, buffers, ctas=everywhere, unreduced_rows=unreduced_rows
        )

    def send_gradient(
        self,
        dx_SD: Tensor,
        index_S: Tensor,
        inverse_NK: Tensor,
        offsets: Tensor,
        side: Tensor,
        *,
        all_sms: bool = False,
        unreduced_rows: UnreducedRows | None = None,
    ) -> Transfer:
        """Send sums of expert rows, all of which are complete, and side data back.

        Arguments are those of `combine_push`; `all_sms` takes all SMs, as nothing is to overlap.
        """
        sources, ready = (index_S, inverse_NK, offsets), ReadyRows(dx_SD, self._complete)
        ctas = self._ctas(all_sms)
        read = (dx_SD, *sources, side, *(unreduced_rows or ()))
        with self._next_transfer(read) as (transfer, buffers):
            combine_push(
                ready,
                *sources,
                buffers,
                tokens=self.tokens,
                ctas=ctas,
                total_ctas=ctas,
                side=side,
                unreduced_rows=unreduced_rows,
            )
        return transfer

    def run_on_comm_stream(self, send: Callable[[], None]) -> Callable[[], None]:
        """Call `send` on the stream of pushes: after all work so far on the current stream, and
        before the next exchange.

        Returns a function that lets the current stream wait for it; its inputs have to stay alive
        until then, or until the next exchange has been waited for.
        """
        with self._on_push_stream() as stream:
            send()
            sent = stream.record_event()
        return lambda: torch.cuda.current_stream().wait_event(sent)

    @contextmanager
    def _on_push_stream(self, after: torch.cuda.Event | None = None) -> Iterator[torch.cuda.Stream]:
        current = torch.cuda.current_stream()
        stream = self._stream or current
        if stream != current:
            # What has to come before the push: its sources, reads of the buffer that peers are then
            # allowed to write (`peer_buffers.SLOTS`), and what this stream launched of the exchange
            # before.
            stream.wait_event(after or current.record_event())
        # Without a stream of its own a push is in order by itself: no event is needed.
        with torch.cuda.stream(stream):
            yield stream

    def _ctas(self, all_sms: bool = False) -> int:
        return self._options.sms(self._memory.device, all_sms=all_sms)

    @contextmanager
    def _next_transfer(
        self,
        sources: tuple[Tensor, ...],
        waves: int = 1,
        after: torch.cuda.Event | None = None,
    ) -> Iterator[tuple[Transfer, PeerBuffers]]:
        """Context of the next exchange's launch. A context adds no frames between layer and
        launch."""
        slot = self._next
        # All ranks start exchanges in the same order, so that their turns agree without a word.
        self._next = (slot + 1) % SLOTS
        pushed = torch.cuda.Event()
        transfer = Transfer(slot, self._started + 1, waves, pushed, sources)
        with self._on_push_stream(after) as stream:
            yield transfer, self._buffers[slot]
            # Behind the push on its stream: `wait` keeps the sources until then.
            pushed.record(stream)
        self._started += 1

    def wait(self, transfer: Transfer, *, side_only: bool = False) -> None:
        """Let the current stream wait for all ranks' rows, or for their side data alone.

        Exchanges are waited for in the order of their starts; one twice for side data, then rows.
        """
        part = 0 if side_only else transfer.waves
        epochs_ahead = transfer.number - self._waited
        wait_peers(self._buffers[transfer.slot], part=part, epochs_ahead=epochs_ahead)
        # On the host, as SEEN is on the device: both count the same waits.
        self._waited = transfer.number
        # Sources may be overwritten after this: this rank's own push has read them all.
        if not side_only:
            torch.cuda.current_stream().wait_event(transfer.pushed)

    def wait_running(self, transfer: Transfer) -> None:
        """Let the current stream wait until this rank's push has its SMs."""
        # The flag of this rank's own side data: it is raised by the push, which has its SMs by
        # then.
        epochs_ahead = transfer.number - self._waited
        wait_peers(self._buffers[transfer.slot], part=0, epochs_ahead=epochs_ahead, own_only=True)

    def rows(self, transfer: Transfer) -> Tensor:
        return self._rows[transfer.slot]

    def side(self, transfer: Transfer) -> Tensor:
        return self._side[transfer.slot]

    def ready_words(self, local: int) -> Tensor:
        if local not in self._ready_words:
            buffers = self._buffers[0]  # flags and counters, which all buffers share
            self._ready_words[local] = ready_words(
                # Addresses, not tensors: a captured kernel reads flags and epoch of the exchange it
                # is in.
                self._memory.data_ptr() + 4 * MAX_RANKS,  # flags of part 1, the first wave
                buffers.state.data_ptr() + SEEN_BYTES,
                buffers.report.data_ptr(),
                limit_ms=buffers.limit_ms,
                ranks=self.ranks,
                wave_stride=MAX_RANKS,
                experts=local,
                waves=self._waves(local),
            ).to(self._memory.device)
        return self._ready_words[local]

    def _waves(self, local: int) -> int:
        # No more waves than experts: others would be empty, each with flags to raise.
        return min(WAVES, local) if self._options.in_waves else 1

    def restart(self) -> None:
        """Restart at the first buffer, after a barrier of all ranks on their streams."""
        # Epochs go on: flags only grow, on all ranks alike.
        self._next = 0

    def release(self) -> None:
        """Drop references to the memory, though the exchange itself may still be referenced."""
        self._rows.clear()
        self._side.clear()
        self._ready_words.clear()
        del self._memory

    def timed_out(self) -> tuple[int, int, int] | None:
        """Rank, epoch and the last epoch that it reached, if a wait for it timed out."""
        rank, epoch, flag, _ = self._buffers[0].report.tolist()
        return (rank - 1, epoch, flag) if rank else None
