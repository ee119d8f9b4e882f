"""Kernel `combine_push`: sums of expert rows to the ranks of their tokens, as experts finish.

The way back of an exchange (`push`, whose epochs and flags these are), together with the sums that
it brings (`combine`): row n goes to rank n // T as soon as the last of its experts here is through,
while `rows` works on the experts after it. Waves of experts, or of slices of the rows of few ones
(`waves`, `progress`), say when to look: wave after wave, warps claim chunks of rows and send those
whose last expert row is in it, straight from registers.

It is launched twice. A few SMs, which `rows` gives up half-way, begin while that runs; all SMs, on
its stream and hence after it, do what is left. The last warp of both says to all ranks that
everything has come.

Legend: R ranks, T tokens of a rank, N = R * T rows, K slots of a row, S expert rows, D columns, L
experts of a rank.
"""

from dataclasses import dataclass
from typing import ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, Uint32
from torch import Tensor

from kernels.sm90 import peer, ptx
from kernels.sm90.arguments import require
from kernels.sm90.launch import launch
from kernels.sm90.progress import CLAIMED, COUNTS, PROGRESS, THROUGH, Told
from kernels.sm90.push import (
    EPOCH,
    STATE,
    WARPS,
    Places,
    begin,
    block_rows,
    check_sizes,
    claim,
    last_of_all,
    tell,
)
from kernels.sm90.storage import array, struct
from kernels.sm90.waves import MAX_WAVES, last_wave_of, slice_tiles

_WARP = 32
_CHUNK = 32
"""Rows that a warp claims."""
_PIECES = 4
"""16-byte accesses of a lane that are under way for each of two expert rows."""
_COLUMNS = 8
"""bf16 of a 16-byte access."""
_WORDS = _COLUMNS // 2


@dataclass(frozen=True)
class CombinePushConfig:
    """What is compiled into a `combine_push` kernel."""

    slots: int
    """K."""
    ranks: int

    def __post_init__(self) -> None:
        check_sizes("combine_push", self.ranks, self.slots)


