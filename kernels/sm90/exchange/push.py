"""Kernels `push` and `wait_peers`: rows to the memory of other GPUs, and waiting for theirs.

One exchange between the R GPUs of a group: each pushes rows to addresses that nobody else writes,
then raises a flag at every peer; each waits for the flags of all. Row n of rank `me` is written to
row me * T + n % T of its targets. `push` sends

    tokens (N = T) to the ranks of their experts, once to a rank however many experts it has there,
    or sums (N = R * T) of this rank's experts back: row n to rank n // T if it is for one of them,

together with a dense block of side data for each rank, which goes first. Tokens go in waves of a
rank's experts: each in the wave of its first expert there. Side data and every wave have flags of
their own (`peer_buffers`), so that experts can begin before all tokens have arrived.

Epochs, flags and claims are a `Sender`'s, as for `combine_push`.

Roles. All 16 warps of every CTA do the same; a few SMs of them have enough accesses in flight to
fill the links. What one rank does in exchange u:

    threads r < R of each CTA   CTA 0: set flag ALLOWED + me at rank r to u + 1;
                                wait until flag ALLOWED + r here is u or more
    all threads                 send side data, 16 bytes a thread; publish part 0
    each warp                   claim 8 rows (atomic on `state`, two claims ahead); before the first
                                claim of a later wave, publish the parts of those before it;
                                look up the ranks that the rows go to in this wave;
                                row by row: 8 x 16 bytes a lane to registers, and to these ranks

Barriers and fences. A CTA meets once, behind its wait for ALLOWED (`Sender`). From then on each
warp is on its own: counts tell the last one, which makes a fence of system scope before it raises
flags. A lane that waits acquires a flag at that scope, and so sees the rows stored before it.

Flags are read by `wait_peers`, for a stream, and by kernels that wait for waves (`waves.WaveWait`).

Legend: R ranks, N rows, T tokens of a rank, K slots of a token, D columns.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64, Uint32
from torch import Tensor

from phalanx.kernels.sm90.exchange import peer
from phalanx.kernels.sm90.exchange.peer_buffers import (
    CLAIMED,
    MAX_RANKS,
    MAX_WAVES,
    SEEN,
    STATE,
    PeerBuffers,
)
from phalanx.kernels.sm90.exchange.sender import (
    WARP,
    WARPS,
    Sender,
    check_sizes,
    look_up,
    side_block,
)
from phalanx.kernels.sm90.exchange.waves import parts_before
from phalanx.kernels.sm90.gemm.tensors import array, struct
from phalanx.kernels.sm90.jit import ptx
from phalanx.kernels.sm90.jit.launch import launch, require
from phalanx.kernels.sm90.jit.pointers import IntPtr, IntVecPtr, LongPtr

_CHUNK = 8  # rows of a warp's claim, which as many lanes look up at once
_PIECES = 8  # 16-byte accesses of a lane in flight


@cute.jit
def block_rows(
    number: Int32, T: Int32, rank: Int32, ranks: cutlass.Constexpr, chunk: cutlass.Constexpr
) -> tuple[Int32, Int32]:
    """First row and end of a chunk of rows that go back, in blocks of T, one for each rank. Chunks
    alternate between the blocks, and every rank starts with another one: in the same order all
    ranks would write to the same rank at a time."""
    # Chunk i of the blocks comes R times in succession, each time for another rank.
    target = (number + rank) % ranks
    return target * T + number // ranks * chunk, (target + 1) * T


@dataclass(frozen=True)
class PushConfig:
    """Choices that are compiled into a `push` kernel."""

    row_bytes: int
    ranks: int
    slots: int  # K
    back: bool  # send sums back to the tokens' ranks, instead of tokens to their experts' ranks

    def __post_init__(self) -> None:
        if self.row_bytes % 16 or self.row_bytes < 16:
            raise ValueError(f"rows of {self.row_bytes} bytes: push takes multiples of 16")
        check_sizes("push", self.ranks, self.slots)

    @property
    def width(self) -> int:
        return self.row_bytes // 16


class PushKernel:
    """Rows and side data to their target ranks, then a flag to each rank."""

    def __init__(self, config: PushConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self,
        rows: IntVecPtr,
        table: IntPtr,
        side: IntVecPtr,
        rows_R: LongPtr,
        side_R: LongPtr,
        flags_R: LongPtr,
        state: IntPtr,
        report: IntPtr,
        N: Int32,
        T: Int32,
        local: Int32,
        rank: Int32,
        pieces: Int32,
        limit: Int32,
        ctas: Int32,
        waves: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """`local` experts a rank; `pieces` of 16 bytes in a block of side data; `limit` in ms."""
        ranks = self.config.ranks
        self.kernel(
            rows,
            table,
            side,
            cute.make_tensor(rows_R, cute.make_layout(ranks)),
            cute.make_tensor(side_R, cute.make_layout(ranks)),
            cute.make_tensor(flags_R, cute.make_layout(ranks)),
            cute.make_tensor(state, cute.make_layout(STATE)),
            report,
            (N, T, local, rank, pieces, limit, ctas, waves),
        ).launch(
            grid=[ctas, 1, 1],
            block=[WARPS * WARP, 1, 1],
            # One CTA a SM leaves a thread up to 128 registers, for the accesses in flight.
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        rows: cute.Pointer,
        table: cute.Pointer,
        side: cute.Pointer,
        rows_R: cute.Tensor,
        side_R: cute.Tensor,
        flags_R: cute.Tensor,
        state: cute.Tensor,
        report: cute.Pointer,
        sizes: tuple[Int32, ...],
    ) -> None:
        config = self.config
        N, T, local, rank, pieces, limit, ctas, waves = sizes
        lane = cute.arch.lane_idx()
        storage = cutlass.utils.SmemAllocator().allocate(
            struct(finished_warps=array(Int32, 1 + MAX_WAVES))
        )
        sender = Sender(
            storage.finished_warps.get_tensor(cute.make_layout(1 + MAX_WAVES)),
            *(state.iterator + CLAIMED, state, flags_R, rank, ctas, limit, report),
        )
        claim, publish = sender.claim, sender.publish
        # Side data, the routing, go first: receivers plan with it while rows are in flight.
        sender.send_side(side, side_R, pieces, config.back)
        # All warps, with side data or without: the part's flag counts them.
        publish(Int32(0), waves)
        # Loaded once: a row's stores then wait for no address.
        targets = [rows_R[r] for r in range(config.ranks)]
        # Claims count on through the waves: claim w * chunks + c is chunk c in wave w, and `sent`
        # is the last part that this warp has published.
        chunks, sent = (T + _CHUNK - 1) // _CHUNK, Int32(0)
        if cutlass.const_expr(config.back):
            chunks = config.ranks * chunks
        claimed = cute.arch.shuffle_sync(claim(), 0)
        # Claims past the last one are harmless: the last warp of the exchange zeroes the counter.
        following = cute.arch.shuffle_sync(claim(), 0)
        entries = cute.make_rmem_tensor(config.slots, Int32)
        base, end = self._chunk(claimed % chunks, T, rank)
        # Lane l has the table's row of the chunk's row l, one of the first 8 lanes.
        look_up(table, entries, base + lane, N)
        while claimed < chunks * waves:
            # Two claims ahead: one atomic in flight, and a chunk whose table rows are being loaded.
            after = claim()
            wave = claimed // chunks
            # This warp has sent its rows of all earlier waves. A wave of which it claimed nothing
            # is published all the same, as every warp is counted.
            while sent < wave:
                sent += 1
                # `publish` waits for nobody, so that warps of one CTA may be in different waves.
                publish(sent, waves)
            row = N  # no row: `_targets` names no rank for it
            if (lane < _CHUNK) & (base + lane < end):
                row = base + lane
            # Bit r: rank r gets the row in this wave. Rows are looked at again in each wave, and
            # sent to a rank once.
            wanted = self._targets(entries, row, N, T, local, rank, wave, waves)
            base_after, end_after = self._chunk(following % chunks, T, rank)
            # Loads of the next chunk's entries, whose registers are free, return under the copies.
            look_up(table, entries, base_after + lane, N)
            # All lanes copy one row after the other, of those that a rank wants.
            bits = cute.arch.vote_ballot_sync(wanted != 0)
            while bits != 0:
                source = ptx.lowest(bits)
                bits = bits & (bits - 1)
                # On the way back n % T is the token of its rank; on the way there it is n.
                row_there = rank * T + (base + source) % T
                ranks_of_row = cute.arch.shuffle_sync(wanted, source)
                self._send_row(rows, base + source, targets, row_there, ranks_of_row)
            base, end = base_after, end_after
            claimed, following = following, cute.arch.shuffle_sync(after, 0)
        # Nothing is left to claim: the parts that this warp has not yet published.
        while sent < waves:
            sent += 1
            publish(sent, waves)

    def _chunk(self, number: Int32, T: Int32, rank: Int32) -> tuple[Int32, Int32]:
        if self.config.back:
            return block_rows(number, T, rank, self.config.ranks, _CHUNK)
        return number * _CHUNK, T

    @cute.jit
    def _send_row(
        self,
        rows: cute.Pointer,
        row: Int32,
        targets: list[Int64],
        row_there: Int32,
        wanted: Int32,
    ) -> None:
        """Copy a row to row `row_there` of the ranks whose bits are set in `wanted`."""
        width, lane = self.config.width, cute.arch.lane_idx()
        source = rows.toint() + Int64(row) * self.config.row_bytes
        # The same in every rank's buffer: a row's place follows from its sender and token.
        offset = Int64(row_there) * self.config.row_bytes
        for part in cutlass.range(-(-width // (_PIECES * WARP))):
            first = part * (_PIECES * WARP) + lane
            words = cute.make_rmem_tensor((4, _PIECES), Uint32)
            # All loads before the first store: each lane waits once for its `_PIECES` accesses.
            for p in cutlass.range_constexpr(_PIECES):
                piece = first + p * WARP
                if piece < width:
                    loaded = peer.load_global(source + Int64(piece) * 16)
                    for w in cutlass.range_constexpr(4):
                        words[w, p] = loaded[w]
            # Read once, written to each rank. `publish` orders these plain stores before the flag.
            for r in cutlass.range_constexpr(self.config.ranks):
                # The same in all lanes: the warp does not diverge.
                if (wanted >> r) & 1 == 1:
                    for p in cutlass.range_constexpr(_PIECES):
                        piece = first + p * WARP
                        if piece < width:
                            target = targets[r] + offset + Int64(piece) * 16
                            ptx.store_global(target, *[words[w, p] for w in range(4)])

    @cute.jit
    def _targets(
        self,
        entries: cute.Tensor,
        row: Int32,
        N: Int32,
        T: Int32,
        local: Int32,
        rank: Int32,
        wave: Int32,
        waves: Int32,
    ) -> Int32:
        # Bits of ranks: those with an expert of the row in this wave, and in an earlier one.
        this_wave, before = Int32(0), Int32(0)
        # Shares of the experts, times local * parts: compared without a division.
        begin = local * parts_before(wave, local, waves)
        end = local * parts_before(wave + 1, local, waves)
        parts = parts_before(waves, local, waves)
        for k in cutlass.range_constexpr(self.config.slots):
            # -1 is an empty slot; N stands for a lane without a row.
            if (entries[k] >= 0) & (row < N):
                owner = entries[k] // local
                # Back, a row goes to its token's rank if an expert of this rank has computed it;
                # there, to the owner of each expert.
                if cutlass.const_expr(self.config.back):
                    if owner == rank:
                        this_wave = Int32(1) << (row // T)
                else:
                    scaled = (entries[k] - owner * local) * parts
                    if scaled < begin:
                        before = before | (Int32(1) << owner)
                    elif scaled < end:
                        this_wave = this_wave | (Int32(1) << owner)
        # A rank that has the row from an earlier wave does not get it twice.
        return this_wave & ~before


@dataclass(frozen=True)
class WaitPeersConfig:
    """Choices that are compiled into a `wait_peers` kernel."""

    ranks: int


class WaitPeersKernel:
    """Wait until a part of an exchange has arrived from all ranks, or was sent by this one."""

    def __init__(self, config: WaitPeersConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self,
        flags_R: LongPtr,
        state: IntPtr,
        report: IntPtr,
        rank: Int32,
        limit: Int32,
        part: Int32,
        epochs_ahead: Int32,
        own_only: Int32,
        counts: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """`limit` in milliseconds; other arguments as those of `wait_peers`."""
        self.kernel(
            flags_R, state, report, rank, limit, part, epochs_ahead, own_only, counts
        ).launch(grid=[1, 1, 1], block=[WARP, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self,
        flags_R: cute.Pointer,
        state: cute.Pointer,
        report: cute.Pointer,
        rank: Int32,
        limit: Int32,
        part: Int32,
        epochs_ahead: Int32,
        own_only: Int32,
        counts: Int32,
    ) -> None:
        lane = cute.arch.thread_idx()[0]
        # Counted on the device, like EPOCH: a captured wait is replayed for later exchanges.
        seen = cute.make_tensor(state + SEEN, cute.make_layout(1))
        # Relative, so that a replayed graph waits for the exchange of the replay. A number from the
        # host would be that of the capture, whose flags have long been reached.
        epoch = seen[0] + epochs_ahead
        cute.arch.sync_warp()  # all lanes have read `seen` before lane 0 writes it below
        if lane < self.config.ranks and (own_only == 0 or lane == rank):
            flags = cute.make_tensor(flags_R, cute.make_layout(self.config.ranks))[rank]
            # One lane a rank, whose acquire orders the stream's later reads behind the rows: the
            # end of this kernel makes them visible to the next one.
            flag = flags + 4 * Int64(part * MAX_RANKS + lane)
            peer.wait(flag, epoch, limit, report.toint(), lane)
        # Kernels behind this one in the stream read it: `ready` waits for waves of this exchange. A
        # plain store: only waits of the same stream write it, and they follow one another.
        if lane == 0 and counts == 1:
            seen[0] = epoch


def push(
    rows_ND: Tensor,
    table_NK: Tensor,
    side: Tensor,
    buffers: PeerBuffers,
    *,
    tokens: int,
    local_experts: int,
    ctas: int,
    back: bool = False,
    waves: int = 1,
) -> None:
    """Push rows and side data of one exchange, and raise a flag at all ranks for each part.

    Args:
        rows_ND: bf16, contiguous; T rows, or `back` R * T rows.
        table_NK: int32, contiguous: global expert ids of the rows, -1 for an empty slot.
        side: contiguous; all of it to every rank, or `back` one of R equal blocks to each. In
            multiples of 16 bytes; may be empty.
        tokens: T.
        local_experts: experts of a rank; rank r has those from r * local_experts on.
        ctas: number of CTAs, one a SM.
        back: rows go back to the ranks of their tokens.
        waves: groups of a rank's experts, each with a flag for its tokens; 1 with `back`.

    Raises:
        ValueError: a shape, dtype, stride, device or size that the kernel does not take.
    """
    where, ranks = rows_ND.device, buffers.rows_R.numel()
    N, D = rows_ND.shape
    require(
        where,
        rows=(rows_ND, torch.bfloat16, ((ranks if back else 1) * tokens, D)),
        table=(table_NK, torch.int32, (N, table_NK.shape[1])),
        side=(side, side.dtype, None),
    )
    block = side_block(side, ranks if back else 1)
    if not N:
        raise ValueError("rows must have a row at least")
    if not 1 <= waves <= (1 if back else MAX_WAVES):
        raise ValueError(f"waves={waves}: 1 to {MAX_WAVES}, and 1 on the way back")
    launch(
        PushKernel,
        PushConfig(2 * D, ranks, table_NK.shape[1], back),
        **dict(rows=rows_ND, table=table_NK, side=side),
        **buffers.arguments(),
        **dict(N=N, T=tokens, local=local_experts, pieces=block // 16, waves=waves),
        ctas=ctas,
    )


def wait_peers(
    buffers: PeerBuffers,
    *,
    part: int = 1,
    epochs_ahead: int = 1,
    own_only: bool = False,
    counts: bool | None = None,
) -> None:
    """Let the current stream wait for a part of an exchange from all ranks.

    Args:
        part: 0 for the side data, 1 + w for wave w, which arrives after those before it.
        epochs_ahead: exchanges since the last one that was waited for; 0 is that one.
        own_only: only until this rank has sent the part, hence its push is running.
        counts: make it the last one that was waited for. Default: unless `own_only`.
    """
    ranks = buffers.rows_R.numel()
    counts = not own_only if counts is None else counts
    arguments = buffers.arguments()
    # A wait reads flags alone: what has arrived is read by the kernels behind it.
    del arguments["rows_R"], arguments["side_R"]
    launch(
        WaitPeersKernel,
        WaitPeersConfig(ranks),
        **arguments,
        **dict(part=part, epochs_ahead=epochs_ahead, own_only=int(own_only), counts=int(counts)),
    )
