"""Kernels `count` and `place`: from the experts of all pairs to the routing plan, in one call.

`count` counts the pairs of every expert in every chunk of pairs; `place` adds the counts up, ranks
the pairs of its own chunk and writes the plan. Pairs are ranked by expert, then row, then slot, in
whole warps and in order, so that no result depends on timing: the atomics only add integers.

Roles. All 16 warps of every CTA do the same; CTA c has chunk c of the pairs, a warp `span` of them:

    count   threads              counts of the chunk's pairs by expert, atomics in shared memory
            -- sync_threads --
            threads              counts[c, e] to global memory
    place   each warp            counts of its own pairs, for which no other chunk is needed
            -- griddepcontrol_wait: the grid of `count` has finished, its writes are visible --
            threads              sums over all chunks, and over those before c: `total`, `before`
            -- sync_threads --
            a thread an expert   prefix sum over experts: first row of each warp's pairs, `next_row`
            -- sync_threads --
            each warp            rank its pairs, 32 at a time (match_sync); write rows and inverse
            all CTAs             fill unused rows; order of the experts by falling count

With `overlap`, `count` lets `place` start at once (programmatic dependent launch), so that
launching it and counting its own pairs are hidden. Every CTA of `place` adds up all counts itself,
which saves a kernel between the two, or a barrier of the grid.

Legend: P = N * K pairs of a row and a slot, L local experts, S expert rows (static).
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from phalanx.kernels.limits import PLAN_CAPACITIES as CAPACITIES
from phalanx.kernels.sm90.gemm.tensors import array, struct
from phalanx.kernels.sm90.jit.pointers import Fp32Ptr, IntPtr, IntVecPtr

THREADS = 512
WARPS = THREADS // 32
MAX_PAIRS = 1 << 24  # most pairs: with the limit of slots, `_divide` is exact
_BATCH = 4  # pairs of a thread in flight: loads before the first is used
_COUNT_BATCH = 8  # counts of a thread in flight, of four experts each
_WARP_MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class PlanConfig:
    """Choices that are compiled into the two kernels of a plan."""

    capacity: int  # most local experts: 64, 256, 512 or 1024
    overlap: bool = True
    """Start the second kernel under the first; it waits before it reads the counts."""

    def __post_init__(self) -> None:
        if self.capacity not in CAPACITIES:
            raise ValueError(f"capacity={self.capacity}: must be one of {CAPACITIES}")


class PlanKernel:
    """Both kernels of a configuration, as `cute.compile` takes them."""

    def __init__(self, config: PlanConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self,
        idx: IntPtr,
        prob: Fp32Ptr,
        row_index: IntPtr,
        row_prob: Fp32Ptr,
        offsets: IntPtr,
        inverse: IntPtr,
        needed: IntPtr,
        order: IntPtr,
        counts: IntVecPtr,
        P: Int32,
        K: Int32,
        first: Int32,
        L: Int32,
        S: Int32,
        blocks: Int32,
        span: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Launch both kernels; `blocks` chunks, `span` pairs of a warp, `first` local expert. idx,
        prob [P]; row_index, row_prob [S]; offsets [L + 1]; inverse [P]; needed [1]; order [L];
        counts, scratch of [blocks, L rounded up to 4]."""
        # Counts are read four experts at a time; those past the last one are 0.
        width = cute.assume((L + 3) // 4 * 4, divby=4)
        mIdx = cute.make_tensor(idx, cute.make_layout(P))
        mInverse = cute.make_tensor(inverse, cute.make_layout(P))
        mCounts = cute.make_tensor(counts, cute.make_layout((blocks, width), stride=(width, 1)))
        self.count(mIdx, mCounts, first, L, span).launch(
            grid=[blocks, 1, 1], block=[THREADS, 1, 1], min_blocks_per_mp=1, stream=stream
        )
        self.place(
            mIdx,
            cute.make_tensor(prob, cute.make_layout(P)),
            cute.make_tensor(row_index, cute.make_layout(S)),
            cute.make_tensor(row_prob, cute.make_layout(S)),
            cute.make_tensor(offsets, cute.make_layout(L + 1)),
            mInverse,
            cute.make_tensor(needed, cute.make_layout(1)),
            cute.make_tensor(order, cute.make_layout(L)),
            mCounts,
            K,
            first,
            L,
            S,
            span,
        ).launch(
            grid=[blocks, 1, 1],
            block=[THREADS, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=self.config.overlap,
        )

    @cute.kernel
    def count(
        self, idx: cute.Tensor, counts: cute.Tensor, first: Int32, experts: Int32, span: Int32
    ) -> None:
        if cutlass.const_expr(self.config.overlap):
            # First of all, so that `place` starts under this kernel: it waits for the counts
            # itself.
            cute.arch.griddepcontrol_launch_dependents()
        capacity = self.config.capacity
        thread, chunk = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        memory = cutlass.utils.SmemAllocator().allocate(struct(counts=array(Int32, capacity)))
        own = memory.counts.get_tensor(cute.make_layout(capacity))
        self._zero(own, thread)
        cute.arch.sync_threads()  # zeros of all threads before the first count
        # The chunk is that of this CTA in `place`; here its threads take it in any order.
        begin = chunk * WARPS * span
        end = cutlass.min(begin + WARPS * span, cute.size(idx))
        for base in cutlass.range(begin, end, _BATCH * THREADS, unroll=1):
            expert = self._experts(idx, base + thread, THREADS, end, first, experts)
            self._count(own, expert)
        cute.arch.sync_threads()  # counts of all threads before the first is read
        for e in cutlass.range(thread, counts.shape[1], THREADS, unroll=1):
            counts[chunk, e] = own[e]

    @cute.kernel
    def place(
        self,
        idx: cute.Tensor,
        prob: cute.Tensor,
        row_index: cute.Tensor,
        row_prob: cute.Tensor,
        offsets: cute.Tensor,
        inverse: cute.Tensor,
        needed: cute.Tensor,
        order: cute.Tensor,
        counts: cute.Tensor,
        K: Int32,
        first: Int32,
        experts: Int32,
        rows: Int32,
        span: Int32,
    ) -> None:
        capacity = self.config.capacity
        memory = cutlass.utils.SmemAllocator().allocate(
            struct(
                next=array(Int32, WARPS * capacity),
                total=array(Int32, capacity),
                before=array(Int32, capacity),
                sums=array(Int32, WARPS),
            )
        )
        # First the number of each warp's pairs of an expert, then the row of the next such pair.
        next_row = memory.next.get_tensor(cute.make_layout((WARPS, capacity), stride=(capacity, 1)))
        total = memory.total.get_tensor(cute.make_layout(capacity))
        before = memory.before.get_tensor(cute.make_layout(capacity))
        sums = memory.sums.get_tensor(cute.make_layout(WARPS))
        thread, chunk = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        self._zero(memory.next.get_tensor(cute.make_layout(WARPS * capacity)), thread)
        self._zero(total, thread)
        self._zero(before, thread)
        cute.arch.sync_threads()  # zeros of all threads before the first count

        # Pairs of a warp are successive, so that warps rank theirs without each other: the order of
        # rows is that of CTAs, then warps, then pairs.
        begin = (chunk * WARPS + warp) * span
        end = cutlass.min(begin + span, cute.size(idx))
        for base in cutlass.range(begin, end, _BATCH * 32, unroll=1):
            expert = self._experts(idx, base + lane, 32, end, first, experts)
            # Atomics among lanes alone: each warp has counts of its own.
            self._count(next_row[warp, None], expert)
        if cutlass.const_expr(self.config.overlap):
            # The grid of `count` has finished, and its writes are visible.
            cute.arch.griddepcontrol_wait()
        # Behind the wait, as the counts of other CTAs are read. Before it `place` writes shared
        # memory alone.
        self._sum_chunks(counts, total, before, chunk)
        # Sums of all groups of threads, and all warps' own counts, before `_starts` reads them.
        cute.arch.sync_threads()

        used = self._starts(total, before, next_row, sums, offsets, needed, experts, rows)
        # First rows of all warps, written by a thread an expert, before each warp takes its own.
        cute.arch.sync_threads()

        own, inverse_K = next_row[warp, None], Uint32(_WARP_MASK) // Uint32(K) + 1
        for base in cutlass.range(begin, end, _BATCH * 32, unroll=1):
            self._rank(
                idx, prob, row_index, row_prob, inverse, own,
                base + lane, end, K, inverse_K, first, experts, rows,
            )  # fmt: skip
        # Kernels with a static number of rows may read those past the used ones: row 0, weight 0.
        step = cute.arch.grid_dim()[0] * THREADS
        for row in cutlass.range(used + chunk * THREADS + thread, rows, step, unroll=1):
            row_index[row] = Int32(0)
            row_prob[row] = Float32(0)
        self._sort(total, order, chunk + cute.arch.grid_dim()[0] * warp, experts)

    @cute.jit
    def _zero(self, values: cute.Tensor, thread: Int32) -> None:
        size = cute.size(values)
        for i in cutlass.range_constexpr((size + THREADS - 1) // THREADS):
            if i * THREADS + thread < size:
                values[i * THREADS + thread] = Int32(0)

    @cute.jit
    def _experts(
        self,
        idx: cute.Tensor,
        pair: Int32,
        step: cutlass.Constexpr,
        end: Int32,
        first: Int32,
        experts: Int32,
    ) -> cute.Tensor:
        """Local experts of pairs pair, pair + step, ...; -1 for none and from pair `end` on."""
        expert = cute.make_rmem_tensor(_BATCH, Int32)
        # All loads before the first use.
        for j in cutlass.range_constexpr(_BATCH):
            expert[j] = experts
            if pair + j * step < end:
                expert[j] = idx[pair + j * step] - first
        for j in cutlass.range_constexpr(_BATCH):
            # One unsigned comparison for both ends: ids below `first` wrap to large numbers.
            here = Uint32(expert[j]) < Uint32(experts)
            expert[j] = cutlass.select_(here, expert[j], Int32(-1))
        return expert

    @cute.jit
    def _count(self, counts: cute.Tensor, expert: cute.Tensor) -> None:
        for j in cutlass.range_constexpr(_BATCH):
            if expert[j] >= 0:
                _add(counts, expert[j], Int32(1))

    @cute.jit
    def _sum_chunks(
        self, counts: cute.Tensor, total: cute.Tensor, before: cute.Tensor, chunk: Int32
    ) -> None:
        """Add up the counts of all chunks, and of those before, four experts a thread."""
        thread = cute.arch.thread_idx()[0]
        chunks, width = counts.shape
        # As many groups as fit; with few experts each has few chunks to read.
        groups = THREADS // (width // 4)
        group = thread // (width // 4)
        expert = cute.assume((thread - group * (width // 4)) * 4, divby=4)
        if group < groups:
            sums = cute.make_rmem_tensor(8, Int32)
            sums.fill(0)
            for first in cutlass.range(group, chunks, groups * _COUNT_BATCH, unroll=1):
                # Loads of 16 bytes, all in flight at a time; chunks that are missing count 0.
                part = cute.make_rmem_tensor((4, _COUNT_BATCH), Int32)
                part.fill(0)
                for j in cutlass.range_constexpr(_COUNT_BATCH):
                    c = first + j * groups
                    if c < chunks:
                        source = cute.domain_offset((c, expert), counts).iterator.align(16)
                        source = cute.make_tensor(source, cute.make_layout(4))
                        cute.autovec_copy(source, part[None, j])
                for j in cutlass.range_constexpr(_COUNT_BATCH):
                    earlier = first + j * groups < chunk
                    for i in cutlass.range_constexpr(4):
                        sums[i] += part[i, j]
                        sums[4 + i] += cutlass.select_(earlier, part[i, j], Int32(0))
            # Groups meet in shared memory. Integers: the order of the additions changes nothing.
            for i in cutlass.range_constexpr(4):
                _add(total, expert + i, sums[i])
                _add(before, expert + i, sums[4 + i])

    @cute.jit
    def _starts(
        self,
        total: cute.Tensor,
        before: cute.Tensor,
        next_row: cute.Tensor,
        sums: cute.Tensor,
        offsets: cute.Tensor,
        needed: cute.Tensor,
        experts: Int32,
        rows: Int32,
    ) -> Int32:
        """Write `next_row` of every warp, the offsets and clamped counts; returns the rows used."""
        thread, chunk = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        # Experts of a thread: successive ones, so that its sum is a step of the prefix sum.
        own = cutlass.const_expr(max(1, self.config.capacity // THREADS))
        count = cute.make_rmem_tensor(own, Int32)
        mine = Int32(0)
        for i in cutlass.range_constexpr(own):
            count[i] = Int32(0)
            if thread * own + i < self.config.capacity:
                count[i] = total[thread * own + i]
            mine += count[i]
        # Prefix sum in two steps: over the lanes of a warp, then over the warps' sums.
        inclusive = mine
        for step in cutlass.range_constexpr(5):
            below = cute.arch.shuffle_sync_up(inclusive, 1 << step)
            inclusive = cutlass.select_(lane >= 1 << step, inclusive + below, inclusive)
        if lane == 31:
            sums[warp] = inclusive
        cute.arch.sync_threads()  # sums of all warps before any warp reads them
        # Lane w has the sum of warp w. Every warp adds them up itself: no further barrier.
        warps = cutlass.select_(lane < WARPS, sums[lane % WARPS], Int32(0))
        start = cute.arch.warp_redux_sync(cutlass.select_(lane < warp, warps, Int32(0)), "add")
        all_rows = cute.arch.warp_redux_sync(warps, "add")
        start += inclusive - mine
        for i in cutlass.range_constexpr(own):
            e = thread * own + i
            if e < self.config.capacity:
                # Rows of an expert: pairs of earlier chunks, then of this CTA's warps in turn. Each
                # warp's count becomes its first row, in place.
                row = start + before[e]
                for w in cutlass.range_constexpr(WARPS):
                    pairs = next_row[w, e]
                    next_row[w, e] = row
                    row += pairs
                # Where rows run out, an expert gets fewer or none; `needed` tells the caller.
                begin, end = cutlass.min(start, rows), cutlass.min(start + count[i], rows)
                total[e] = end - begin
                # All CTAs have the same numbers, and one writes them.
                if chunk == 0 and e < experts:
                    offsets[e] = begin
                start += count[i]
        if chunk == 0 and thread == 0:
            offsets[experts] = cutlass.min(all_rows, rows)
            needed[0] = all_rows
        return cutlass.min(all_rows, rows)

    @cute.jit
    def _rank(
        self,
        idx: cute.Tensor,
        prob: cute.Tensor,
        row_index: cute.Tensor,
        row_prob: cute.Tensor,
        inverse: cute.Tensor,
        next_row: cute.Tensor,
        pair: Int32,
        end: Int32,
        K: Int32,
        inverse_K: Uint32,
        first: Int32,
        experts: Int32,
        rows: Int32,
    ) -> None:
        """Rank a warp's pairs pair, pair + 32, ... before `end`; write their rows and inverse."""
        expert = self._experts(idx, pair, 32, end, first, experts)
        # Loads of the probabilities are issued before the ranks are computed, which hides them.
        value = cute.make_rmem_tensor(_BATCH, Float32)
        same = cute.make_rmem_tensor(_BATCH, Uint32)
        for j in cutlass.range_constexpr(_BATCH):
            value[j] = Float32(0)
            if expert[j] >= 0:
                value[j] = prob[pair + j * 32]
        for j in cutlass.range_constexpr(_BATCH):
            # The lanes with the same expert, of all 32: pairs without one match each other too.
            same[j] = cute.arch.match_sync(_WARP_MASK, expert[j])
        for j in cutlass.range_constexpr(_BATCH):
            # Lower lanes have earlier pairs: their number is the rank among these 32.
            ahead = Int32(cute.arch.popc(same[j] & cute.arch.lanemask_lt()))
            row = rows  # none
            if expert[j] >= 0:
                row = next_row[expert[j]] + ahead
            # All lanes have read next_row before the first lane of each expert advances it, and see
            # that before the next 32 pairs.
            cute.arch.sync_warp()
            if expert[j] >= 0 and ahead == 0:
                next_row[expert[j]] = row + Int32(cute.arch.popc(same[j]))
            cute.arch.sync_warp()
            # A row past the last one is left out, and the pair has none.
            if pair + j * 32 < end:
                inverse[pair + j * 32] = cutlass.select_(row < rows, row, Int32(-1))
                if row < rows:
                    row_index[row] = _divide(pair + j * 32, K, inverse_K)
                    row_prob[row] = value[j]

    @cute.jit
    def _sort(self, count: cute.Tensor, order: cute.Tensor, first: Int32, experts: Int32) -> None:
        """Place experts first, first + warps of the grid, ... in the order by falling count."""
        # Each expert counts those ahead of it: few experts a warp, and no exchange between CTAs.
        lane = cute.arch.lane_idx()
        for e in cutlass.range(first, experts, cute.arch.grid_dim()[0] * WARPS, unroll=1):
            ahead, own = Int32(0), count[e]
            for other in cutlass.range(lane, experts, 32, unroll=4):
                # Ties go to the lower expert, so that positions are distinct.
                if count[other] > own or (count[other] == own and other < e):
                    ahead += 1
            ahead = cute.arch.warp_redux_sync(ahead, "add")
            if lane == 0:
                order[ahead] = e


def _add(counts: cute.Tensor, at: Int32, value: Int32) -> None:
    # Relaxed, scope of the CTA: shared memory, and a barrier comes before anyone reads.
    cute.arch.atomic_add(counts.iterator + at, value, sem="relaxed", scope="cta")


def _divide(pair: Int32, K: Int32, inverse_K: Uint32) -> Int32:
    """pair // K, with inverse_K = 2^32 / K rounded up: exact for pair * K < 2^32 (0 for K = 1)."""
    quotient = cute.arch.mul_hi(Uint32(pair), inverse_K)
    return cutlass.select_(K == 1, pair, Int32(quotient))
