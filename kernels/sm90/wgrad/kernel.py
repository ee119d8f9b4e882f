"""Kernel `wgrad`, weight gradients: dw[e] (+)= sum over expert e's rows s of outer(d[s], v[s]).

A tile of dw belongs to one expert and is computed over all of its rows by one CTA. Every expert has
the same number of tiles, so tiles are numbered expert by expert and looked up by division. Experts
without rows get zeros, or nothing where the kernel adds or nobody reads them. The numbers of rows
stay on the device: offsets[e] to offsets[e + 1] are expert e's, and rows from offsets[L] on have no
influence.

The rows of an expert may lie in two segments, each with operands and offsets of its own, such as
the rows of two micro-batches (`WgradPairKernel`). A tile is then the sum over the rows of both,
stored once; it has a record for each segment, which differ in their rows alone.

How stages are loaded and multiplied is a `WgradMath`: `bf16.Contraction` of rows in bf16,
`fp8.Fp8Contraction` of columns in FP8.

Roles. A CTA has 12 warps in three groups, one CTA an SM:

    warp       registers  role
    0          40         scheduler (claim, look-up, record) and TMA of d and v
    1          40         bf16: clears the rows after an expert's last one in its last stage
    2, 3       40         nothing to do
    0 - 3      56         with an index instead of these: cp.async of the gathered operand; warp 0
                          is the scheduler and issues TMA of the other one
    4 - 11     232 / 224  two groups, 64 rows of the tile each: wgmma, then store or add the tile

Pipelines, and the arrivals that complete a phase of their barriers:

    schedule   2 records       full: 1, of warp 0       empty: 1 of each loading warp (1, 2 or 4)
                                                        and of the 8 that multiply
    stages     4 or 5          full: 1 (+ 128)          empty: 8, of the warps that multiply
                               bf16: tma_done: 1        leader_started: 1   (`ContractionRing`)
    blocks     2 to 4 buffers a group of the output: named barriers 1 and 2, 128 threads each

    warp 0 --TMA--> tma_done[stage] --warp 1 clears--> full[stage]     last stage of an expert, bf16
    warp 0 --TMA-----------------------------------> full[stage] --> groups 1 and 2

In bf16 the second group runs 2 stages behind the first: one stores a tile while the other
multiplies.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from phalanx.kernels.sm90.gemm.mainloop import MMA_GROUPS, TILE_ROWS
from phalanx.kernels.sm90.gemm.persistent import PersistentKernel, stages_beside
from phalanx.kernels.sm90.gemm.tensors import vector
from phalanx.kernels.sm90.gemm.tile_scheduler import ExpertTiles, Schedule, Scheduler, unpack
from phalanx.kernels.sm90.jit.pointers import BytesPtr, Fp32Ptr, IntPtr
from phalanx.kernels.sm90.wgrad.accumulate import Output, Stores

_MMA_WARPS = 4 * MMA_GROUPS


def choose(I: int) -> int:  # noqa: E741
    """Columns of a tile: 256 or 192, whichever wastes fewer."""
    return min((256, 192), key=lambda columns: -I % columns)


class Factor(NamedTuple):
    """An operand as an argument: tensors and ints at a launch, pointers and Int32 in a kernel."""

    data: BytesPtr  # bf16 [tokens, channels], or FP8 [channels, tokens]; contiguous
    scale: Fp32Ptr  # fp32 [token blocks, channel blocks]; null in bf16
    tokens: Int32
    channels: Int32
    parts: Int32  # parts of the channels, in each of which blocks restart; 1 in bf16
    scale_token: Int32  # stride of the scales from a block of tokens to the next one
    scale_channel: Int32  # stride of the scales from a block of channels to the next one


class WgradMath(Protocol):
    """How stages of a weight gradient are loaded and multiplied: a frozen dataclass."""

    @property
    def stages(self) -> int: ...

    @property
    def columns(self) -> int:
        """Columns of a tile, of I. Its rows, of O, are `TILE_ROWS`."""

    @property
    def stage_bytes(self) -> int: ...

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread in the loading and in a multiplying warp group."""

    @property
    def loading_warps(self) -> int:
        """Warps that load: 1; 2 of which the second one clears; or 4."""

    @property
    def store_for_each_tile(self) -> bool:
        """True to make the addresses of the output anew for each tile (`Stores`)."""

    def operands(
        self, d: Factor, v: Factor, index: cute.Pointer
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Host side: TMA atom and tensor of each operand; and what else the device side reads."""

    def tiled_mma(self) -> cute.TiledMma: ...

    def output_mma(self, tiled_mma: cute.TiledMma) -> cute.TiledMma:
        """An MMA whose accumulators have the layout of a tile's."""

    def shape(self, operands: tuple[Any, ...]) -> tuple[Int32, Int32]:
        """O and I."""

    def storage(self) -> Any:
        """The part of a kernel's shared memory that the stages need."""

    def init_barriers(self, storage: Any) -> None: ...

    def loader(self, storage: Any, loads: Any, operands: Any, warp: Int32) -> Any:
        """Side of a loading warp."""

    def clear(self, storage: Any) -> Any:
        """Side of the clearing warp, if there is one."""

    def multiplier(self, storage: Any, tiled_mma: cute.TiledMma, operands: Any) -> Any:
        """Side of a multiplying warp group; its `tile` holds the accumulators after a call. Its
        `of_segment` returns the side for another segment, which adds to the same accumulators."""


class Segment(NamedTuple):
    """Rows of the experts, host side."""

    d: Factor
    v: Factor
    index: IntPtr  # int32 [S]; read only if an operand is gathered
    offsets: IntPtr  # int32 [L + 1]


@dataclass(frozen=True)
class WgradConfig:
    """Choices that are compiled into a `wgrad` kernel."""

    math: WgradMath
    fp32_out: bool = False  # dw is fp32, not bf16
    add: bool = False  # add to dw; a bf16 sum is rounded a second time
    ordered: bool = False  # take the experts in an order given by the caller
    zeros: bool = True  # write zeros for experts without rows, unless it adds

    @property
    def output(self) -> Output:
        """Buffers of the output: narrower tiles leave memory to stage all or most of a tile."""
        columns = self.math.columns
        blocks = columns // (32 if self.fp32_out else 64)
        return Output(columns, self.fp32_out, self.add, 2 if columns == 256 else min(4, blocks))

    @property
    def contraction(self) -> Any:
        """The math with as many stages as fit beside the output's buffers."""
        math: Any = self.math
        return replace(math, stages=stages_beside(self.output.bytes, math.stage_bytes))

    @property
    def schedule(self) -> Schedule:
        return Schedule(TILE_ROWS, self.math.loading_warps + _MMA_WARPS)


class Arguments(NamedTuple):
    """Arguments of the kernel; tuples have an entry for each segment."""

    loads: tuple[tuple[Any, ...], ...]  # TMA atom and tensor of each operand that is not gathered
    stores: tuple[Any, Any]  # TMA atom and tensor of dw
    tiled_mma: cute.TiledMma
    operands: tuple[tuple[Any, ...], ...]
    offsets: tuple[cute.Tensor, ...]
    order: cute.Tensor
    counter: cute.Tensor  # claimed tiles
    experts: Int32
    ctas: Int32


type Shared = tuple[Scheduler, ExpertTiles, Any]  # the last one is the storage


class WgradKernel(PersistentKernel):
    """The kernel of a configuration, as `cute.compile` takes it."""

    @cute.jit
    def __call__(
        self,
        d: Factor,
        v: Factor,
        dw: BytesPtr,
        index: IntPtr,
        offsets: IntPtr,
        order: IntPtr,
        counter: IntPtr,
        L: Int32,
        ctas: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """dw [L, O, I]; index [S], read only if an operand is gathered; offsets [L + 1]; order [L],
        read only with config.ordered; counter [1], 0 before and after."""
        self.run((Segment(d, v, index, offsets),), dw, order, counter, L, ctas, stream)

    def run(
        self,
        segments: tuple[Segment, ...],
        dw: cute.Pointer,
        order: cute.Pointer,
        counter: cute.Pointer,
        L: Int32,
        ctas: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Launch for the rows of all segments; O and I are those of the first one."""
        config = self.config
        loop = config.contraction
        O, I = (cute.assume(x.channels, divby=64) for x in segments[0][:2])  # noqa: E741
        wide_i = cute.assume(Int64(I), divby=64)
        # 64 bits: the weights of all experts may have more than 2^31 elements.
        plane = cute.assume(Int64(O) * Int64(I), divby=64)
        layout = cute.make_layout((O, I, L), stride=(wide_i, 1, plane))
        # Segments lie in tensors of their own, and a TMA descriptor has one tensor.
        both = [loop.operands(s.d, s.v, s.index) for s in segments]
        arguments = Arguments(
            tuple(loads for loads, _ in both),
            config.output.tma(
                cute.make_tensor(cute.recast_ptr(dw, dtype=config.output.dtype), layout)
            ),
            loop.tiled_mma(),
            tuple(operands for _, operands in both),
            tuple(vector(s.offsets, L + 1) for s in segments),
            vector(order, L),
            vector(counter, 1),
            L,
            ctas,
        )
        self.launch(arguments, ctas, stream)

    @property
    def registers(self) -> tuple[int, int]:
        registers: tuple[int, int] = self.config.contraction.registers
        return registers

    def fields(self) -> dict[str, Any]:
        return dict(
            schedule=self.config.schedule.storage(),
            contraction=self.config.contraction.storage(),
            output=self.config.output.storage(),
        )

    def start(self, arguments: Arguments, storage: Any, rank: Any) -> Shared:
        x, config, loop = arguments, self.config, self.config.contraction
        shape = loop.shape(x.operands[0])
        # Of the first segment: the number of an expert's tiles follows from O and I, and its rows
        # in other segments are looked up when they are loaded.
        tiles = ExpertTiles(
            x.offsets[0],
            x.order,
            config.ordered,
            config.schedule.band,
            x.experts,
            (shape[0] + (TILE_ROWS - 1)) // TILE_ROWS,
            (shape[1] + (loop.columns - 1)) // loop.columns,
        )
        scheduler = Scheduler(
            *(config.schedule, storage.schedule, x.offsets[0], x.counter),
            *(x.experts, tiles.column_tiles),
        )
        return scheduler, tiles, storage

    def descriptors(self, arguments: Arguments) -> tuple[cute.CopyAtom, ...]:
        # Atom and tensor alternate; a gathered operand has neither.
        loads = (atom for of in arguments.loads for atom in of[::2])
        return (*loads, arguments.stores[0])

    def init_barriers(self, storage: Any, shared: Shared) -> None:
        shared[0].init_barriers()
        self.config.contraction.init_barriers(storage.contraction)

    @cute.jit
    def load(self, arguments: Arguments, storage: Any, shared: Shared, warp: Int32) -> None:
        loop, x = self.config.contraction, arguments
        scheduler, tiles, storage = shared
        load = tuple(
            loop.loader(storage.contraction, *of, warp)
            for of in zip(x.loads, x.operands, strict=True)
        )
        # The first warp leads the others; alone it needs no test.
        leads = True if cutlass.const_expr(loop.loading_warps == 1) else warp == 0
        # Other warps of the group read no records, and `readers` does not count them: they go on to
        # the barrier at the end of the kernel.
        if cutlass.const_expr(loop.loading_warps == 4):
            self._load(load, scheduler, tiles, x.offsets[1:], leads, x.ctas)
        else:
            if warp == 0:
                self._load(load, scheduler, tiles, x.offsets[1:], leads, x.ctas)
            if cutlass.const_expr(loop.loading_warps == 2):
                if warp == 1:
                    self._clear(loop.clear(storage.contraction), scheduler)

    @cute.jit
    def compute(
        self,
        arguments: Arguments,
        storage: Any,
        shared: Shared,
        group: Int32,
    ) -> None:
        x, config, loop = arguments, self.config, self.config.contraction
        scheduler, _, storage = shared
        mma = loop.multiplier(storage.contraction, x.tiled_mma, x.operands[0])
        # An MMA for each segment: what it is set to in a branch is not known outside of it.
        others = [mma.of_segment(loop.tiled_mma(), of) for of in x.operands[1:]]
        store = Stores(
            *(loop.store_for_each_tile, config.output, storage.output),
            *(loop.output_mma(x.tiled_mma), x.stores, loop.shape(x.operands[0])),
        )
        self._compute((mma, *others), store, scheduler)

    @cute.jit
    def _load(
        self,
        loaders: tuple[Any, ...],
        scheduler: Scheduler,
        tiles: ExpertTiles,
        others: tuple[cute.Tensor, ...],
        leads: Any,
        ctas: Int32,
    ) -> None:
        """Loading warp: tiles to stages; the first one also finds the tile after the current one.

        The claim is issued when the last segment of a tile begins and read half-way: by then the
        atomic has returned, and the stages hold enough work to hide a look-up. `loaders` are those
        of each segment, `others` offsets of the segments behind the first one.
        """
        tile, first = Int32(0), Int32(0)
        window_expert, begin, end = Int32(0), Int32(0), Int32(0)
        if leads:
            # Nothing hides the first look-up: all warps of the CTA wait for its record.
            tile = scheduler.first()
            window_expert, begin, end = tiles.window(first)
            first, window_expert, begin, end, row, stop, position, expert = tiles.locate(
                tile, first, window_expert, begin, end
            )
            scheduler.send(Int32(0), row, stop, position, expert)
            # The CTA came too late for any tile. Its claim is one of those past the last tile,
            # which together zero the counter.
            if expert < 0:
                scheduler.finish(tile, ctas, tiles.each * tiles.experts)
        number, state = Int32(0), loaders[0].state()
        row, stop, position, expert = scheduler.read(number)
        while expert >= 0:
            # All segments but the last, whose record the loop behind it reads. The next record is
            # sent half-way: one of the two slots has the current record, and the other one is free
            # once all warps have read the record before.
            for segment in cutlass.range_constexpr(len(others)):
                blocks = loaders[segment].begin(row, stop, position)
                state, blocks = loaders[segment].half(state, blocks, False)
                if leads:
                    # The same in all lanes, and as far ahead of its use as a look-up.
                    next_row, next_stop = others[segment][expert], others[segment][expert + 1]
                    # A tile without rows in a segment has a record for it all the same: every
                    # reader counts records.
                    scheduler.send(number + 1, next_row, next_stop, position, expert)
                state, blocks = loaders[segment].half(state, blocks, True)
                number += 1
                row, stop, position, expert = scheduler.read(number)
            claimed = Int32(0)
            if leads:
                claimed = scheduler.claim()
            blocks = loaders[-1].begin(row, stop, position)
            state, blocks = loaders[-1].half(state, blocks, False)
            if leads:
                tile = scheduler.claimed_tile(claimed)
                (
                    first,
                    window_expert,
                    begin,
                    end,
                    next_row,
                    next_stop,
                    next_position,
                    next_expert,
                ) = tiles.locate(tile, first, window_expert, begin, end)
                scheduler.send(number + 1, next_row, next_stop, next_position, next_expert)
                if next_expert < 0:
                    scheduler.finish(tile, ctas, tiles.each * tiles.experts)
            state, blocks = loaders[-1].half(state, blocks, True)
            number += 1
            row, stop, position, expert = scheduler.read(number)

    @cute.jit
    def _clear(self, clear: Any, scheduler: Scheduler) -> None:
        carry, clear_tile = clear.begin(), clear.tile
        number = Int32(0)
        row, stop, _, expert = scheduler.read(number)
        while expert >= 0:
            carry = clear_tile(carry, row, stop)
            number += 1
            row, stop, _, expert = scheduler.read(number)

    @cute.jit
    def _compute(self, mmas: tuple[Any, ...], stores: Stores, scheduler: Scheduler) -> None:
        """Multiplying warp group, a side for each segment: from stages to a tile of dw."""
        mma = mmas[0]
        store, size_of, advance = stores.get, mma.size, mma.advance
        number, carry = Int32(0), mma.begin()
        row, stop, position, expert = scheduler.read(number)
        while expert >= 0:
            down, across = unpack(position)
            # Kept, as the next tile's record is read before this tile is stored.
            tile_expert, size = expert, size_of(row, stop)
            if size > 0:
                carry = mma(carry, row, size, down, across)
            # The ring's position, also where nothing was multiplied.
            carry = advance(carry, size)
            for segment in cutlass.range_constexpr(1, len(mmas)):
                number += 1
                row, stop, position, expert = scheduler.read(number)
                more = size_of(row, stop)
                if more > 0:
                    carry = mmas[segment](carry, row, more, down, across, size > 0)
                carry = advance(carry, more)
                size += more
            # The next record is read before the store: its slot is released, and warp 0 can send
            # the one after it while this group stores.
            number += 1
            row, stop, position, expert = scheduler.read(number)
            if size > 0:
                store()(mma.tile, down, across, tile_expert)
            else:
                # The accumulators hold another tile here. Adding nothing is right as it is;
                # elsewhere zeros have to replace what the memory held.
                if cutlass.const_expr(self.config.zeros and not self.config.add):
                    store().zeros(down, across, tile_expert)
        # The shared memory must outlive the TMA that reads it.
        store().finish()


class WgradPairKernel(WgradKernel):
    """`WgradKernel` of two segments."""

    @cute.jit
    def __call__(
        self,
        d: Factor,
        v: Factor,
        index: IntPtr,
        offsets: IntPtr,
        d2: Factor,
        v2: Factor,
        index2: IntPtr,
        offsets2: IntPtr,
        dw: BytesPtr,
        order: IntPtr,
        counter: IntPtr,
        L: Int32,
        ctas: Int32,
        stream: cuda.CUstream,
    ) -> None:
        both = Segment(d, v, index, offsets), Segment(d2, v2, index2, offsets2)
        self.run(both, dw, order, counter, L, ctas, stream)
