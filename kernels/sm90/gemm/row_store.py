"""How rows leave a tile: `RowStore`, and its implementation in bf16 through strips.

A `RowStore` is the part of an epilogue that knows memory: it walks over the channels of a tile in
steps, has the epilogue's function compute 16 of them at a time, and stores what that put. Here rows
are in bf16 (`smem_strips`); `fp8.row_store` quantises them.

Roles. Each of the 8 multiplying warps works alone, on 16 rows (twice, if it has a tile to itself
with its group): there is no barrier between warps. All lanes compute and write; lane 0 starts TMA.

Pipelines of a warp, a step being 32 or 64 channels:

    stores   sets of strips    TMA stores are bulk groups, in the order of `store`; `drain(n)`
                               waits until all but the last n have left shared memory
    loads    3 strips a part   only of an epilogue that loads rows. full: 1, of the warp, and bytes
                               of TMA; empty: the drained store of what took its place

    step i of a walk without loads:  drain set i % sets | compute, write | fence | start its stores
    step i of a walk with loads:     wait for load i | drain all but the last step's other outputs,
                                     and so strip (i + 2) % 3 | start load i + 2 over it | compute
                                     from strip i % 3, write in its place | fence | start its stores

Legend: S rows, N columns, F channels of the last output.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32

from phalanx.kernels.sm90.gemm.fragment import Fragment, Warp
from phalanx.kernels.sm90.gemm.mainloop import Mainloop
from phalanx.kernels.sm90.gemm.operands import Rows
from phalanx.kernels.sm90.gemm.smem_strips import WARPS, Staging, Strips
from phalanx.kernels.sm90.gemm.tensors import array, matrix, struct

STEP = 32
LOADED = 3  # strips of a part of loaded rows: one is computed from, one in flight, one stored


@dataclass(frozen=True)
class RowStore:
    """Rows of an epilogue's outputs, for a tile of `loop`."""

    epilogue: Any
    loop: Mainloop

    @property
    def strips(self) -> Strips:
        raise NotImplementedError

    @property
    def bytes(self) -> int:
        """Shared memory, without barriers."""
        return self.strips.bytes

    def storage(self) -> Any:
        """Type of the field of shared memory."""
        raise NotImplementedError

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
        raise NotImplementedError


class Walk:
    """Device side of a `RowStore`, for one warp."""

    def __init__(self, store: RowStore, storage: Any, thread: Int32, args: Any) -> None:
        self.epilogue, self.loop = store.epilogue, store.loop
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

    @property
    def order(self) -> list[tuple[str, int]]:
        """Order in which parts of outputs are written that are computed together."""
        return self.stored

    @property
    def width(self) -> Int32:
        """Channels of a part of the last output."""
        out, (_, tensor) = self.outputs[-1]
        return tensor.shape[1] // out.parts if out.parts > 1 else tensor.shape[1]

    def row_values(self, top: Int32, end: Int32) -> dict[str, list[Float32]]:
        """Loads per row, for the lane's two of the warp's 16 rows from `top` on."""
        loads = [load for load in self.epilogue.loads if load.per == "row" and load.used]
        return {load.name: self.warp.per_row(self.tensors[load.name], top, end) for load in loads}

    def expert_values(self, expert: Int32) -> dict[str, Float32]:
        loads = [load for load in self.epilogue.loads if load.per == "expert" and load.used]
        return {load.name: self.tensors[load.name][expert] for load in loads}

    def new_sums(self) -> dict[str, cute.Tensor]:
        """Sums of the lane's two rows."""
        return {name: cute.make_rmem_tensor(2, Float32) for name in self.epilogue.sums}

    def prefetch(self, row: Int32, end: Int32, column: Int32) -> None:
        """Called when the tile is known, ahead of its product."""

    def finish(self, carry: Int32) -> None:
        # Shared memory must not go to another CTA while TMA reads it.
        self.staging.drain(0)


class StripStore(RowStore):
    """Outputs in bf16."""

    @property
    def sets(self) -> int:
        """Sets of strips for all outputs: some are stored while one is written."""
        return self.epilogue.sets(self.loop)

    @property
    def strips(self) -> Strips:
        outs = sum(out.parts for out in self.epilogue.outputs if out.kept)
        loaded = self.epilogue.loaded
        if loaded:
            # The first output takes the place of what was loaded; of the others one set is stored,
            # one written.
            return Strips(self.epilogue.step, LOADED * loaded + 2 * (outs - loaded))
        return Strips(self.epilogue.step, self.sets * outs)

    def storage(self) -> Any:
        if self.epilogue.loaded:
            barriers = array(cutlass.Int64, WARPS * LOADED)
            return struct(strips=self.strips.storage(), loaded=barriers)
        return self.strips.storage()

    def host(self, loaded: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, Any]:
        tensors = [_bf16(x) for x in outputs]
        pairs = [(self.strips.to_memory(tensor), tensor) for tensor in tensors]
        loads = tuple(self.strips.from_memory(tensor) for tensor in loaded)
        return (loads, *pairs), ()

    def device(self, storage: Any, thread: Int32, args: Any) -> Walk:
        walk = LoadedStripWalk if self.epilogue.loaded else StripWalk
        return walk(self, storage, thread, args)


def _bf16(x: Any) -> cute.Tensor:
    """Rows in bf16, given as a tensor or as an argument of a kernel."""
    if isinstance(x, Rows):
        return matrix(cute.recast_ptr(x.data, dtype=BFloat16), x.rows, x.channels)
    return x


