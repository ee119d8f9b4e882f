"""How rows leave a tile: `RowStore`, and its implementation in bf16 through strips.

A `RowStore` walks over the channels of a tile in steps, has the epilogue's function compute 16 of
them at a time, and stores what that put: here in bf16, in `fp8.act` quantised.

A warp owns 16 rows of a tile and a few strips of shared memory that no other warp touches: 16 rows
of 64 or 32 columns, swizzled. stmatrix and ldmatrix move fragments of wgmma in and out of them, TMA
moves them from and to memory. So there is no barrier between warps, and stores drain while a warp
goes on to the next tile. At the ragged end of an expert the lanes store just the
rows that exist, in 16-byte pieces: neither the next expert's rows nor padding is touched.

Roles. Each of the 8 multiplying warps works alone, on 16 rows (twice, if its group has a tile to
itself). All lanes compute and write; one of them starts TMA.

Pipelines of a warp, a step being 32 or 64 channels:

    stores   sets of strips    TMA stores are bulk groups, in the order of `store`; `drain(n)`
                               waits until all but the last n have left shared memory
    loads    3 strips a part   only of an epilogue that loads rows. full: 1, of the warp, and bytes
                               of TMA; empty: the drained store of what took its place

    step i           drain set i % sets | compute, write | fence | start its stores
    with loads       wait for load i | drain strip (i + 2) % 3, start load i + 2 over it | compute
                     from strip i % 3, write in its place | fence | start its stores

Legend: S rows, N columns, F channels of the last output.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint32
from cutlass.cute.nvgpu import cpasync

from phalanx.kernels.sm90.gemm.mainloop import Mainloop
from phalanx.kernels.sm90.gemm.tensors import Rows, array, matrix, struct
from phalanx.kernels.sm90.jit import ptx

ROWS = 16
WARPS = 8
STEP = 32
LOADED_ROWS = "loaded", -1  # key of `Places` with the strips of loaded rows
LOADED = 3  # strips of a part of loaded rows: one is computed from, one in flight, one stored

type Places = dict[tuple[str, int], Any]
"""Strip of each part of the outputs, or a function that takes the fragment and its words."""


@dataclass(frozen=True)
class Strips:
    """`count` strips of shared memory for each multiplying warp."""

    columns: int  # columns of a strip: 64 or 32
    count: int

    @property
    def pitch(self) -> int:
        return 2 * self.columns

    @property
    def bytes(self) -> int:
        return WARPS * self.count * ROWS * self.pitch

    def storage(self) -> Any:
        # 1024: TMA swizzles by bits of the address, `_flip` by the row. They agree where the first
        # row of all strips starts the pattern.
        return struct(data=array(BFloat16, self.bytes // 2, 1024))

    def layout(self, count: int) -> cute.ComposedLayout:
        plain = cute.make_layout(
            (ROWS, self.columns, count), stride=(self.columns, 1, ROWS * self.columns)
        )
        # A row has 8 chunks of 16 bytes, or 4: as many bits are swizzled.
        bits = 3 if self.columns == 64 else 2
        return cute.make_composed_layout(cute.make_swizzle(bits, 4, 3), 0, plain)

    def to_memory(self, tensor: cute.Tensor) -> tuple[Any, Any]:
        return self._tma(cpasync.CopyBulkTensorTileS2GOp(), tensor)

    def from_memory(self, tensor: cute.Tensor) -> tuple[Any, Any]:
        return self._tma(cpasync.CopyBulkTensorTileG2SOp(), tensor)

    def _tma(self, op: Any, tensor: cute.Tensor) -> tuple[Any, Any]:
        one = cute.slice_(self.layout(1), (None, None, 0))
        atom = cpasync.make_tiled_tma_atom(op, tensor, one, (ROWS, self.columns))
        return atom[0], atom[1]


class Staging:
    """Device side: one warp's strips; `thread` counts from the first multiplying thread."""

    def __init__(self, strips: Strips, storage: Any, thread: Int32) -> None:
        self.strips = strips
        layout = strips.layout(WARPS * strips.count)
        self.tensor = storage.data.get_tensor(layout.outer, swizzle=layout.inner)
        self.first = cute.arch.make_warp_uniform(thread // 32) * strips.count
        base = ptx.address(storage.data.data_ptr()) + self.first * (ROWS * strips.pitch)
        # Shared address of the lane's row for stmatrix and ldmatrix.
        self.fragment = base + self._inside(thread % 32)

    def _inside(self, lane: Int32) -> Int32:
        row = lane % ROWS
        return row * self.strips.pitch + (lane // ROWS ^ self._flip(row)) * 16

    def _flip(self, row: Int32) -> Int32:
        """Swizzle: the XOR on the 16-byte chunks of a row, which TMA applies as well. Rows of 128
        bytes start on the same bank, rows of 64 on two in turn: so 8 rows take 8 chunks, or 2 x 4,
        and stmatrix has no bank conflicts."""
        return row % 8 if self.strips.columns == 64 else row // 2 % 4

    def write(self, strip: int, q: int, words: list[Uint32]) -> None:
        """Columns 16 q .. 16 q + 15 from fragments, four words a lane."""
        ptx.stmatrix(self._at(self.fragment, strip, q), *words)

    def read(self, strip: int, q: int) -> tuple[Uint32, ...]:
        return ptx.ldmatrix(self._at(self.fragment, strip, q))

    def _at(self, where: Int32, strip: int, q: int) -> Int32:
        # 16 columns are two chunks: in the address an XOR moves on by them, whatever the swizzle.
        return (where ^ (32 * q)) + strip * (ROWS * self.strips.pitch)

    def drain(self, pending: int) -> None:
        """Wait until all but the last `pending` stores have been read from shared memory."""
        # Bulk groups belong to a thread. Lane 0 alone may have issued TMA, hence the sync after it.
        cute.arch.cp_async_bulk_wait_group(pending, read=True)
        cute.arch.sync_warp()

    @cute.jit
    def store(
        self,
        strip: cutlass.Constexpr,
        tma: tuple[Any, Any],
        rows: cute.Tensor,
        top: Int32,
        end: Int32,
        column: Int32,
    ) -> None:
        """Store what was written to rows top .. end - 1, from `column` on: one store of `drain`."""
        # Writes of stmatrix (generic proxy) become visible to TMA (async proxy); also needed before
        # a strip that lanes have stored is loaded to by TMA.
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        # TMA stores all 16 rows, and would overwrite those of the next expert.
        if end - top >= ROWS:
            smem, gmem = self._partition(strip, tma, top, column)
            cute.copy(tma[0], smem, gmem)
        else:
            self._store_rows(strip, rows, top, end, column)
        # An empty group if the lanes stored: `drain` counts stores without knowing how they were
        # made.
        cute.arch.cp_async_bulk_commit_group()

    def expect(self, strips: int, barrier: cute.Pointer) -> None:
        """The warp's arrival, before its loads: the phase completes when their bytes are there."""
        with cute.arch.elect_one():
            size = strips * ROWS * self.strips.pitch
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)

    def load(
        self,
        strip: int,
        tma: tuple[Any, Any],
        top: Int32,
        column: Int32,
        barrier: cute.Pointer,
    ) -> None:
        """Start to load 16 rows; rows and columns past the tensor's end are 0."""
        # Rows of the next expert are loaded too where this one ends: nothing is computed from them
        # that is stored.
        smem, gmem = self._partition(strip, tma, top, column)
        cute.copy(tma[0], gmem, smem, tma_bar_ptr=barrier)

    def _partition(self, strip: int, tma: Any, top: Int32, column: Int32) -> tuple[Any, Any]:
        box = (ROWS, self.strips.columns)
        return partition(self.tensor, self.first + strip, tma, (top, column), box)

    @cute.jit
    def _store_rows(
        self, strip: cutlass.Constexpr, rows: cute.Tensor, top: Int32, end: Int32, column: Int32
    ) -> None:
        pieces, lane = self.strips.pitch // 16, ptx.lane()
        row, piece = lane // pieces, lane % pieces
        # Recomputed from the lane: live over the multiplication it would cost a register.
        base = self.fragment - self._inside(lane)
        source = base + row * self.strips.pitch + (piece ^ self._flip(row)) * 16
        pitch = 2 * Int64(rows.shape[1])
        target = rows.iterator.toint() + Int64(top + row) * pitch + Int64(2 * (column + piece * 8))
        step = 512 // self.strips.pitch
        for p in cutlass.range_constexpr(ROWS // step):
            # 4 rows further the swizzle of 128-byte rows differs in bit 2 of the chunk (64 bytes).
            flip = 64 * (p % 2) if self.strips.columns == 64 else 0
            if top + row + step * p < end:
                words = ptx.load_shared(
                    (source ^ flip) + (strip * (ROWS * self.strips.pitch) + p * 512)
                )
                ptx.store_global(target + (step * p) * pitch, *words)


class Warp:
    """Position of a warp in a tile; `thread` counts from the first multiplying thread."""

    def __init__(self, loop: Mainloop, thread: Int32) -> None:
        self.loop = loop
        self.blocks_m = loop.group_rows // 64  # blocks of 16 rows of a warp, at a stride of 64 rows
        self.number = cute.arch.make_warp_uniform(thread // 32)
        self.first = self.number % 4 * 16 if loop.pingpong else self.number * 16
        """First row of the warp in the tile."""

    @property
    def column(self) -> Int32:
        return 2 * (ptx.lane() % 4)

    def values(self, acc: cute.Tensor, m: int, q: int) -> list[Float32]:
        """The lane's 8 accumulators in columns 16 q .. 16 q + 15."""
        first = m * (self.loop.columns // 2) + 8 * q
        return [acc[first + i] for i in range(8)]

    @cute.jit
    def per_row(self, values: cute.Tensor, top: Int32, end: Int32) -> list[Float32]:
        """values[row] for the lane's two rows, 8 apart, of the warp's 16 from `top` on."""
        picked = []
        for half in cutlass.range_constexpr(2):
            # Lanes past the expert's end read its last row again: what they compute is not stored.
            row = cutlass.min(top + ptx.lane() // 4 + half * 8, end - 1)
            picked.append(values[row])
        return picked

    @cute.jit
    def put_row_sums(
        self, sums: cute.Tensor, to: cute.Tensor, top: Int32, end: Int32, column: Int32
    ) -> None:
        """Sum of a row over the four lanes that share it; one of them stores it to `to`[column,
        row]."""
        for half in cutlass.range_constexpr(2):
            total = sums[half]
            total = total + cute.arch.shuffle_sync_bfly(total, 1)
            total = total + cute.arch.shuffle_sync_bfly(total, 2)
            lane = ptx.lane()
            row = top + lane // 4 + half * 8
            if lane % 4 == 0 and row < end:
                put(to, column, row, total)


@dataclass(frozen=True)
class RowStore:
    """Rows of an epilogue's outputs, for a tile of `loop`."""

    epilogue: Any
    loop: Any  # a `Mainloop`; None for barriers alone

    walks: ClassVar[tuple[type["Walk"], type["Walk"]]]  # device side, and that with loaded rows
    regions: ClassVar[int] = 0  # further bytes of shared memory, with loaded rows

    @property
    def strips(self) -> Strips:
        raise NotImplementedError

    @property
    def bytes(self) -> int:
        """Shared memory, without barriers."""
        return self.strips.bytes + (self.regions if self.epilogue.loaded else 0)

    def storage(self) -> Any:
        """Type of the field of shared memory."""
        if not self.epilogue.loaded:
            return self.strips.storage()
        more = dict(regions=array(Uint8, self.regions, 1024)) if self.regions else {}
        loaded = array(Int64, WARPS * LOADED)
        return struct(strips=self.strips.storage(), **more, loaded=loaded)

    def init_barriers(self, storage: Any) -> None:
        """One barrier for each strip of loaded rows, of one arrival: the warp's own."""
        if self.epilogue.loaded:
            with cute.arch.elect_one():
                for number in range(WARPS * LOADED):
                    cute.arch.mbarrier_init(storage.loaded.data_ptr() + number, 1)

    def host(self, loaded: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, Any]:
        """TMA of loaded rows; pairs of TMA and tensor of outputs, and tensors of their scales."""
        raise NotImplementedError

    def device(self, storage: Any, thread: Int32, args: Any) -> "Walk":
        return self.walks[self.epilogue.loaded > 0](self, storage, thread, args)


class Walk:
    """Device side of a `RowStore`, for one warp."""

    def __init__(self, store: RowStore, storage: Any, thread: Int32, args: Any) -> None:
        self.store, self.epilogue, self.loop = store, store.epilogue, store.loop
        self.warp = Warp(self.loop, thread)
        strips = storage.strips if self.epilogue.loaded else storage
        self.staging = Staging(store.strips, strips, thread)
        (self.loads, *outputs), vectors, self.scales = args
        outs = self.epilogue.outputs
        self.outputs = list(zip(outs, outputs, strict=True))
        names = [load.name for load in self.epilogue.loads] + [*self.epilogue.sums]
        self.tensors = dict(zip(names, vectors, strict=False))
        self.rest = vectors[len(names) :]
        self.parts = [(out.name, part) for out in outs for part in range(out.parts)]
        self.stored = [(out.name, part) for out in outs if out.kept for part in range(out.parts)]
        self.order = self.stored  # of parts that are computed together

    @property
    def width(self) -> Int32:
        """Channels of a part of the last output."""
        out, (_, tensor) = self.outputs[-1]
        return tensor.shape[1] // out.parts if out.parts > 1 else tensor.shape[1]

    def prefetch(self, row: Int32, end: Int32, column: Int32) -> None:
        """Called when the tile is known, ahead of its product."""

    def finish(self, carry: Int32) -> None:
        # Shared memory must not go to another CTA while TMA reads it.
        self.staging.drain(0)

    def _compute(
        self, acc: cute.Tensor, m: int, j: int, f: Int32, to: Places, fragment: Any
    ) -> None:
        """Step j of the warp's rows, from channel f on."""
        groups = self.epilogue.step // 16
        for q in range(groups):
            self.epilogue.compute(fragment.at(acc, m, groups * j + q, f, q, to))

    def _store(self, to: Places, top: Int32, end: Int32, f: Int32) -> None:
        """Store what is in strips."""
        for out, (tma, tensor) in self.outputs:
            for part in range(out.parts):
                strip = to.get((out.name, part))
                if isinstance(strip, int):
                    n = f + part * self.width if part else f
                    self.staging.store(strip, tma, tensor, top, end, n)


class StripWalk(Walk):
    """Accumulators to rows in bf16."""

    def begin(self, carry: Int32, expert: Int32) -> tuple[Int32, Int32]:
        """Before a tile: the next carry, and the expert."""
        return carry, expert

    def end(self, carry: Int32) -> None:
        """After a tile, whose stores may still run."""

    @cute.jit
    def __call__(
        self, acc: cute.Tensor, carry: Int32, row: Int32, end: Int32, column: Int32, expert: Int32
    ) -> Int32:
        carry, expert = self.begin(carry, expert)
        step, wide = self.epilogue.step, self.loop.columns // self.epilogue.num_gate_parts
        for m in cutlass.range_constexpr(self.warp.blocks_m):
            top = row + self.warp.first + m * 64
            fragment = self.epilogue.fragment(self, top, end, expert)
            for j in cutlass.range_constexpr(wide // step):
                f = column * wide + step * j
                # Blocks of 16 rows past the expert's end, and columns past the last, are not
                # stored.
                if top < end and f < self.width:
                    self._step(acc, m, j, top, end, f, fragment)
        self.end(carry)
        return carry

    def _step(
        self, acc: cute.Tensor, m: int, j: int, top: Int32, end: Int32, f: Int32, fragment: Any
    ) -> None:
        count, sets = len(self.stored), self.epilogue.sets(self.loop)
        to: Places = {part: j % sets * count + k for k, part in enumerate(self.stored)}
        # Before the first block of a row all stores are drained: blocks past the end were skipped,
        # so the number of stores in flight is not known there. Later: the last stores from this set
        # are `sets` steps back.
        self.staging.drain(0 if j == 0 else (sets - 1) * count)
        self._compute(acc, m, j, f, to, fragment)
        self._store(to, top, end, f)


class LoadedStripWalk(Walk):
    """Accumulators and loaded rows to rows in bf16. `carry` has a bit for each strip of a loaded
    part: the phase in which its barrier completes next."""

    def __init__(self, store: RowStore, storage: Any, thread: Int32, args: Any) -> None:
        super().__init__(store, storage, thread, args)
        self.loaded = storage.loaded.data_ptr() + self.warp.number * LOADED
        self.wide = self.loop.columns // self.epilogue.step
        self.steps = self.wide * self.warp.blocks_m
        # What takes the place of loaded rows is written last.
        parts = self.epilogue.loaded
        self.order = self.stored[parts:] + self.stored[:parts]

    @cute.jit
    def prefetch(self, row: Int32, end: Int32, column: Int32) -> None:
        # The last tile's stores may still read the strips that are loaded to.
        self.staging.drain(0)
        self._load(0, row, column)
        self._load(1, row, column)

    def _load(self, i: int, row: Int32, column: Int32) -> None:
        """Load rows for step i into their strips, whose last stores have drained."""
        if i < self.steps:
            top = row + self.warp.first + i // self.wide * 64
            f = column * self.loop.columns + self.epilogue.step * (i % self.wide)
            strips, barrier = self._strips(i), self.loaded + i % LOADED
            # All parts of a step complete one barrier.
            self.staging.expect(len(strips), barrier)
            for part, strip in enumerate(strips):
                self.staging.load(strip, self.loads[0], top, f + part * self.width, barrier)

    def _strips(self, i: int) -> range:
        """Strips of rows that are loaded for step i."""
        first = i % LOADED * self.epilogue.loaded
        return range(first, first + self.epilogue.loaded)

    def _new_sums(self) -> dict[str, cute.Tensor]:
        return {name: cute.make_rmem_tensor(2, Float32) for name in self.epilogue.sums}

    @cute.jit
    def __call__(
        self, acc: cute.Tensor, carry: Int32, row: Int32, end: Int32, column: Int32, expert: Int32
    ) -> Int32:
        sums, others = self._new_sums(), len(self.stored) - self.epilogue.loaded
        fragment: Any = None
        for i in cutlass.range_constexpr(self.steps):
            strip = i % LOADED
            top = row + self.warp.first + i // self.wide * 64
            if cutlass.const_expr(i % self.wide == 0):
                fragment = self.epilogue.fragment(self, top, end, expert, sums)
            f = column * self.loop.columns + self.epilogue.step * (i % self.wide)
            # Rows of step i have arrived. Each of the 3 barriers completes steps / 3 phases a tile:
            # if that is even, the phase is the same in every tile and needs no register.
            if cutlass.const_expr(self.steps % (2 * LOADED) == 0):
                cute.arch.mbarrier_wait(self.loaded + strip, i // LOADED % 2)
            else:
                cute.arch.mbarrier_wait(self.loaded + strip, (carry >> strip) & 1)
                carry = carry ^ (1 << strip)
            # All but the last stores (other outputs of step i - 1) have drained: the strips stored
            # in place at step i - 1, which i + 2 loads to, and those of other outputs of step
            # i - 2, which this step writes.
            self.staging.drain(min(i, 1) * others)
            self._load(i + 2, row, column)
            if top < end and f < self.width:
                self._step(acc, i, top, end, f, fragment)
            if cutlass.const_expr(i % self.wide == self.wide - 1):
                for name in self.epilogue.sums:
                    self.warp.put_row_sums(sums[name], self.tensors[name], top, end, column)
        return carry

    def _step(
        self, acc: cute.Tensor, i: int, top: Int32, end: Int32, f: Int32, fragment: Any
    ) -> None:
        loaded, others = self._strips(i), len(self.stored) - self.epilogue.loaded
        other = LOADED * len(loaded) + i % 2 * others
        to: Places = dict(zip(self.stored, [*loaded, *range(other, other + others)], strict=True))
        self._compute(acc, i // self.wide, i % self.wide, f, {**to, LOADED_ROWS: loaded}, fragment)
        self._store(to, top, end, f)


class StripStore(RowStore):
    """Outputs in bf16."""

    walks = StripWalk, LoadedStripWalk

    @property
    def strips(self) -> Strips:
        epilogue, loaded = self.epilogue, self.epilogue.loaded
        outs = sum(out.parts for out in epilogue.outputs if out.kept)
        if loaded:
            # The first output takes the place of what was loaded; of the others one set is stored,
            # one written.
            return Strips(epilogue.step, LOADED * loaded + 2 * (outs - loaded))
        return Strips(epilogue.step, epilogue.sets(self.loop) * outs)

    def host(self, loaded: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, Any]:
        pairs = [(self.strips.to_memory(tensor), tensor) for tensor in map(bf16_rows, outputs)]
        loads = tuple(self.strips.from_memory(tensor) for tensor in loaded)
        return (loads, *pairs), ()


def partition(
    smem: cute.Tensor, number: Int32, tma: Any, at: tuple[Int32, ...], box: tuple[int, int]
) -> tuple[Any, Any]:
    """Box `number` of shared memory and that at `at` of a tensor of TMA, as `cute.copy` takes them:
    coordinates, since an expert's rows begin anywhere, not at multiples of a box."""
    shifted = cute.domain_offset(at, tma[1])
    tile = cute.local_tile(shifted, box, (0,) * len(at))
    one = cute.make_layout(1)
    shared, memory = cpasync.tma_partition(
        *(tma[0], 0, one, cute.group_modes(smem, 0, 2), cute.group_modes(tile, 0, 2))
    )
    return shared[(None, number)], memory


def bf16_rows(x: Any) -> cute.Tensor:
    """Host side: rows in bf16, given as a tensor or as an argument of a kernel."""
    if isinstance(x, Rows):
        return matrix(cute.recast_ptr(x.data, dtype=BFloat16), x.rows, x.channels)
    return x


def put(tensor: cute.Tensor, i: Int32, j: Int32, value: Float32) -> None:
    """tensor[i, j] = value, under a condition."""
    tensor[i, j] = value
