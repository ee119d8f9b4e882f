"""The grouped GEMM kernel behind `grouped_gemm`, `fc1_act` and `fc2_dgrad_dact`.

Persistent CTAs take tiles from `schedule`; the loading warps fill the stages of `mainloop`, two
warp groups multiply them and hand their accumulators to an epilogue (see `Gemm`). The grid does not
depend on the numbers of rows, which stay on the device: offsets[e] to offsets[e + 1] are expert e's
rows, and nothing is read or written from offsets[L] on.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32

from phalanx.kernels.sm90.exchange.waves import WaveWait
from phalanx.kernels.sm90.gemm.epilogues import Linear
from phalanx.kernels.sm90.gemm.mainloop import GROUP_THREADS, TILE_ROWS, Mainloop, Producer
from phalanx.kernels.sm90.gemm.persistent import PersistentKernel, stages_beside
from phalanx.kernels.sm90.gemm.tensors import Rows, Weights, array, vector
from phalanx.kernels.sm90.gemm.tile_scheduler import Schedule, Scheduler


@dataclass(frozen=True)
class GemmConfig:
    """Choices that are compiled into a kernel."""

    epilogue: Any  # a `Linear`, `Act` or `ActGrad` of `epilogues`
    loop: Mainloop
    waits: bool = False
    """Wait for rows of A that other GPUs are still pushing; only if they are gathered."""

    def __post_init__(self) -> None:
        if self.waits and not self.loop.gather:
            raise ValueError("ready: rows that are still being pushed must be gathered by an index")

    @property
    def mainloop(self) -> Mainloop:
        """The loop with as many stages as fit beside the epilogue, at most 8."""
        stages = stages_beside(self.epilogue.bytes(self.loop), self.loop.stage_bytes)
        return replace(self.loop, stages=min(8, stages))

    @property
    def num_gate_parts(self) -> int:
        """Channels of B that a column of the output takes: 2 with a gate."""
        return int(self.epilogue.product_parts)

    @property
    def signals(self) -> bool:
        """True if another kernel waits for waves of finished tiles; that one zeroes the counter."""
        return isinstance(self.epilogue, Linear) and self.epilogue.signals

    @property
    def schedule(self) -> Schedule:
        loading = GROUP_THREADS // 32 if self.loop.gather else 1
        readers = loading + 2 * GROUP_THREADS // 32
        return Schedule(TILE_ROWS, readers, sliced=self.signals)


class Arguments(NamedTuple):
    """Arguments of the kernel."""

    loads: tuple[Any, Any, Any, Any]  # TMA atom and tensor of A, and of B
    epilogue: Any
    tiled_mma: cute.TiledMma
    mA: cute.Tensor
    index: cute.Tensor
    offsets: cute.Tensor
    counter: cute.Tensor  # claimed tiles
    ready: cute.Pointer | None  # words of `WaveWait`
    experts: Int32
    column_tiles: Int32
    blocks: Int32  # of the contraction
    half_offset: Int32  # columns of B from its first half to its second one
    ctas: Int32
    yielding: tuple[Int32, Int32, Int32] | None  # see `Gemm.run`
    scales: Any  # of operands in FP8


class Gemm(PersistentKernel):
    """Device side; subclasses create the tensors and launch.

    Roles. A CTA has 12 warps in three groups, one CTA an SM:

        warps    group  registers  role
        0        0      40 or 56   scheduler: claims a tile ahead, looks it up, writes its record;
                                   loader: TMA of B, and of A if its rows are consecutive
        0 - 3    0      56         loaders of A by cp.async, if its rows are picked by an index;
                                   otherwise warps 1 to 3 have nothing to do
        4 - 7    1      232 or     multiply a stage with wgmma, then the epilogue, warp by warp;
        8 - 11   2      224        both groups share a tile (64 of its 128 rows each), or with
                                   ping-pong each has every other tile to itself

    Pipelines, and the arrivals that complete a phase of their barriers:

        schedule   2 records       full: 1, of warp 0         empty: 1 of each loading warp (1 or
                                                              4) and of the 8 that multiply
        ring       3 to 8 stages   full: 1, of warp 0, and    empty: 1 of each warp that multiplies
                                   the bytes of its TMA;      the tile, 8, or 4 with ping-pong
                                   + 128 if A is gathered
        turns      ping-pong only  a named barrier of 256 threads for each of the two groups: that
                                   group waits there, the other one arrives
        h          `ActGrad` only  3 strips a warp; full: 1, of the warp itself, and bytes of TMA

                     records (schedule)
        warp 0 ---------------------------------> loading warps, warps 4 - 11
                     stages (ring)                                   turns (ping-pong)
        loading warps --------------------------> warps 4 - 11       group 1 <--> group 2

    Time, of one tile of K blocks (h is half of them):

        warp 0     read record | claim | load 0 .. h | look up the claim, send it | load h .. K
        warps 1-3  read record |       | load 0 .. h |                            | load h .. K
        a group    read record | wait its turn | wgmma 0 .. K | pass the turn | last wait | store

    The claim's answer has long arrived when it is read, and the stages hide the look-up. A stage is
    released when its wgmma has ended, which is while that of the next one runs. With ping-pong a
    group stores while the other one multiplies; without, a tile's stores drain while the next one
    is multiplied. A kernel that `waits` looks for the wave of a tile's expert before its first load
    (`ready`); one that signals counts finished tiles for another kernel (`progress`).
    """

    @cute.jit
    def run(
        self,
        a: Rows,
        b: Weights,
        epilogue: Any,
        index: cute.Pointer,
        offsets: cute.Pointer,
        counter: cute.Pointer,
        ready: cute.Pointer | None,
        S: Int32,
        ctas: Int32,
        stream: cuda.CUstream,
        yielding: tuple[Int32, Int32, Int32] | None = None,
    ) -> None:
        """Launch over A and B for S expert rows.

        `yielding`, of a kernel that signals: how many CTAs yield their SMs, ending after their
        first tile of a late slice of an expert; the first late slice; `slice_bits`.
        """
        loop, parts, L = self.config.mainloop, self.config.num_gate_parts, b.experts
        mA, mB, scales = loop.operands(a, b, parts)
        columns, wide = b.columns // parts, loop.columns // parts
        # B's columns come in two halves also without a gate: one way to load a tile serves both.
        half_offset = columns if parts == 2 else Int32(loop.columns // 2)
        arguments = Arguments(
            loop.tma(mA, mB),
            epilogue,
            loop.tiled_mma(),
            mA,
            vector(index, S),
            vector(offsets, L + 1),
            vector(counter, 1),
            ready if cutlass.const_expr(self.config.waits) else None,
            L,
            (columns + (wide - 1)) // wide,
            loop.blocks(mA),
            half_offset,
            ctas,
            yielding,
            scales,
        )
        self.launch(arguments, ctas, stream)

    @property
    def registers(self) -> tuple[int, int]:
        registers: tuple[int, int] = self.config.mainloop.registers
        return registers

    def fields(self) -> dict[str, Any]:
        config, loop = self.config, self.config.mainloop
        return dict(
            schedule=config.schedule.storage(),
            waves=array(Int32, GROUP_THREADS // 32),
            mainloop=loop.storage(),
            epilogue=config.epilogue.storage(loop),
        )

    def rank(self) -> Int32:
        # Without it registers are allocated differently in every grouped GEMM: remove it only with
        # a measurement.
        return cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())

    def carried(self, storage: Any) -> Any:
        return storage

    def start(self, arguments: Arguments, storage: Any, rank: Int32) -> tuple[Scheduler, Int32]:
        x = arguments
        slice_bits = None if x.yielding is None else x.yielding[2]
        scheduler = Scheduler(
            *(self.config.schedule, storage.schedule, x.offsets, x.counter),
            *(x.experts, x.column_tiles, slice_bits),
        )
        return scheduler, rank

    def descriptors(self, arguments: Arguments) -> tuple[cute.CopyAtom, ...]:
        loads = arguments.loads
        # Gathered rows have none.
        return (loads[2],) if self.config.mainloop.gather else (loads[0], loads[2])

    def init_barriers(self, storage: Any, shared: tuple[Scheduler, Int32]) -> None:
        shared[0].init_barriers()
        self.config.mainloop.ring(storage.mainloop).init_barriers()
        self.config.epilogue.init_barriers(storage.epilogue)

    @cute.jit
    def load(
        self, arguments: Arguments, storage: Any, shared: tuple[Scheduler, Int32], warp: Int32
    ) -> None:
        config, loop, (scheduler, zero) = self.config, self.config.mainloop, shared
        x = arguments
        rest = zero, warp, x.blocks, x.half_offset, x.ctas, x.yielding
        if cutlass.const_expr(loop.gather):
            load = loop.producer(storage.mainloop, x.loads, x.mA, x.index)
            wave_wait = None
            if cutlass.const_expr(config.waits):
                wave_wait = WaveWait(x.ready, storage.waves.data_ptr() + warp)
            self._load(load, scheduler, wave_wait, *rest)
        else:
            # A TMA copy of a box is one instruction of one thread: one warp keeps up.
            if warp == 0:
                load = loop.producer(storage.mainloop, x.loads, x.mA, x.index)
                self._load(load, scheduler, None, *rest)

    @cute.jit
    def compute(
        self, arguments: Arguments, storage: Any, shared: tuple[Scheduler, Int32], group: Int32
    ) -> None:
        loop, (scheduler, zero), x = self.config.mainloop, shared, arguments
        thread = cute.arch.thread_idx()[0] - GROUP_THREADS
        operands = (x.scales, x.index, self.config.waits)
        mma = loop.mma_consumer(storage.mainloop, x.tiled_mma, group - 1, *operands)
        store = self.config.epilogue.device(loop, storage.epilogue, thread, x.epilogue)
        self._compute(mma, store, scheduler, zero, group - 1, x.blocks)

    @cute.jit
    def _load(
        self,
        load: Producer,
        scheduler: Scheduler,
        wave_wait: Any,
        zero: Int32,
        warp: Int32,
        blocks: Int32,
        half_offset: Int32,
        ctas: Int32,
        yielding: tuple[Int32, Int32, Int32] | None,
    ) -> None:
        """Loading warps: tiles to stages; the leader also finds the tile after the current one.

        The claim is issued when a tile begins and read half-way: by then the atomic has returned,
        and the stages hold enough work to hide a look-up.
        """
        wide = self.config.mainloop.columns // self.config.num_gate_parts
        leads = (zero == 0) & (warp == 0)
        # The window over the experts is kept in registers from tile to tile: tiles do not decrease,
        # so it moves forwards only, and most look-ups read no offset.
        tile, first, before = Int32(0), Int32(0), Int32(0)
        begin, end, inclusive = Int32(0), Int32(0), Int32(0)
        if leads:
            tile = scheduler.first()
            begin, end, inclusive = scheduler.window(first)
            first, before, begin, end, inclusive, row, stop, column, expert, tiles = (
                scheduler.locate(tile, first, before, begin, end, inclusive)
            )
            scheduler.send(Int32(0), row, stop, column, expert)
            if cutlass.const_expr(not self.config.signals):
                if expert < 0:
                    # This CTA found no tile at all; its claim is one of those past the last tile.
                    scheduler.finish(tile, ctas, tiles)
        number = Int32(0)
        state, sources_of, finish = load.ring.producer_state(), load.sources, load.finish
        if cutlass.const_expr(self.config.waits):
            wave_wait.reset()
        row, stop, column, expert = scheduler.read(number)
        while expert >= 0:
            claimed, goes_on = Int32(0), leads
            if cutlass.const_expr(self.config.signals):
                assert yielding is not None
                # A CTA that yields sends the end (-1) in place of a next tile and claims nothing
                # more: the others take its tiles, and the reader of the tiles gets its SM.
                late = (cute.arch.cluster_idx()[0] < yielding[0]) & (expert >= yielding[1])
                goes_on = leads & ~late
                if leads & late:
                    scheduler.send(number + 1, Int32(0), Int32(0), Int32(0), Int32(-1))
            if goes_on:
                claimed = scheduler.claim()
            if cutlass.const_expr(self.config.waits):
                # Rows of one expert arrive in one wave, so once a tile is enough.
                wave_wait(expert)
            # `zero` is 0, see `rank`.
            first_row = row + zero * TILE_ROWS
            half = (blocks + 1) // 2
            # Addresses of gathered rows are looked up once a tile; blocks of the contraction add to
            # them.
            sources = sources_of(first_row, stop)
            first_column = column * wide
            if cutlass.const_expr(self.config.signals):
                expert = expert >> scheduler.slice_bits  # records hold the expert and its slice
            state = load(
                state, sources, first_row, first_column, expert, half_offset, Int32(0), half
            )
            if goes_on:
                tile = scheduler.claimed_tile(claimed)
                first, before, begin, end, inclusive, row, stop, next_column, next_expert, tiles = (
                    scheduler.locate(tile, first, before, begin, end, inclusive)
                )
                scheduler.send(number + 1, row, stop, next_column, next_expert)
                if cutlass.const_expr(not self.config.signals):
                    if next_expert < 0:
                        scheduler.finish(tile, ctas, tiles)
            state = load(state, sources, first_row, first_column, expert, half_offset, half, blocks)
            # In FP8 the copies of the last blocks are still in flight: their stages are declared
            # full before the next tile.
            finish(state, blocks)
            number += 1
            row, stop, column, expert = scheduler.read(number)

    @cute.jit
    def _compute(
        self, mma: Any, store: Any, scheduler: Scheduler, zero: Int32, group: Int32, blocks: Int32
    ) -> None:
        """Multiplying warp group: stages to accumulators, and those to the epilogue."""
        loop = self.config.mainloop
        number, carry, prefetch = Int32(0), Int32(0), store.prefetch
        start = mma.start
        start()
        row, end, column, expert = scheduler.read(number)
        while expert >= 0:
            mine = True
            if cutlass.const_expr(loop.pingpong):  # even tiles are group 0's, odd ones group 1's
                mine = number & 1 == group
            if mine:
                first_row = row + zero * TILE_ROWS
                # Loads of the epilogue, h of `ActGrad`, run under the product.
                prefetch(first_row, end, column)
                expert_id = expert
                if cutlass.const_expr(self.config.signals):
                    expert_id = expert >> scheduler.slice_bits
                # Stages are numbered over all tiles of the CTA. A group of ping-pong skips the
                # other one's without counting: stage and phase follow from the number.
                mma(number * blocks, blocks, first_row, end, column, expert_id)
                carry = store(mma.acc, carry, first_row, end, column, expert)
            number += 1
            row, end, column, expert = scheduler.read(number)
        store.finish(carry)