class StripWalk(Walk):
    """Accumulators to rows in bf16."""

    def __init__(self, store: StripStore, storage: Any, thread: Int32, args: Any) -> None:
        super().__init__(store, storage, thread, args)
        self.sets = store.sets

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
        of_expert = self.expert_values(expert)
        for m in cutlass.range_constexpr(self.warp.blocks_m):
            top = row + self.warp.first + m * 64
            fragment = Fragment(self, self.row_values(top, end), of_expert, {})
            for j in cutlass.range_constexpr(wide // step):
                f = column * wide + step * j
                # Blocks of 16 rows past the expert's end, and columns past the last, are not
                # stored.
                if top < end and f < self.width:
                    self._store(acc, m, j, top, end, f, expert, fragment)
        self.end(carry)
        return carry

    def _store(
        self,
        acc: cute.Tensor,
        m: int,
        j: int,
        top: Int32,
        end: Int32,
        f: Int32,
        expert: Int32,
        fragment: Fragment,
    ) -> None:
        count = len(self.stored)
        first = j % self.sets * count
        # Before the first block of a row all stores are drained: blocks past the end were skipped,
        # so the number of stores in flight is not known there. Later: the last stores from this set
        # are `sets` steps back.
        self.staging.drain(0 if j == 0 else (self.sets - 1) * count)
        for q in range(self.epilogue.step // 16):

            def values(part: int, q: int = q) -> list[Float32]:
                block = part * (self.loop.columns // 32) + self.epilogue.step // 16 * j + q
                return self.warp.values(acc, m, block)

            def write(name: str, part: int, words: list[Uint32], q: int = q) -> None:
                if (name, part) in self.stored:
                    self.staging.write(first + self.stored.index((name, part)), q, words)

            self.epilogue.compute(fragment.at(values, write, f, q, expert))
        strip = first
        for out, (tma, tensor) in self.outputs:
            for part in range(out.parts if out.kept else 0):
                n = f + part * self.width if part else f
                self.staging.store(strip, tma, tensor, top, end, n)
                strip += 1


class LoadedStripWalk(Walk):
    """Accumulators and loaded rows to rows in bf16. `carry` has a bit for each strip of a loaded
    part: the phase in which its barrier completes next."""

    def __init__(self, store: StripStore, storage: Any, thread: Int32, args: Any) -> None:
        super().__init__(store, storage, thread, args)
        self.loaded = storage.loaded.data_ptr() + self.warp.number * LOADED
        self.wide = self.loop.columns // self.epilogue.step
        self.steps = self.wide * self.warp.blocks_m
        self.others = len(self.stored) - self.epilogue.loaded

    @property
    def order(self) -> list[tuple[str, int]]:
        # What takes the place of loaded rows comes last.
        return self.stored[self.epilogue.loaded :] + self.stored[: self.epilogue.loaded]

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
            parts, barrier = self.epilogue.loaded, self.loaded + i % LOADED
            # All parts of a step complete one barrier.
            self.staging.expect(parts, barrier)
            for part in range(parts):
                n = f + part * self.width
                strip = i % LOADED * parts + part
                self.staging.load(strip, self.loads[0], top, n, barrier)

    @cute.jit
    def __call__(
        self, acc: cute.Tensor, carry: Int32, row: Int32, end: Int32, column: Int32, expert: Int32
    ) -> Int32:
        sums = self.new_sums()
        of_expert, fragment = self.expert_values(expert), None
        for i in cutlass.range_constexpr(self.steps):
            strip = i % LOADED
            top = row + self.warp.first + i // self.wide * 64
            if cutlass.const_expr(i % self.wide == 0):
                fragment = Fragment(self, self.row_values(top, end), of_expert, sums)
                fragment.zero_sums()
            f = column * self.loop.columns + self.epilogue.step * (i % self.wide)
            # Each of the 3 barriers completes steps / 3 phases a tile: if that is even, the phase
            # is the same in every tile and needs no register.
            if cutlass.const_expr(self.steps % (2 * LOADED) == 0):
                cute.arch.mbarrier_wait(self.loaded + strip, i // LOADED % 2)
            else:
                cute.arch.mbarrier_wait(self.loaded + strip, (carry >> strip) & 1)
                carry = carry ^ (1 << strip)
            # All but the last stores (other outputs of step i - 1) have drained: the strips stored
            # in place at step i - 1, which i + 2 loads to, and those of other outputs of step
            # i - 2, which this step writes.
            self.staging.drain(min(i, 1) * self.others)
            self._load(i + 2, row, column)
            if top < end and f < self.width:
                self._store(acc, i, top, end, f, expert, fragment)
            if cutlass.const_expr(i % self.wide == self.wide - 1):
                for name in self.epilogue.sums:
                    self.warp.put_row_sums(sums[name], self.tensors[name], top, end, column)
        return carry

    def _store(
        self,
        acc: cute.Tensor,
        i: int,
        top: Int32,
        end: Int32,
        f: Int32,
        expert: Int32,
        fragment: Fragment,
    ) -> None:
        loaded, m, j = self.epilogue.loaded, i // self.wide, i % self.wide
        in_place, other = i % LOADED * loaded, LOADED * loaded + i % 2 * self.others
        places = [*range(in_place, in_place + loaded), *range(other, other + self.others)]
        strips = dict(zip(self.stored, places, strict=True))
        groups = self.epilogue.step // 16
        for q in range(groups):

            def values(part: int, q: int = q) -> list[Float32]:
                return self.warp.values(acc, m, groups * j + q)

            def read(q: int = q) -> list[Any]:
                return [self.staging.read(in_place + part, q) for part in range(loaded)]

            def write(name: str, part: int, words: list[Uint32], q: int = q) -> None:
                self.staging.write(strips[name, part], q, words)

            self.epilogue.compute(fragment.at(values, write, f, q, expert, read))
        for out, (tma, tensor) in self.outputs:
            for part in range(out.parts):
                n = f + part * self.width if part else f
                self.staging.store(strips[out.name, part], tma, tensor, top, end, n)
