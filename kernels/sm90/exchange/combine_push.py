"""Kernel `combine_push`: sums of expert rows to the ranks of their tokens, as experts finish.

The way back of an exchange (with the epochs and flags of `push`), together with the sums
(`combine`): row n goes to rank n // T as soon as the last of its experts here has finished, while
`grouped_gemm` works on later experts. Work comes in waves of experts, or of slices of their rows
(`waves`): warps claim chunks of expert rows, and the last of a token's expert rows sends their sum,
straight from registers.

The forward pass launches it twice: on the few SMs that `grouped_gemm` yields half-way, while that
runs, and after it with all SMs, for the rest. The backward pass launches it once, under the weight
gradients, and sends side data first. With expert replication the last launch also sends single rows
(`UnreducedRows`), after the sums.

    stream of fc2      [ rows: tiles of wave 0 | wave 1 | ...          ][ combine_push, all SMs ]
                          signals  v        v       yields SMs v
    stream of pushes                                [ combine_push, SMs of its own            ]

Roles. All 16 warps of every CTA do the same:

    threads r < R of each CTA   allow exchange u + 1, wait to be allowed u (`Sender`)
    all threads                 backward only: side data, then their flag (`Sender.publish`)
    each warp                   find where waves begin, and the counts that complete them;
                                claim 16 expert rows (atomic on `progress`, one claim ahead);
                                look up their tokens n, and the other expert rows of these;
                                wait until the counts of all waves up to theirs are complete;
                                of each token whose last expert row is here: add its rows in fp32,
                                in the order of slots, and store the sum at rank n // T
    the last warp of all CTAs   of both launches: set `progress` to 0 and the epoch to u, fence of
                                system scope, raise the flags that are left at all ranks

CTAs of the two launches may never be on the GPU together, so none waits for another: a warp waits
for peers, and for counts of fc2, which runs already. The count of finished CTAs spans both
launches: the exchange ends with whichever is last.

Legend: R ranks, T tokens of a rank, N = R * T rows, K slots of a row, S expert rows, D columns, L
experts of a rank.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, Uint32
from torch import Tensor

from phalanx.kernels.sm90.exchange import peer
from phalanx.kernels.sm90.exchange.peer_buffers import EPOCH, MAX_WAVES, STATE, PeerBuffers
from phalanx.kernels.sm90.exchange.sender import (
    WARP,
    WARPS,
    Sender,
    check_sizes,
    look_up,
    side_block,
)
from phalanx.kernels.sm90.exchange.waves import (
    CLAIMED,
    COUNTS,
    FINISHED_CTAS,
    PROGRESS,
    ReadyRows,
    last_wave_of,
    slice_tiles,
)
from phalanx.kernels.sm90.gemm.tensors import array, struct
from phalanx.kernels.sm90.jit import ptx
from phalanx.kernels.sm90.jit.launch import launch, require
from phalanx.kernels.sm90.jit.pointers import IntPtr, IntVecPtr, LongPtr, WordVecPtr

_CHUNK = 16  # expert rows of a claim: 16 lanes share the two dependent loads of their look-up
_PIECES = 8  # 16-byte accesses of a lane in flight
_COPIED = 6  # the same for plain copies: with eight some K run out of registers
_COLUMNS = 8  # bf16 of a 16-byte access
_WORDS = _COLUMNS // 2


@cute.jit
def rotated(number: Int32, count: Int32, rank: Int32, ranks: cutlass.Constexpr) -> Int32:
    """Chunk `number` of `count`, rotated by the rank's share. An expert's rows are in the order of
    their target ranks, and one link cannot receive from all ranks at once."""
    # A rotation leaves neighbours next to each other: chunks of one expert stay together in time.
    begin = number + count * rank // ranks
    return cutlass.select_(begin >= count, begin - count, begin)


class UnreducedRows(NamedTuple):
    """Expert rows that are sent unreduced, each to slot k and token t of its token's rank."""

    pairs_S: Tensor  # int32: pairs n * K + k of these rows; arbitrary past `count`
    count: Tensor  # type: ignore[assignment]  # hides tuple.count, which nobody calls
    """int32 [1]: their number."""
    inverse_NK: Tensor  # int32: expert rows of all pairs
    memory_R: Tensor  # int64, addresses of [K, T, D] of each rank


