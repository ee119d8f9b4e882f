"""Kernel `combine_push`: sums of expert rows to the ranks of their tokens, as experts finish.

The way back of an exchange (`push`, whose epochs and flags these are), together with the sums that
it brings (`combine`): row n goes to rank n // T as soon as the last of its experts here has
finished, while `rows` works on the experts after it. Work comes in waves of experts, or of slices
of the rows of few ones (`waves`): wave after wave, warps claim chunks of expert rows, and the last
one of a token's expert rows sends their sum, straight from registers.

In the forward pass it is launched twice: on the few SMs that `rows` yields half-way, while that
runs; and after it on its stream with all SMs, for what is left. In the backward pass it is launched
once, under the weight gradients, and also sends side data, before the rows. Where experts are
replicated the last launch also sends rows that go by themselves (`UnreducedRows`), after the sums.

    stream of rows     [ rows: tiles of wave 0 | wave 1 | ...          ][ combine_push, all SMs ]
                          signals  v        v       yields SMs v
    stream of pushes                                [ combine_push, comm_sms                  ]

Roles. All 16 warps of every CTA do the same:

    threads r < R of each CTA   allow exchange u + 1, wait to be allowed u (`push.open_exchange`)
    all threads                 backward only: side data, then their flag (`push.publish`)
    each warp                   find where waves begin, and the counts that complete them;
                                claim 16 expert rows (atomic on `progress`, one claim ahead);
                                look up their tokens n, and the other expert rows of these;
                                wait until the counts of all waves up to theirs are complete;
                                of each token whose last expert row is here: add its rows in fp32,
                                in the order of slots, and store the sum at rank n // T
    the last warp of all CTAs   of both launches: set `progress` to 0 and the epoch to u, fence,
                                raise all flags that have not been raised at all ranks

Legend: R ranks, T tokens of a rank, N = R * T rows, K slots of a row, S expert rows, D columns, L
experts of a rank.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, Uint32
from torch import Tensor

from phalanx.kernels.sm90.exchange import peer
from phalanx.kernels.sm90.exchange.peer_buffers import EPOCH, MAX_WAVES, STATE, PeerBuffers
from phalanx.kernels.sm90.exchange.push import (
    WARPS,
    check_sizes,
    claim,
    last_of_all,
    look_up,
    open_exchange,
    publish,
    raise_flags,
    send_side,
    side_block,
)
from phalanx.kernels.sm90.exchange.tile_progress import (
    CLAIMED,
    COUNTS,
    FINISHED_CTAS,
    PROGRESS,
    ReadyRows,
)
from phalanx.kernels.sm90.exchange.waves import last_wave_of, slice_tiles
from phalanx.kernels.sm90.gemm.storage import array, struct
from phalanx.kernels.sm90.jit import ptx
from phalanx.kernels.sm90.jit.arguments import require
from phalanx.kernels.sm90.jit.launch import launch

_WARP = 32
_CHUNK = 16
"""Expert rows that a warp claims: what they are takes two loads, one after the other."""
_PIECES = 8
"""16-byte accesses of a lane that are under way."""
_COPIED = 6
"""The same, where rows are only copied: with eight there are too few registers for some K."""
_COLUMNS = 8
"""bf16 of a 16-byte access."""
_WORDS = _COLUMNS // 2


@cute.jit
def rotated(number: Int32, count: Int32, rank: Int32, ranks: cutlass.Constexpr) -> Int32:
    """The chunk that is sent in place of chunk `number` of `count`.

    An expert's rows are in the order of the ranks that they go to. Every rank begins with another
    part of a wave, as a link cannot take in what all ranks send at once.
    """
    begin = number + count * rank // ranks
    return cutlass.select_(begin >= count, begin - count, begin)


class UnreducedRows(NamedTuple):
    """Expert rows that go by themselves, each to slot k and token t of its token's rank
    (`kernels.replication.rows`)."""

    pairs_S: Tensor
    """int32: pairs n * K + k of these rows; anything behind."""
    count: Tensor
    """int32 [1]: how many they are."""
    inverse_NK: Tensor
    """int32: expert rows of all pairs."""
    memory_R: Tensor
    """int64, addresses of [K, T, D] of each rank."""


@dataclass(frozen=True)
class CombinePushConfig:
    """What is compiled into a `combine_push` kernel."""

    slots: int
    """K."""
    ranks: int
    side: bool = False
    """Side data go with the sums."""
    unreduced_rows: bool = False
    """Rows go by themselves too."""

    def __post_init__(self) -> None:
        check_sizes("combine_push", self.ranks, self.slots)


class CombinePushKernel:
    """Sums of finished experts' rows to their ranks, then a flag to each."""

    pointers: ClassVar[tuple[tuple[type, int], ...]] = (
        (Uint32, 16),  # y [S, D], as words of two bf16
        (Int32, 4),  # index [S]: rows n of expert rows
        (Int32, 4),  # inverse [N, K]
        (Int32, 4),  # offsets [L + 1]
        (Int32, 16),  # side
        (Int64, 8),  # rows_R
        (Int64, 8),  # side_R
        (Int64, 8),  # flags_R
        (Int32, 4),  # state
        (Int32, 4),  # report
        (Int32, 4),  # progress
        (Int32, 4),  # pairs
        (Int32, 4),  # count
        (Int32, 4),  # inverse of all [N, K]
        (Int64, 8),  # memory_R
    )
    integers: ClassVar[int] = 12

    def __init__(self, config: CombinePushConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self,
        y: cute.Pointer,
        index: cute.Pointer,
        inverse: cute.Pointer,
        offsets: cute.Pointer,
        side: cute.Pointer,
        rows_R: cute.Pointer,
        side_R: cute.Pointer,
        flags_R: cute.Pointer,
        state: cute.Pointer,
        report: cute.Pointer,
        progress: cute.Pointer,
        pairs: cute.Pointer,
        count: cute.Pointer,
        inverse_of_all: cute.Pointer,
        memory_R: cute.Pointer,
        sizes: tuple[Int32, ...],
        stream: cuda.CUstream,
    ) -> None:
        """Sizes: T, pieces D / 8 of a row, L, rank, limit in milliseconds, the last four fields of
        `ReadyRows`, CTAs of all launches, 16 bytes of a block of side data, CTAs."""
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
            sizes,
        ).launch(
            grid=[sizes[11], 1, 1],
            block=[WARPS * _WARP, 1, 1],
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
        T, width, local, rank, limit, waves, tile_rows, counts, bits, ctas, pieces, here = sizes
        lane = cute.arch.lane_idx()
        storage = cutlass.utils.SmemAllocator().allocate(
            struct(finished_warps=array(Int32, 2), entries=array(Int32, WARPS * _CHUNK * slots))
        )
        whole = storage.entries.get_tensor(cute.make_layout((slots, _CHUNK, WARPS)))
        kept = whole[None, None, cute.arch.warp_idx()]
        finished_warps = storage.finished_warps.get_tensor(cute.make_layout(2))
        if cute.arch.thread_idx()[0] < 2:
            finished_warps[cute.arch.thread_idx()[0]] = Int32(0)
        epoch = open_exchange(state, flags_R, rank, limit, report)
        if cutlass.const_expr(self.config.side):
            send_side(side, side_R, rank, pieces, ctas, True)
            publish(finished_warps, state, flags_R, Int32(0), Int32(1), rank, epoch, ctas)
        ends = cute.make_tensor(offsets, cute.make_layout(local + 1))
        begins, needed = self._waves(ends, bits, local << bits, waves, tile_rows, counts)
        chunks, chunks_before = self._chunks(begins)
        ready_waves, total = Int32(0), cute.arch.shuffle_sync(chunks_before, _WARP - 1)
        entries = cute.make_rmem_tensor(slots, Int32)
        claimed = cute.arch.shuffle_sync(claim(progress + CLAIMED), 0)
        while claimed < total:
            following = claim(progress + CLAIMED)
            wave = cute.arch.popc(cute.arch.vote_ballot_sync(chunks_before <= claimed)) - 1
            row = self._row(claimed, wave, begins, chunks, chunks_before, rank)
            n, to = Int32(0), Int64(0)
            if row >= 0:
                n = cute.make_tensor(index + row, cute.make_layout(1))[0]
                target = n // T
                to = rows_R[target] + Int64((rank - target) * T + n) * width * 16
            look_up(inverse, entries, n, self.config.ranks * T)
            last = Int32(-1)
            for k in cutlass.range_constexpr(slots):
                last = cutlass.max(last, entries[k])
                if lane < _CHUNK:
                    kept[k, lane] = entries[k]
            found = cute.arch.vote_ballot_sync((row >= 0) & (last == row))
            cute.arch.sync_warp()
            if ready_waves <= wave:
                if (lane >= ready_waves) & (lane <= wave):
                    counter = progress.toint() + 4 * Int64(COUNTS + lane)
                    peer.wait(counter, needed, limit, report.toint(), rank)
                cute.arch.sync_warp()
                ready_waves = wave + 1
            while found != 0:
                source, of = ptx.lowest(found), Int32(-1)
                found = found & (found - 1)
                if lane < slots:
                    of = kept[lane, source]
                self._send(y, cute.arch.shuffle_sync(to, source), of, width)
            cute.arch.sync_warp()
            claimed = cute.arch.shuffle_sync(following, 0)
        if cutlass.const_expr(self.config.unreduced_rows):
            self._send_singles(y, *unreduced_rows, T, width, rank, here)
        cute.arch.sync_warp()
        if lane == 0:
            if last_of_all(finished_warps.iterator + 1, progress + FINISHED_CTAS, ctas) == 1:
                counters = cute.make_tensor(progress, cute.make_layout(PROGRESS))
                counters.fill(0)
                state[EPOCH] = epoch
                cute.arch.fence_acq_rel_sys()
                for part in cutlass.range_constexpr(1 if self.config.side else 0, 2):
                    raise_flags(flags_R, part, rank, epoch)

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
        """In lane w, the expert row at which wave w begins, and the counts that make it."""
        lane, rows = cute.arch.lane_idx(), ends[cute.size(ends) - 1]
        tiles = cute.make_rmem_tensor(MAX_WAVES, Int32)
        first = cute.make_rmem_tensor(MAX_WAVES, Int32)
        tiles.fill(0)
        first.fill(rows)
        for base in cutlass.range(0, slices, _WARP):
            at = base + lane
            if at < slices:
                expert = at >> bits
                wave = last_wave_of(at, slices, waves)
                begin, end = ends[expert], ends[expert + 1]
                of_all = (end - begin + tile_rows - 1) // tile_rows
                height = slice_tiles(of_all, bits)
                before = (at - (expert << bits)) * height
                some = cutlass.max(cutlass.min(of_all - before, height), 0)
                row = cutlass.min(begin + before * tile_rows, end)
                for w in cutlass.range_constexpr(MAX_WAVES):
                    tiles[w] += cutlass.select_(wave == w, some, Int32(0))
                    first[w] = cutlass.select_(wave >= w, cutlass.min(first[w], row), first[w])
        begins, needed = rows, Int32(0)
        for w in cutlass.range_constexpr(MAX_WAVES):
            row = cute.arch.warp_redux_sync(first[w], "min")
            total = cute.arch.warp_redux_sync(tiles[w], "add")
            begins = cutlass.select_(lane == w, row, begins)
            needed = cutlass.select_(lane == w, total * counts, needed)
        return begins, needed

    @cute.jit
    def _chunks(self, begins: Int32) -> tuple[Int32, Int32]:
        """In lane w, the chunks of wave w, and those of all waves before it."""
        lane = cute.arch.lane_idx()
        rows = cute.arch.shuffle_sync(begins, cutlass.min(lane + 1, _WARP - 1)) - begins
        chunks = (rows + _CHUNK - 1) // _CHUNK
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
        """The lane's expert row of a chunk of a wave; -1 for none."""
        lane, count = cute.arch.lane_idx(), cute.arch.shuffle_sync(chunks, wave)
        number = claimed - cute.arch.shuffle_sync(chunks_before, wave)
        number = rotated(number, count, rank, self.config.ranks)
        row = cute.arch.shuffle_sync(begins, wave) + number * _CHUNK + lane
        inside = (lane < _CHUNK) & (row < cute.arch.shuffle_sync(begins, wave + 1))
        return cutlass.select_(inside, row, Int32(-1))

    @cute.jit
    def _send(self, y: cute.Pointer, target: Int64, of: Int32, width: Int32) -> None:
        """The sum of y's rows `of` (each lane's; negative: none) to where it is wanted."""
        lane = cute.arch.lane_idx()
        mask = cute.arch.vote_ballot_sync(of >= 0)
        for part in cutlass.range((width + _PIECES * _WARP - 1) // (_PIECES * _WARP)):
            first = part * (_PIECES * _WARP) + lane
            sums = cute.make_rmem_tensor((_COLUMNS, _PIECES), Float32)
            sums.fill(0)
            left = mask
            while left != 0:
                row = cute.arch.shuffle_sync(of, ptx.lowest(left))
                left = left & (left - 1)
                words = cute.make_rmem_tensor((_WORDS, _PIECES), Uint32)
                words.fill(0)
                for p in cutlass.range_constexpr(_PIECES):
                    if first + p * _WARP < width:
                        at = y.toint() + (Int64(row) * width + first + p * _WARP) * 16
                        found = peer.load_global(at)
                        for w in cutlass.range_constexpr(_WORDS):
                            words[w, p] = found[w]
                for p in cutlass.range_constexpr(_PIECES):
                    for w in cutlass.range_constexpr(_WORDS):
                        low, high = ptx.unpack(words[w, p])
                        sums[2 * w, p] += low
                        sums[2 * w + 1, p] += high
            for p in cutlass.range_constexpr(_PIECES):
                if first + p * _WARP < width:
                    rounded = [ptx.pack(sums[2 * w, p], sums[2 * w + 1, p]) for w in range(_WORDS)]
                    ptx.store_global(target + Int64(first + p * _WARP) * 16, *rounded)

    @cute.jit
    def _send_singles(
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
        """Rows of y that go by themselves, every so many-th to a warp."""
        ranks, slots = cutlass.const_expr(self.config.ranks), cutlass.const_expr(self.config.slots)
        total = cute.make_tensor(count, cute.make_layout(1))[0]
        first = cute.arch.block_idx()[0] * WARPS + cute.arch.warp_idx()
        addresses = cute.make_tensor(memory_R, cute.make_layout(ranks))
        for number in cutlass.range(first, total, ctas * WARPS):
            # Every rank begins with another part: a link cannot take in what all send at once.
            turned = rotated(number, total, rank, ranks)
            pair = cute.make_tensor(pairs + turned, cute.make_layout(1))[0]
            row = cute.make_tensor(inverse + pair, cute.make_layout(1))[0]
            n = Int32(Uint32(pair) // Uint32(slots))
            target = Int32(Uint32(n) // Uint32(T))
            at = (pair - n * slots - target) * T + n
            self._copy(
                y.toint() + Int64(row) * width * 16,
                addresses[target] + Int64(at) * width * 16,
                width,
            )

    @cute.jit
    def _copy(self, source: Int64, target: Int64, width: Int32) -> None:
        """A row."""
        for part in cutlass.range((width + _COPIED * _WARP - 1) // (_COPIED * _WARP)):
            first = part * (_COPIED * _WARP) + cute.arch.lane_idx()
            words = cute.make_rmem_tensor((_WORDS, _COPIED), Uint32)
            for p in cutlass.range_constexpr(_COPIED):
                if first + p * _WARP < width:
                    found = peer.load_global(source + Int64(first + p * _WARP) * 16)
                    for w in cutlass.range_constexpr(_WORDS):
                        words[w, p] = found[w]
            for p in cutlass.range_constexpr(_COPIED):
                if first + p * _WARP < width:
                    moved = [words[w, p] for w in range(_WORDS)]
                    ptx.store_global(target + Int64(first + p * _WARP) * 16, *moved)


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
    """A launch of a way back, after that of `rows` which makes what it sends.

    Of two, one is for another stream. Both wait for all that `rows` makes, so that has to be
    launched before them: what it needs might not be loaded while others wait for it.

    Args:
        ready: y [S, D], bf16, D a multiple of 8, and its progress.
        index_S: int32 received rows of expert rows.
        inverse_NK: int32 expert rows of received rows, -1 for none. A received row without any is
            not sent: there is nobody to wait for it, or all of them had no place in y, and the step
            is run again (`parallel.dispatcher.capacity`).
        offsets: int32 [L + 1].
        buffers: where to.
        tokens: T.
        ctas: of this launch.
        total_ctas: of all launches.
        side: contiguous, one of R equal blocks to each rank, in multiples of 16 bytes.
        unreduced_rows: rows that go by themselves, in the last launch, behind all that `rows`
            makes.

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
    launch(
        CombinePushKernel,
        CombinePushConfig(
            K, ranks, side=side is not None, unreduced_rows=unreduced_rows is not None
        ),
        (
            *(y_SD, index_S, inverse_NK, offsets, side, *buffers[:5], ready.progress),
            *(unreduced_rows or (None,) * len(UnreducedRows._fields)),
        ),
        (
            *(tokens, D // _COLUMNS, offsets.numel() - 1, buffers.rank, buffers.limit_ms),
            *(*ready[2:], total_ctas, block // 16, ctas),
        ),
    )
