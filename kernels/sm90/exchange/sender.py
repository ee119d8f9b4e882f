"""`Sender`: what the kernels that push share: claims, flags, epochs and side data.

The number of an exchange, its epoch, is counted on the device, as a CUDA graph would freeze one
from the host. What a `Sender` does in exchange u:

    __init__    threads r < R of each CTA; CTA 0: set flag ALLOWED + me at rank r to u + 1;
                wait until flag ALLOWED + r here is u or more
    claim       each warp: a chunk of rows (atomic on `claims`)
    send_side   all threads: side data, 16 bytes a thread
    publish     each warp, once for each part: the last one of all raises the part's flag

At the start of exchange u a rank allows its peers exchange u + 1: the readers of that one's buffer
have finished by then, which the caller guarantees (`peer_buffers.SLOTS`). No rank pushes before it
is allowed to, and no wait lasts longer than its limit (`peer.wait`).

Who publishes a part. The last warp of a CTA that finishes it (a count in shared memory) makes a
fence of system scope and adds to the part's count of CTAs in global memory; the last CTA resets
that count, and raises the part's flag at all ranks:

    16 warps --shared memory--> CTA --fence, count--> last CTA --fence--> flags at R ranks

Legend: R ranks, N rows, K slots of a row.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from torch import Tensor

from phalanx.kernels.sm90.exchange import peer
from phalanx.kernels.sm90.exchange.peer_buffers import (
    ALLOWED,
    CLAIMED,
    EPOCH,
    FINISHED_CTAS,
    MAX_RANKS,
)
from phalanx.kernels.sm90.jit import ptx

MAX_SLOTS = 32  # most slots of a row: `combine_push` gives each slot a lane
WARPS = 16  # warps of a CTA: with 8 accesses of 16 bytes a lane, 64 KiB of an SM are in flight
WARP = 32


def side_block(side: Tensor, blocks: int) -> int:
    """Bytes of a block of side data, of `blocks` in all; a ValueError if no multiple of 16."""
    size = side.numel() * side.element_size()
    if size % (16 * blocks):
        raise ValueError(f"side data of {size} bytes: blocks must be multiples of 16 bytes")
    return size // blocks


def check_sizes(kernel: str, ranks: int, slots: int) -> None:
    """Raise ValueError for more ranks or slots than a kernel is compiled for."""
    if not 1 <= ranks <= MAX_RANKS:
        raise ValueError(f"{ranks} ranks: {kernel} serves 1 to {MAX_RANKS}")
    if not 1 <= slots <= MAX_SLOTS:
        raise ValueError(f"{slots} slots: {kernel} takes 1 to {MAX_SLOTS}")


@cute.jit
def look_up(table: cute.Pointer, entries: cute.Tensor, row: Int32, N: Int32) -> None:
    """Load the entries of a table's row; rows past the last one of N repeat it."""
    slots = cutlass.const_expr(cute.size(entries))
    # Rows of a multiple of four entries begin at multiples of 16 bytes: one access loads four.
    wide = cutlass.const_expr(4 if slots % 4 == 0 else 1)
    for k in cutlass.range_constexpr(0, slots, wide):
        some = cute.make_rmem_tensor(wide, Int32)
        # A clamped row needs no branch around its load; callers ignore what they did not ask for.
        at = table + cute.assume(Int64(cutlass.min(row, N - 1)) * slots + k, divby=wide)
        cute.autovec_copy(cute.make_tensor(at, cute.make_layout(wide)), some)
        for i in cutlass.range_constexpr(wide):
            entries[k + i] = some[i]


