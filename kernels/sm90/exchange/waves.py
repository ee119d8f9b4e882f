"""Waves: groups of a rank's experts whose rows are exchanged together; waits for them, and signals.

The first wave is small, so that its consumer starts early: sizes grow as 1, 2, 4, 6, 6, 6, 6 of 31
parts. While a wave is multiplied the next one arrives, which may have twice as many experts. From
the fifth wave on they grow no more: where rows take as long to arrive as to be multiplied, a last
wave of half of them would not be hidden. With as many waves as experts, each wave has one expert.

Wave w of W begins at the share parts_before(w) / parts_before(W) of a rank's L experts. On the way
back the last wave is the one to wait for, so sizes are in the opposite order; and rows of few
experts are taken in slices, which then take the part of experts. With few experts, or slices, a
wave may be empty.

On the way there a row is in the wave of the first expert that reads it. Before the first tile of a
wave, each loading warp of a kernel that `waits` looks for that wave of every rank (`WaveWait`);
multiplying warps only wait for its loads. Borrowed weights come in waves too
(`extras.replication.kernels.weights_triton`).

    lane r < R    acquire the flag of rank r for this wave until it has reached the epoch
    all lanes     fence from the generic to the async proxy, sync_warp; then load rows of the wave

The stream has waited for the side data of the same exchange before (`push.wait_peers`), which left
its epoch in `SEEN`: the wait is for that one, in a replayed CUDA graph too.

On the way back a grouped GEMM signals its progress to `combine_push` (`Signaller`). Every
multiplying warp adds 1 to the count of a tile's wave (`last_wave_of`): with ping-pong when the
tile's stores are complete, as it would wait for the other group anyway; otherwise when it comes to
its next tile, by when they have completed. The reader computes the count of a complete wave.

    multiplying warp    stores of a tile (TMA, or lanes) -> fence.proxy.async -> fence of GPU scope
                        -> sync_warp -> relaxed add to the wave's count
    reading lane        acquire the count until it is complete -> sync_warp -> loads of rows

Both kernels run on one GPU, hence the scope. The reader resets all counts at its end, for the next
exchange: its last launch follows the GEMM in the stream.

Legend: R ranks.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from phalanx.kernels.limits import MAX_WAVES
from phalanx.kernels.sm90.exchange import peer
from phalanx.kernels.sm90.gemm.mainloop import GROUP_THREADS, TILE_ROWS, Mainloop

if TYPE_CHECKING:  # as `kernels.expert_mlp.activation`
    from torch import Tensor


@cute.jit
def parts_before(wave: Int32, local: Int32, waves: Int32) -> Int32:
    """Parts of the experts that come before a wave: 0, 1, 3, 7, 13, 19, ..."""
    # 2^w - 1 up to wave 3, then 6 more each.
    grown = cutlass.select_(wave <= 3, (Int32(1) << wave) - 1, 6 * wave - 11)
    return cutlass.select_(waves >= local, wave, grown)


@cute.jit
def wave_of(expert: Int32, local: Int32, waves: Int32) -> Int32:
    """Wave of an expert, of `local` in all, without a division."""
    # Expert e is at or past share p / parts if e * parts >= local * p; each such wave counts once.
    parts, wave = expert * parts_before(waves, local, waves), Int32(0)
    for w in cutlass.range_constexpr(1, MAX_WAVES):
        if parts >= local * parts_before(Int32(w), local, waves):
            wave += 1
    return wave


def slice_tiles(row_tiles: Any, bits: Any) -> Any:
    """Row tiles of each of an expert's `1 << bits` slices; the last ones may have fewer."""
    return (row_tiles + (1 << bits) - 1) >> bits


@cute.jit
def last_wave_of(expert: Int32, local: Int32, waves: Int32) -> Int32:
    """The wave in which the sums are complete that end with an expert: the last one is small."""
    return waves - 1 - wave_of(local - 1 - expert, local, waves)


WORDS = 6
"""int64 words: addresses of this rank's flags of the first wave, of the awaited epoch and of the
report; milliseconds after which a wait times out; R, and the stride in int32 from a wave's
flags to the next's; this rank's experts and their waves."""
_HALF = 16  # bits of the lower one of two sizes that share a word


def ready_words(
    flags: int,
    epoch: int,
    report: int,
    *,
    limit_ms: int,
    ranks: int,
    wave_stride: int,
    experts: int,
    waves: int,
) -> "Tensor":
    """The words, on the host; see WORDS. A ValueError without experts, or with too many ranks."""
    import torch

    if not 1 <= ranks <= 32 or experts < 1:
        raise ValueError(f"{ranks} ranks, {experts} experts: must be 1 to 32, and 1 or more")
    sizes = (ranks + (wave_stride << _HALF), experts + (waves << _HALF))
    return torch.tensor([flags, epoch, report, limit_ms, *sizes])