@dataclass(frozen=True)
class CombinePushConfig:
    """Choices that are compiled into a `combine_push` kernel."""

    slots: int  # K
    ranks: int
    side: bool = False  # side data are sent before the sums
    unreduced_rows: bool = False  # rows are sent unreduced, too

    def __post_init__(self) -> None:
        check_sizes("combine_push", self.ranks, self.slots)


class CombinePushKernel:
    """Sums of finished experts' rows to their ranks, then a flag to each."""

    def __init__(self, config: CombinePushConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self,
        y: WordVecPtr,
        index: IntPtr,
        inverse: IntPtr,
        offsets: IntPtr,
        side: IntVecPtr,
        rows_R: LongPtr,
        side_R: LongPtr,
        flags_R: LongPtr,
        state: IntPtr,
        report: IntPtr,
        progress: IntPtr,
        pairs: IntPtr,
        count: IntPtr,
        inverse_of_all: IntPtr,
        memory_R: LongPtr,
        T: Int32,
        width: Int32,
        local: Int32,
        rank: Int32,
        limit: Int32,
        waves: Int32,
        tile_rows: Int32,
        counts: Int32,
        bits: Int32,
        total_ctas: Int32,
        pieces: Int32,
        ctas: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """`width` = D / 8, `local` experts, `limit` in milliseconds; waves to bits as in
        `ReadyRows`; CTAs of all launches; `pieces` of 16 bytes of a block of side data; CTAs."""
        ranks = self.config.ranks
        self.kernel(
            y,
            index,
            inverse,
            offsets,
            side,
            cute.make_tensor(rows_R, cute.make_layout(ranks)),
            cute.make_tensor(side_R, cute.make_layout(ranks)),
            cute.make_tensor(flags_R, cute.make_layout(ranks)),
            cute.make_tensor(state, cute.make_layout(STATE)),
            report,
            progress,
            (pairs, count, inverse_of_all, memory_R),
            (
                *(T, width, local, rank, limit, waves, tile_rows, counts, bits),
                *(total_ctas, pieces, ctas),
            ),
        ).launch(
            grid=[ctas, 1, 1],
            block=[WARPS * WARP, 1, 1],
            # One CTA a SM leaves a thread up to 128 registers: `_send` holds 64 sums and 32 words.
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        y: cute.Pointer,
        index: cute.Pointer,
        inverse: cute.Pointer,
        offsets: cute.Pointer,
        side: cute.Pointer,
        rows_R: cute.Tensor,
        side_R: cute.Tensor,
        flags_R: cute.Tensor,
        state: cute.Tensor,
        report: cute.Pointer,
        progress: cute.Pointer,
        unreduced_rows: tuple[cute.Pointer, cute.Pointer, cute.Pointer, cute.Pointer],
        sizes: tuple[Int32, ...],
    ) -> None:
        slots = self.config.slots
        T, width, local, rank, limit, waves, tile_rows, counts, bits, all_ctas, pieces, ctas = sizes
        lane = cute.arch.lane_idx()
        storage = cutlass.utils.SmemAllocator().allocate(
            struct(finished_warps=array(Int32, 2), entries=array(Int32, WARPS * _CHUNK * slots))
        )
        # In shared memory lane k can read slot k of another lane's row; a part for each warp needs
        # no barrier but `sync_warp`.
        all_entries = storage.entries.get_tensor(cute.make_layout((slots, _CHUNK, WARPS)))
        entries_of_rows = all_entries[None, None, cute.arch.warp_idx()]
        sender = Sender(
            storage.finished_warps.get_tensor(cute.make_layout(2)),
            *(progress + CLAIMED, state, flags_R, rank, all_ctas, limit, report),
        )
        claim, last_of_all, raise_flags = sender.claim, sender.last_of_all, sender.raise_flags
        epoch = sender.epoch
        # Side data, gradients of probabilities, are complete before this launch.
        if cutlass.const_expr(self.config.side):
            sender.send_side(side, side_R, pieces, True)
            sender.publish(Int32(0), Int32(1))
        ends = cute.make_tensor(offsets, cute.make_layout(local + 1))
        # Each warp finds the waves itself, from offsets in L2: no barrier, nothing is shared.
        begins, needed = self._waves(ends, bits, local << bits, waves, tile_rows, counts)
        chunks, chunks_before = self._chunks(begins)
        ready_waves, total = Int32(0), cute.arch.shuffle_sync(chunks_before, WARP - 1)
        entries = cute.make_rmem_tensor(slots, Int32)
        claimed = cute.arch.shuffle_sync(claim(), 0)
        while claimed < total:
            # One claim ahead: its atomic returns under the work on this one.
            following = claim()
            # Lane w has the chunks before wave w: the last wave that begins at the claim or before.
            wave = cute.arch.popc(cute.arch.vote_ballot_sync(chunks_before <= claimed)) - 1
            row = self._row(claimed, wave, begins, chunks, chunks_before, rank)
            n, target = Int32(0), Int64(0)  # lanes without a row look up row 0, and send nothing
            if row >= 0:
                n = cute.make_tensor(index + row, cute.make_layout(1))[0]
                # Token t of rank r is row n = r * T + t; at r, sums of this rank begin at rank * T.
                target_rank = n // T
                row_there = Int64((rank - target_rank) * T + n)
                target = rows_R[target_rank] + row_there * width * 16
            look_up(inverse, entries, n, self.config.ranks * T)
            # Expert rows are in the order of experts, as waves are: once a token's last row is
            # complete, all are. Its lane sends the sum, so that each is sent once.
            last = Int32(-1)
            for k in cutlass.range_constexpr(slots):
                last = cutlass.max(last, entries[k])
                if lane < _CHUNK:
                    entries_of_rows[k, lane] = entries[k]
            senders = cute.arch.vote_ballot_sync((row >= 0) & (last == row))
            cute.arch.sync_warp()  # entries of all lanes are in shared memory before others read
            # Lanes wait for one wave each. Waves that have been seen complete stay so.
            if ready_waves <= wave:
                if (lane >= ready_waves) & (lane <= wave):
                    # Counters of this GPU; the report names this rank if fc2 completes no wave.
                    # The acquire matches the fence before each count (`waves.Signaller`).
                    # 0 is needed of rows that were complete before, and is there at once.
                    counter = progress.toint() + 4 * Int64(COUNTS + lane)
                    peer.wait(counter, needed, limit, report.toint(), rank)
                cute.arch.sync_warp()  # what one lane has acquired, all lanes may read
                ready_waves = wave + 1
            while senders != 0:
                # All lanes send one sum: lane k knows the row of slot k, and every lane takes the
                # columns of its pieces.
                source, row_of_lane = ptx.lowest(senders), Int32(-1)
                senders = senders & (senders - 1)
                if lane < slots:
                    row_of_lane = entries_of_rows[lane, source]
                self._send(y, cute.arch.shuffle_sync(target, source), row_of_lane, width)
            cute.arch.sync_warp()  # all lanes have read the entries before they are overwritten
            claimed = cute.arch.shuffle_sync(following, 0)
        if cutlass.const_expr(self.config.unreduced_rows):
            self._send_unreduced_rows(y, *unreduced_rows, T, width, rank, ctas)
        # As in `Sender.publish`, but over the CTAs of both launches.
        cute.arch.sync_warp()
        if lane == 0:
            warps = sender.finished_warps.iterator + 1
            if last_of_all(warps, progress + FINISHED_CTAS) == 1:
                # Counters are reset for the next exchange before the flags say that this one is
                # over.
                counters = cute.make_tensor(progress, cute.make_layout(PROGRESS))
                counters.fill(0)
                state[EPOCH] = epoch
                # One fence for all flags; the side data's, if any, were raised when they were sent.
                cute.arch.fence_acq_rel_sys()
                for part in cutlass.range_constexpr(1 if self.config.side else 0, 2):
                    raise_flags(part)

    @cute.jit
    def _waves(
        self,
        ends: cute.Tensor,
        bits: Int32,
        slices: Int32,
        waves: Int32,
        tile_rows: Int32,
        counts: Int32,
    ) -> tuple[Int32, Int32]:
        """In lane w, the first expert row of wave w, and the tile counts that complete it."""
        # A lane takes every 32nd slice, and adds to registers of all waves by selects: an index
        # that is not known at compile time would put them into local memory.
        lane, rows = cute.arch.lane_idx(), ends[cute.size(ends) - 1]
        tiles = cute.make_rmem_tensor(MAX_WAVES, Int32)
        first = cute.make_rmem_tensor(MAX_WAVES, Int32)
        tiles.fill(0)
        first.fill(rows)
        for base in cutlass.range(0, slices, WARP):
            number = base + lane
            if number < slices:
                expert = number >> bits
                wave = last_wave_of(number, slices, waves)
                begin, end = ends[expert], ends[expert + 1]
                # Tiles are counted as fc2 makes them: an expert's last tile may have few rows.
                all_tiles = (end - begin + tile_rows - 1) // tile_rows
                height = slice_tiles(all_tiles, bits)
                before = (number - (expert << bits)) * height
                some = cutlass.max(cutlass.min(all_tiles - before, height), 0)
                row = cutlass.min(begin + before * tile_rows, end)
                # An empty wave begins where the next one does, hence the minimum over later waves.
                for w in cutlass.range_constexpr(MAX_WAVES):
                    tiles[w] += cutlass.select_(wave == w, some, Int32(0))
                    first[w] = cutlass.select_(wave >= w, cutlass.min(first[w], row), first[w])
        begins, needed = rows, Int32(0)
        # Over the lanes, and from registers of all waves to one lane a wave.
        for w in cutlass.range_constexpr(MAX_WAVES):
            row = cute.arch.warp_redux_sync(first[w], "min")
            total = cute.arch.warp_redux_sync(tiles[w], "add")
            begins = cutlass.select_(lane == w, row, begins)
            needed = cutlass.select_(lane == w, total * counts, needed)
        return begins, needed

    @cute.jit
    def _chunks(self, begins: Int32) -> tuple[Int32, Int32]:
        """In lane w, the chunks of wave w, and of all waves before it."""
        lane = cute.arch.lane_idx()
        rows = cute.arch.shuffle_sync(begins, cutlass.min(lane + 1, WARP - 1)) - begins
        chunks = (rows + _CHUNK - 1) // _CHUNK
        # Chunks do not cross waves, whose last one may have few rows. Prefix sum over the lanes.
        inclusive = chunks
        for step in cutlass.range_constexpr(5):
            below = cute.arch.shuffle_sync_up(inclusive, 1 << step)
            inclusive = cutlass.select_(lane >= 1 << step, inclusive + below, inclusive)
        return chunks, inclusive - chunks

    @cute.jit
    def _row(
        self,
        claimed: Int32,
        wave: Int32,
        begins: Int32,
        chunks: Int32,
        chunks_before: Int32,
        rank: Int32,
    ) -> Int32:
        lane, count = cute.arch.lane_idx(), cute.arch.shuffle_sync(chunks, wave)
        number = claimed - cute.arch.shuffle_sync(chunks_before, wave)
        number = rotated(number, count, rank, self.config.ranks)
        row = cute.arch.shuffle_sync(begins, wave) + number * _CHUNK + lane
        inside = (lane < _CHUNK) & (row < cute.arch.shuffle_sync(begins, wave + 1))
        return cutlass.select_(inside, row, Int32(-1))

    @cute.jit
    def _send(self, y: cute.Pointer, target: Int64, row_of_lane: Int32, width: Int32) -> None:
        """Store the sum of y's rows, one a lane (negative: none), at address `target`."""
        lane = cute.arch.lane_idx()
        # Slots are added from the lowest on: the bits are those of `combine`, in any order of
        # arrival.
        mask = cute.arch.vote_ballot_sync(row_of_lane >= 0)
        for part in cutlass.range((width + _PIECES * WARP - 1) // (_PIECES * WARP)):
            first = part * (_PIECES * WARP) + lane
            sums = cute.make_rmem_tensor((_COLUMNS, _PIECES), Float32)
            sums.fill(0)
            left = mask
            while left != 0:
                row = cute.arch.shuffle_sync(row_of_lane, ptx.lowest(left))
                left = left & (left - 1)
                words = cute.make_rmem_tensor((_WORDS, _PIECES), Uint32)
                words.fill(0)
                # Loads of all pieces before the first sum: the lane waits for them once.
                for p in cutlass.range_constexpr(_PIECES):
                    if first + p * WARP < width:
                        at = y.toint() + (Int64(row) * width + first + p * WARP) * 16
                        loaded = peer.load_global(at)
                        for w in cutlass.range_constexpr(_WORDS):
                            words[w, p] = loaded[w]
                for p in cutlass.range_constexpr(_PIECES):
                    for w in cutlass.range_constexpr(_WORDS):
                        low, high = ptx.unpack(words[w, p])
                        sums[2 * w, p] += low
                        sums[2 * w + 1, p] += high
            # Straight to the peer, rounded once; the flag's fence comes after all of them.
            for p in cutlass.range_constexpr(_PIECES):
                if first + p * WARP < width:
                    rounded = [ptx.pack(sums[2 * w, p], sums[2 * w + 1, p]) for w in range(_WORDS)]
                    ptx.store_global(target + Int64(first + p * WARP) * 16, *rounded)

    @cute.jit
    def _send_unreduced_rows(
        self,
        y: cute.Pointer,
        pairs: cute.Pointer,
        count: cute.Pointer,
        inverse: cute.Pointer,
        memory_R: cute.Pointer,
        T: Int32,
        width: Int32,
        rank: Int32,
        ctas: Int32,
    ) -> None:
        ranks, slots = cutlass.const_expr(self.config.ranks), cutlass.const_expr(self.config.slots)
        # No wait: the launch comes after the whole GEMM. No claim: every row is one copy.
        total = cute.make_tensor(count, cute.make_layout(1))[0]
        first = cute.arch.block_idx()[0] * WARPS + cute.arch.warp_idx()
        addresses = cute.make_tensor(memory_R, cute.make_layout(ranks))
        for number in cutlass.range(first, total, ctas * WARPS):
            # See `rotated`: all ranks would otherwise send to the same one.
            turned = rotated(number, total, rank, ranks)
            pair = cute.make_tensor(pairs + turned, cute.make_layout(1))[0]
            row = cute.make_tensor(inverse + pair, cute.make_layout(1))[0]
            # Unsigned divisions are shorter, and pairs are never negative here.
            n = Int32(Uint32(pair) // Uint32(slots))
            target = Int32(Uint32(n) // Uint32(T))
            # Slot k = pair - n * slots and token t = n - target * T: row k * T + t of [K, T].
            at = (pair - n * slots - target) * T + n
            self._copy(
                y.toint() + Int64(row) * width * 16,
                addresses[target] + Int64(at) * width * 16,
                width,
            )

    @cute.jit
    def _copy(self, source: Int64, target: Int64, width: Int32) -> None:
        for part in cutlass.range((width + _COPIED * WARP - 1) // (_COPIED * WARP)):
            first = part * (_COPIED * WARP) + cute.arch.lane_idx()
            words = cute.make_rmem_tensor((_WORDS, _COPIED), Uint32)
            for p in cutlass.range_constexpr(_COPIED):
                if first + p * WARP < width:
                    loaded = peer.load_global(source + Int64(first + p * WARP) * 16)
                    for w in cutlass.range_constexpr(_WORDS):
                        words[w, p] = loaded[w]
            for p in cutlass.range_constexpr(_COPIED):
                if first + p * WARP < width:
                    copied = [words[w, p] for w in range(_WORDS)]
                    ptx.store_global(target + Int64(first + p * WARP) * 16, *copied)


def combine_push(
    ready: ReadyRows,
    index_S: Tensor,
    inverse_NK: Tensor,
    offsets: Tensor,
    buffers: PeerBuffers,
    *,
    tokens: int,
    ctas: int,
    total_ctas: int,
    side: Tensor | None = None,
    unreduced_rows: UnreducedRows | None = None,
) -> None:
    """Launch a way back, after the launch of the `grouped_gemm` whose rows it sends.

    Of two launches, one is for another stream. Both wait for all rows of the GEMM, which has to be
    launched before them: its code could not be loaded while kernels wait for it.

    Args:
        ready: y [S, D], bf16, D a multiple of 8, and its progress.
        index_S: int32 received rows of expert rows.
        inverse_NK: int32 expert rows of received rows, -1 for none. A received row without any is
            not sent: nobody waits for it, or its rows exceeded y's capacity, and the step is
            repeated (`parallel.dispatcher.capacity`).
        offsets: int32 [L + 1].
        ctas, total_ctas: of this launch, and of all launches.
        side: contiguous, one of R equal blocks to each rank, in multiples of 16 bytes.
        unreduced_rows: sent in the last launch, after the whole GEMM.

    Raises:
        ValueError: a shape, dtype, stride, device or size that the kernel does not take.
    """
    where, ranks, y_SD = ready.rows_SD.device, buffers.rows_R.numel(), ready.rows_SD
    K, D = inverse_NK.shape[1], y_SD.shape[1]
    if D % _COLUMNS:
        raise ValueError(f"y has {D} columns: they must be a multiple of {_COLUMNS}")
    require(
        where,
        y=(y_SD, torch.bfloat16, None),
        index=(index_S, torch.int32, y_SD.shape[:1]),
        inverse=(inverse_NK, torch.int32, (ranks * tokens, K)),
        offsets=(offsets, torch.int32, None),
        progress=(ready.progress, torch.int32, (PROGRESS,)),
    )
    if unreduced_rows is not None:
        require(
            where,
            pairs=(unreduced_rows.pairs_S, torch.int32, y_SD.shape[:1]),
            count=(unreduced_rows.count, torch.int32, (1,)),
            inverse_of_all=(unreduced_rows.inverse_NK, torch.int32, inverse_NK.shape),
            memory=(unreduced_rows.memory_R, torch.int64, (ranks,)),
        )
    block = 0 if side is None else side_block(side, ranks)
    pairs, count, inverse_of_all, memory_R = unreduced_rows or (None,) * 4
    launch(
        CombinePushKernel,
        CombinePushConfig(
            K, ranks, side=side is not None, unreduced_rows=unreduced_rows is not None
        ),
        **dict(y=y_SD, index=index_S, inverse=inverse_NK, offsets=offsets, side=side),
        **buffers.arguments(),
        progress=ready.progress,
        **dict(pairs=pairs, count=count, inverse_of_all=inverse_of_all, memory_R=memory_R),
        **dict(T=tokens, width=D // _COLUMNS, local=offsets.numel() - 1, pieces=block // 16),
        **dict(waves=ready.waves, tile_rows=ready.tile_rows, counts=ready.tile_counts),
        **dict(bits=ready.slice_bits, total_ctas=total_ctas, ctas=ctas),
    )