class CombinePushKernel:
    """Sums of finished experts' rows to their ranks, then a flag to each."""

    pointers: ClassVar[tuple[tuple[type, int], ...]] = (
        (Uint32, 16),  # y [S, D], as words of two bf16
        (Int32, 4),  # inverse [N, K]
        (Int32, 4),  # table [N, K]: expert ids
        (Int32, 4),  # offsets [L + 1]
        (Int64, 8),  # rows_R
        (Int64, 8),  # flags_R
        (Int32, 4),  # state
        (Int32, 4),  # report
        (Int32, 4),  # progress
    )
    integers: ClassVar[int] = 11

    def __init__(self, config: CombinePushConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self,
        y: cute.Pointer,
        inverse: cute.Pointer,
        table: cute.Pointer,
        offsets: cute.Pointer,
        rows_R: cute.Pointer,
        flags_R: cute.Pointer,
        state: cute.Pointer,
        report: cute.Pointer,
        progress: cute.Pointer,
        sizes: tuple[Int32, ...],
        stream: cuda.CUstream,
    ) -> None:
        """Sizes: T, pieces D / 8 of a row, L, rank, limit in milliseconds, waves, CTAs of both
        launches, rows of a tile, counts of these, bits of slices, CTAs."""
        ranks = self.config.ranks
        self.kernel(
            y,
            inverse,
            table,
            offsets,
            cute.make_tensor(rows_R, cute.make_layout(ranks)),
            cute.make_tensor(flags_R, cute.make_layout(ranks)),
            cute.make_tensor(state, cute.make_layout(STATE)),
            report,
            progress,
            sizes,
        ).launch(
            grid=[sizes[10], 1, 1],
            block=[WARPS * _WARP, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        y: cute.Pointer,
        inverse: cute.Pointer,
        table: cute.Pointer,
        offsets: cute.Pointer,
        rows_R: cute.Tensor,
        flags_R: cute.Tensor,
        state: cute.Tensor,
        report: cute.Pointer,
        progress: cute.Pointer,
        sizes: tuple[Int32, ...],
    ) -> None:
        slots = self.config.slots
        T, width, local, rank, limit, waves, ctas, tile_rows, counts, bits, _ = sizes
        lane = cute.arch.lane_idx()
        storage = cutlass.utils.SmemAllocator().allocate(struct(through=array(Int32, 1)))
        through = storage.through.get_tensor(cute.make_layout(1))
        if cute.arch.thread_idx()[0] == 0:
            through[0] = Int32(0)
        epoch = begin(state, flags_R, rank, limit, report)
        slices, ends = local << bits, cute.make_tensor(offsets, cute.make_layout(local + 1))
        needed = self._needed(ends, bits, slices, waves, tile_rows, counts)
        chunks = self.config.ranks * ((T + _CHUNK - 1) // _CHUNK)
        finished = Int32(0)
        claimed = cute.arch.shuffle_sync(claim(progress + CLAIMED), 0)
        while claimed < chunks * waves:
            following = claim(progress + CLAIMED)
            wave = claimed // chunks
            number = claimed - wave * chunks
            base, end = block_rows(number, T, rank, self.config.ranks, _CHUNK)
            last = self._last(table, base + lane, end, local, rank)
            if (last >= 0) & (bits > 0):
                last = self._slice(inverse, base + lane, ends, last, bits, tile_rows)
            mine = False
            if last >= 0:
                mine = last_wave_of(last, slices, waves) == wave
            found = cute.arch.vote_ballot_sync(mine)
            if (found != 0) & (finished <= wave):
                if (lane >= finished) & (lane <= wave):
                    count = progress.toint() + 4 * Int64(COUNTS + lane)
                    peer.wait(count, needed, limit, report.toint(), rank)
                cute.arch.sync_warp()
                finished = wave + 1
            while found != 0:
                row = base + ptx.lowest(found)
                found = found & (found - 1)
                of = Int32(-1)
                if lane < slots:
                    of = cute.make_tensor(inverse + Int64(row) * slots, cute.make_layout(slots))[
                        lane
                    ]
                target = row // T
                at = rank * T + row - target * T
                self._send(y, rows_R[target] + Int64(at) * width * 16, of, width)
            claimed = cute.arch.shuffle_sync(following, 0)
        cute.arch.sync_warp()
        if lane == 0:
            if last_of_all(through.iterator, progress + THROUGH, ctas) == 1:
                counters = cute.make_tensor(progress, cute.make_layout(PROGRESS))
                counters.fill(0)
                state[EPOCH] = epoch
                cute.arch.fence_acq_rel_sys()
                for part in cutlass.range_constexpr(2):
                    tell(flags_R, part, rank, epoch)

    @cute.jit
    def _needed(
        self,
        ends: cute.Tensor,
        bits: Int32,
        slices: Int32,
        waves: Int32,
        tile_rows: Int32,
        counts: Int32,
    ) -> Int32:
        """In lane w, counts that make wave w."""
        lane = cute.arch.lane_idx()
        tiles = cute.make_rmem_tensor(MAX_WAVES, Int32)
        tiles.fill(0)
        for base in cutlass.range(0, slices, _WARP):
            at = base + lane
            if at < slices:
                expert = at >> bits
                wave = last_wave_of(at, slices, waves)
                of_all = (ends[expert + 1] - ends[expert] + tile_rows - 1) // tile_rows
                height = slice_tiles(of_all, bits)
                before = (at - (expert << bits)) * height
                some = cutlass.max(cutlass.min(of_all - before, height), 0)
                for w in cutlass.range_constexpr(MAX_WAVES):
                    tiles[w] += cutlass.select_(wave == w, some, Int32(0))
        needed = Int32(0)
        for w in cutlass.range_constexpr(MAX_WAVES):
            total = cute.arch.warp_reduction_sum(tiles[w])
            needed = cutlass.select_(lane == w, total * counts, needed)
        return needed

    @cute.jit
    def _last(
        self, table: cute.Pointer, row: Int32, end: Int32, local: Int32, rank: Int32
    ) -> Int32:
        """A row's last expert on this rank; -1 without one, and from row `end` on."""
        last = Int32(-1)
        if row < end:
            slots = self.config.slots
            experts = cute.make_tensor(table + Int64(row) * slots, cute.make_layout(slots))
            for k in cutlass.range_constexpr(slots):
                expert = experts[k] - rank * local
                if expert < local:
                    last = cutlass.max(last, expert)
        return last

    @cute.jit
    def _slice(
        self,
        inverse: cute.Pointer,
        row: Int32,
        ends: cute.Tensor,
        expert: Int32,
        bits: Int32,
        tile_rows: Int32,
    ) -> Int32:
        """The slice, counted over all experts, in which a row's last expert row is."""
        slots, at = self.config.slots, Int32(-1)
        of = cute.make_tensor(inverse + Int64(row) * slots, cute.make_layout(slots))
        for k in cutlass.range_constexpr(slots):
            at = cutlass.max(at, of[k])
        number = (Int32(1) << bits) - 1
        first = ends[expert]
        if at >= first:  # or it had no place, and nothing of it is sent
            height = slice_tiles((ends[expert + 1] - first + tile_rows - 1) // tile_rows, bits)
            number = (at - first) // (tile_rows * height)
        return (expert << bits) + number

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
                words = cute.make_rmem_tensor((_WORDS, 2, _PIECES), Uint32)
                words.fill(0)
                for i in cutlass.range_constexpr(2):
                    row = cute.arch.shuffle_sync(of, ptx.lowest(left) & (_WARP - 1))
                    for p in cutlass.range_constexpr(_PIECES):
                        if (left != 0) & (first + p * _WARP < width):
                            at = y.toint() + (Int64(row) * width + first + p * _WARP) * 16
                            found = peer.load_global(at)
                            for w in cutlass.range_constexpr(_WORDS):
                                words[w, i, p] = found[w]
                    left = left & (left - 1)
                for i in cutlass.range_constexpr(2):
                    for p in cutlass.range_constexpr(_PIECES):
                        for w in cutlass.range_constexpr(_WORDS):
                            low, high = ptx.unpack(words[w, i, p])
                            sums[2 * w, p] += low
                            sums[2 * w + 1, p] += high
            for p in cutlass.range_constexpr(_PIECES):
                if first + p * _WARP < width:
                    rounded = [ptx.pack(sums[2 * w, p], sums[2 * w + 1, p]) for w in range(_WORDS)]
                    ptx.store_global(target + Int64(first + p * _WARP) * 16, *rounded)


def combine_push(
    told: Told,
    inverse_NK: Tensor,
    table_NK: Tensor,
    offsets: Tensor,
    places: Places,
    *,
    tokens: int,
    ctas: int,
    of: int,
) -> None:
    """One of two launches of a way back, after the launch of `rows` that is `told`.

    One is for another stream. Both wait for all that `rows` makes, so that has to be launched
    before them: what it needs might not be loaded while others wait for it.

    Args:
        told: of y [S, D], bf16, D a multiple of 8, and its progress.
        inverse_NK: int32 expert rows of received rows, -1 for none.
        table_NK: int32 global expert ids of received rows, -1 for an empty slot.
        offsets: int32 [L + 1].
        places: where to.
        tokens: T.
        ctas: of this launch.
        of: CTAs of both launches.

    Raises:
        ValueError: a shape, dtype, stride, device or size that the kernel does not take.
    """
    where, ranks, y_SD = told.out_SN.device, places.rows_R.numel(), told.out_SN
    (N, K), D = inverse_NK.shape, y_SD.shape[1]
    if D % _COLUMNS:
        raise ValueError(f"y has {D} columns: they must be a multiple of {_COLUMNS}")
    require(
        where,
        y=(y_SD, torch.bfloat16, None),
        inverse=(inverse_NK, torch.int32, (ranks * tokens, K)),
        table=(table_NK, torch.int32, (N, K)),
        offsets=(offsets, torch.int32, None),
        progress=(told.progress, torch.int32, (PROGRESS,)),
    )
    tensors = (y_SD, inverse_NK, table_NK, offsets, places.rows_R, *places[2:5], told.progress)
    sizes = (tokens, D // _COLUMNS, offsets.numel() - 1, places.rank, places.limit_ms)
    more = (told.waves, of, told.tile_rows, told.counts, told.bits, ctas)
    launch(CombinePushKernel, CombinePushConfig(K, ranks), tensors, (*sizes, *more))