class WaveWait:
    """Device side, for each of the loading warps. `pointer` is the address of the words; `seen`, an
    int32 of this warp in shared memory (no register is to spare), counts the waves that have
    arrived."""

    def __init__(self, pointer: cute.Pointer, seen: cute.Pointer) -> None:
        self.words: Any = cute.make_tensor(pointer, cute.make_layout(WORDS))
        self.seen: Any = cute.make_tensor(seen, cute.make_layout(1))

    @cute.jit
    def reset(self) -> None:
        self.seen[0] = Int32(0)
        cute.arch.sync_warp()

    @cute.jit
    def __call__(self, expert: Int32) -> None:
        words, seen = self.words, self.seen
        # Loaded each time, as no register is to spare for them.
        experts = Int32(words[5])
        wave = wave_of(expert, experts & ((1 << _HALF) - 1), experts >> _HALF)
        # Waves come in the order of experts, as tiles do: most tiles find theirs seen.
        if wave >= seen[0]:
            sizes, lane = Int32(words[4]), cute.arch.lane_idx()
            if lane < (sizes & ((1 << _HALF) - 1)):
                flag = words[0] + 4 * Int64(wave * (sizes >> _HALF) + lane)
                # Written by an earlier kernel of the stream: what the flags must have reached.
                epoch = peer.load_acquire(words[1])
                peer.wait(flag, epoch, Int32(words[3]), words[2], lane)
            # Acquired in the generic proxy; TMA loads borrowed weights through the async one.
            cute.arch.fence_proxy("async.global")
            cute.arch.sync_warp()  # all lanes: each has waited for one rank
            seen[0] = wave + 1  # all lanes store the same number
            cute.arch.sync_warp()


CLAIMED, FINISHED_CTAS, NEXT_TILE, COUNTS = 0, 1, 2, 3
PROGRESS = COUNTS + MAX_WAVES
"""int32 counters of a rank, 0 between exchanges: claimed chunks of rows and finished CTAs (both of
`combine_push`), the scheduler's counter of tiles, and the count of each wave."""
_WARPS = GROUP_THREADS // 32


class ReadyRows(NamedTuple):
    """Expert rows, and how their reader knows which waves of them are ready (default: all)."""

    rows_SD: "Tensor"
    progress: "Tensor"  # int32 [PROGRESS]
    waves: int = 1
    tile_rows: int = 1
    tile_counts: int = 0  # counts for `tile_rows` rows of an expert, over all columns
    slice_bits: int = 0  # log2 of the slices that an expert's rows are taken in


class TileSignal(NamedTuple):
    """Request that a launch of `grouped_gemm` signals its tiles, and yields SMs to their reader."""

    out_SN: "Tensor"  # output of the launch
    progress: "Tensor"  # int32 [PROGRESS]
    waves: int
    loop: Mainloop  # tile of the launch, on which the counts depend
    sms: int  # SMs of the reader: as many CTAs end early
    yield_after: float  # fraction of the experts after which they end
    slice_bits: int = 0  # log2 of the slices that an expert's rows are taken in

    def sizes(self, experts: int) -> tuple[int, int, int, int]:
        """Waves, CTAs that yield, the first slice at which they do, and `slice_bits`."""
        # In slices, since that is what the scheduler counts; rounded down, so that SMs come early.
        first_late = int(self.yield_after * (experts << self.slice_bits))
        return self.waves, self.sms, first_late, self.slice_bits

    @property
    def ready_rows(self) -> ReadyRows:
        # With ping-pong a tile has one group of warps; otherwise both groups share each tile.
        groups = 1 if self.loop.pingpong else 2
        column_tiles = -(-self.out_SN.shape[1] // self.loop.columns)
        counts = groups * _WARPS * column_tiles
        progress = (self.waves, TILE_ROWS, counts, self.slice_bits)
        return ReadyRows(self.out_SN, self.progress, *progress)


def tile_sizes(signal: TileSignal | None, experts: int) -> dict[str, int]:
    """Integer arguments of a `grouped_gemm` launch, with or without a request, by name."""
    names = "waves", "yielding", "first_late", "slice_bits"
    sizes = (0, 0, experts, 0) if signal is None else signal.sizes(experts)
    return dict(zip(names, sizes, strict=True))


class Signaller:
    """Device side, for a warp. `pending` is 1 + the wave of a tile not yet signalled, or 0."""

    def __init__(
        self, progress: cute.Pointer, experts: Int32, waves: Int32, slice_bits: Int32
    ) -> None:
        self.progress, self.experts = progress, experts
        self.waves, self.slice_bits = waves, slice_bits

    @cute.jit
    def __call__(self, pending: Int32) -> None:
        if pending > 0:
            # read=False: the bulk stores are complete, not only read from shared memory.
            cute.arch.cp_async_bulk_wait_group(0, read=False)
            # TMA wrote through the async proxy; the count is an access of the generic one.
            cute.arch.fence_proxy("async.global")
            # Also rows that lanes stored themselves, each lane's before the warp's count.
            cute.arch.fence_acq_rel_gpu()
            cute.arch.sync_warp()
            # Relaxed, as the fence came before: the count itself only has to be atomic.
            if cute.arch.lane_idx() == 0:
                count: Any = self.progress + (COUNTS - 1 + pending)
                cute.arch.atomic_add(count, Int32(1), sem="relaxed", scope="gpu")

    @cute.jit
    def pending(self, sliced: Int32) -> Int32:
        """The next `pending`, for an expert's slice as in records."""
        return last_wave_of(sliced, self.experts << self.slice_bits, self.waves) + 1