class Sender:
    """Side of one rank in an exchange, in each thread; its `epoch` is the exchange's number.

    A kernel binds its methods to names before loops and branches, which would carry the object.
    """

    def __init__(
        self,
        finished_warps: cute.Tensor,
        claims: cute.Pointer,
        state: cute.Tensor,
        flags_R: cute.Tensor,
        rank: Int32,
        ctas: Int32,
        limit: Int32,
        report: cute.Pointer,
    ) -> None:
        """All threads of a CTA: allow the next exchange, wait until all ranks allow this one.

        Args:
            finished_warps: int32, a count for each part, in shared memory.
            claims: the counter of claimed chunks, 0 between exchanges.
            state, flags_R, limit, report: see `peer_buffers.PeerBuffers`; limit in ms.
            ctas: that send, of all launches of the exchange.
        """
        self.finished_warps, self.claims, self.state = finished_warps, claims, state
        self.flags_R, self.rank, self.ctas = flags_R, rank, ctas
        self.epoch = self._open(limit, report)

    @cute.jit
    def _open(self, limit: Int32, report: cute.Pointer) -> Int32:
        thread, finished_warps = cute.arch.thread_idx()[0], self.finished_warps
        # The barrier below orders these zeros before the first count.
        if thread < cute.size(finished_warps):
            finished_warps[thread] = Int32(0)
        # Every CTA reads EPOCH here, and only the last one that finishes the exchange writes it.
        epoch = self.state[EPOCH] + 1
        if thread < cute.size(self.flags_R):
            # Release at system scope: reads of the buffers of exchange u + 1 come before, in this
            # stream, and the peer that acquires the flag overwrites them. One CTA's store is
            # enough.
            if cute.arch.block_idx()[0] == 0:
                peer.store_release(self.flags_R[thread] + 4 * (ALLOWED + self.rank), epoch + 1)
            # No barrier spans the grid, so that every CTA waits itself. Its flags lie in this GPU's
            # own memory: waiting takes nothing from the links.
            flag = self.flags_R[self.rank] + 4 * (ALLOWED + thread)
            peer.wait(flag, epoch, limit, report.toint(), thread)
        # Acquired by the threads that waited, and by all others through this barrier: no row may be
        # written to a peer before its ALLOWED flag has been read.
        cute.arch.sync_threads()
        return epoch

    @cute.jit
    def claim(self) -> Int32:
        """Claim a chunk of rows: its number, in lane 0; chunks of a wave follow those of the
        last."""
        claimed = Int32(0)
        # Relaxed: the claim hands out a number, and publishes no data. GPU scope: all CTAs count.
        if cute.arch.lane_idx() == 0:
            claimed = cute.arch.atomic_add(self.claims, Int32(1), sem="relaxed", scope="gpu")
        return claimed

    @cute.jit
    def send_side(
        self, side: cute.Pointer, side_R: cute.Tensor, pieces: Int32, back: cutlass.Constexpr
    ) -> None:
        """Send the block of side data, of `pieces` of 16 bytes, to all ranks, or `back` block r to
        rank r: to its block `rank`. Every rank starts with itself, so that they do not all write to
        the same one."""
        # Threads of the whole grid take successive pieces: accesses of a warp are contiguous.
        first = cute.arch.block_idx()[0] * (WARPS * WARP) + cute.arch.thread_idx()[0]
        step, ranks = self.ctas * (WARPS * WARP), cutlass.const_expr(cute.size(side_R))
        for block in cutlass.range_constexpr(ranks if back else 1):
            source, targets = side.toint(), [(self.rank + r) % ranks for r in range(ranks)]
            if cutlass.const_expr(back):
                targets = [targets[block]]
                source += Int64(targets[0]) * pieces * 16
            for piece in cutlass.range(first, pieces, step):
                # One load for all ranks; a block lands at the place of its sender.
                words = peer.load_global(source + Int64(piece) * 16)
                at = (Int64(self.rank) * pieces + piece) * 16
                for r in cutlass.range_constexpr(len(targets)):
                    ptx.store_global(side_R[targets[r]] + at, *words)

    @cute.jit
    def publish(self, part: Int32, last: Int32) -> None:
        """Raise the flags of a part, 0 (side data) or 1 + wave, once all warps have finished it.
        With part `last` the exchange ends."""
        state = self.state  # a store to an attribute in a branch would carry the object
        # The stores of all lanes come before the count, which lane 0 makes for its warp.
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            warps = self.finished_warps.iterator + part
            if self.last_of_all(warps, state.iterator + (FINISHED_CTAS + part)) == 1:
                # The last CTA: nobody counts this part again before the next exchange.
                state[FINISHED_CTAS + part] = Int32(0)
                # Plain stores: no warp claims any more, and the kernel that reads these next starts
                # after this one in its stream.
                if part == last:
                    state[EPOCH], state[CLAIMED] = self.epoch, Int32(0)
                # One fence for R relaxed flags: it orders all CTAs' writes, seen through the
                # atomics of `last_of_all`, before every flag.
                cute.arch.fence_acq_rel_sys()
                self.raise_flags(part)
        cute.arch.sync_warp()  # all lanes go on together to the next ballots and shuffles

    @cute.jit
    def last_of_all(self, finished_warps: cute.Pointer, finished_ctas: cute.Pointer) -> Int32:
        """One lane of each warp, after its work: 1 if all warps of all CTAs have finished it.

        `finished_warps`, in shared memory, and `finished_ctas` count from 0. Two steps, as a fence
        of system scope waits for the stores of its CTA, which one warp then pays for. After another
        fence by the caller the writes of all CTAs are visible to all GPUs.
        """
        last = Int32(0)
        # acq_rel: the last warp sees (and its fence covers) the writes of the CTA's other warps.
        before = cute.arch.atomic_add(finished_warps, Int32(1), sem="acq_rel", scope="cta")
        if before == WARPS - 1:
            # System scope: this CTA's rows lie in the memory of other GPUs.
            cute.arch.fence_acq_rel_sys()
            # GPU scope: CTAs of this grid meet here. acq_rel chains their fences to the last one's.
            others = cute.arch.atomic_add(finished_ctas, Int32(1), sem="acq_rel", scope="gpu")
            if others == self.ctas - 1:
                last = Int32(1)
        return last

    @cute.jit
    def raise_flags(self, part: Int32) -> None:
        """After a fence: set the flag of a part of this rank's push at all ranks."""
        for r in cutlass.range_constexpr(cute.size(self.flags_R)):
            peer.store_flag(self.flags_R[r] + 4 * (part * MAX_RANKS + self.rank), self.epoch)
