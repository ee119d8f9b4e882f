"""`RowStore` in FP8: outputs as rows with a scale for 128 channels (`row_blocks`).

Roles and barriers are those of `gemm.row_store`: a warp works alone on its 16 rows. A block is 128
channels, computed in 4 steps of 32, and its values stay in registers, rounded to bf16, until all of
them, and so the scale, are known.

Pipelines of a warp:

    without loads   the last output is quantised; another one is stored in bf16, in two sets of
                    strips that alternate. A block of bytes is written over the first set.
                    step j: drain the other set | compute, write | fence | start its stores
                    block:  drain the first set | write bytes | fence | start their store
    with loads      both outputs are quantised, through 2 regions for 16 rows of bytes
                    step j: wait for load i | fence, since ldmatrix has read strip (i + 2) % 3 |
                            start load i + 2 | compute; words of the last output wait in the regions
                    block:  all lanes have their words back | write, fence, start a region's store

Legend: F channels of a part.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from phalanx.kernels.sm90.fp8 import row_blocks
from phalanx.kernels.sm90.fp8.mainloop import BLOCK
from phalanx.kernels.sm90.fp8.row_blocks import MAGNITUDES, REGION, RowBytes, Values
from phalanx.kernels.sm90.gemm.fragment import Fragment
from phalanx.kernels.sm90.gemm.row_store import (
    LOADED,
    STEP,
    LoadedStripWalk,
    RowStore,
    Walk,
)
from phalanx.kernels.sm90.gemm.smem_strips import WARPS, Strips
from phalanx.kernels.sm90.gemm.tensors import array, struct
from phalanx.kernels.sm90.jit import ptx

_REGIONS = 2  # regions for 16 rows in FP8: one is stored by TMA while the other one is written
_STEPS = BLOCK // STEP


class BlockStore(RowStore):
    """Two outputs: the last one in FP8, and the first one in bf16, or in FP8 if rows are loaded."""

    @property
    def strips(self) -> Strips:
        if self.epilogue.loaded:
            return Strips(STEP, LOADED * self.epilogue.loaded)
        first, _ = self.epilogue.outputs
        return Strips(STEP, 4 if first.kept else 2)

    @property
    def bytes(self) -> int:
        regions = WARPS * _REGIONS * REGION if self.epilogue.loaded else 0
        return self.strips.bytes + regions

    def storage(self) -> Any:
        if not self.epilogue.loaded:
            return self.strips.storage()
        return struct(
            strips=self.strips.storage(),
            regions=array(cutlass.Uint8, WARPS * _REGIONS * REGION, 1024),
            loaded=array(cutlass.Int64, WARPS * LOADED),
        )

    def host(self, loaded: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, Any]:
        """Outputs in FP8 are `Rows`, [S, F, parts]."""
        strips, outs = self.strips, self.epilogue.outputs
        quantised = outputs if loaded else outputs[-1:]
        pairs = [(strips.to_memory(x), x) for x in outputs[: len(outputs) - len(quantised)]]
        scales = []
        for out, x in zip(outs[-len(quantised) :], quantised, strict=True):
            tensor, scale = row_blocks.tensors(x, out.fp8)
            pairs.append((row_blocks.to_memory(tensor), tensor))
            scales.append(scale)
        loads = tuple(strips.from_memory(tensor) for tensor in loaded)
        return (loads, *pairs), tuple(scales)

    def device(self, storage: Any, thread: Int32, args: Any) -> Walk:
        walk = LoadedBlockWalk if self.epilogue.loaded else BlockWalk
        return walk(self, storage, thread, args)


class BlockWalk(Walk):
    """128 channels of the last output at a time, in steps of 32, which are stored in bf16 too."""

    def __init__(self, store: BlockStore, storage: Any, thread: Int32, args: Any) -> None:
        super().__init__(store, storage, thread, args)
        out, (self.tma, self.rows) = self.outputs[-1]
        self.last, (self.scale,) = out.name, self.scales
        self.bytes = RowBytes(out.fp8, storage.data, store.strips.count // 2, thread)
        self.in_bf16 = len(self.stored) - 1

    @cute.jit
    def __call__(
        self, acc: cute.Tensor, carry: Int32, row: Int32, end: Int32, column: Int32, expert: Int32
    ) -> Int32:
        wide = self.loop.columns // self.epilogue.num_gate_parts
        top = row + self.warp.first
        of_expert = self.expert_values(expert)
        fragment = Fragment(self, self.row_values(top, end), of_expert, {})
        for b in cutlass.range_constexpr(wide // BLOCK):
            f = column * wide + BLOCK * b
            if top < end and f < self.width:
                self._block(acc, b, top, end, f, expert, fragment)
        return carry

    @cute.jit
    def _block(
        self,
        acc: cute.Tensor,
        b: cutlass.Constexpr,
        top: Int32,
        end: Int32,
        first: Int32,
        expert: Int32,
        fragment: Any,
    ) -> None:
        # Rounded values stay in registers until all 128 channels, and so the scale, are known.
        values = Values()
        for j in cutlass.range_constexpr(_STEPS):
            f = first + STEP * j
            if f < self.width:
                # The other set may still be read by TMA; before the first step it holds bytes.
                self.staging.drain(0 if j == 0 else self.in_bf16)
                self._step(acc, _STEPS * b + j, f, expert, fragment, values)
                for part in cutlass.range_constexpr(self.in_bf16):
                    _, (tma, rows) = self.outputs[0]
                    n = f + part * self.width
                    self.staging.store(j % 2 * 2 + part, tma, rows, top, end, n)
        # Channels come in multiples of 64, so the last 32 in bf16 are in the second set, and bytes
        # can be written to the first one as soon as the stores before those have drained.
        self.staging.drain(self.in_bf16)
        self.bytes.write(0, values, self.scale, (top, end, first // BLOCK))
        self.bytes.store(0, self.tma, self.rows, top, end, first, 0)

    def _step(
        self, acc: cute.Tensor, i: int, f: Int32, expert: Int32, fragment: Fragment, values: Values
    ) -> None:
        """32 channels; `i` counts the steps of the tile."""
        for q in range(STEP // 16):
            block = STEP // 16 * i + q

            def read_acc(part: int, block: int = block) -> list[Float32]:
                return self.warp.values(acc, 0, part * (self.loop.columns // 32) + block)

            def write(
                name: str, part: int, words: list[Uint32], q: int = q, block: int = block
            ) -> None:
                if name == self.last:
                    values.put(block % (BLOCK // 16), words)
                elif (name, part) in self.stored:
                    self.staging.write(i % 2 * 2 + part, q, words)

            self.epilogue.compute(fragment.at(read_acc, write, f, q, expert))


class LoadedBlockWalk(LoadedStripWalk):
    """128 channels at a time in steps of 32, with loaded rows of the next ones in flight."""

    def __init__(self, store: BlockStore, storage: Any, thread: Int32, args: Any) -> None:
        super().__init__(store, storage, thread, args)
        (first, self.first), (last, self.last) = self.outputs
        self.last_name = last.name
        self.first_scale, self.last_scale = self.scales
        self.first_bytes = RowBytes(first.fp8, storage.regions, _REGIONS, thread)
        self.last_bytes = RowBytes(last.fp8, storage.regions, _REGIONS, thread)

    @property
    def order(self) -> list[tuple[str, int]]:
        return self.stored

    @cute.jit
    def prefetch(self, row: Int32, end: Int32, column: Int32) -> None:
        self._release_loaded()
        self._load(0, row, column)
        self._load(1, row, column)

    def _release_loaded(self) -> None:
        """Barrier after which strips that all lanes have read may be loaded to."""
        # Reads of ldmatrix come before the writes of the next TMA load (async proxy).
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()

    @cute.jit
    def __call__(
        self, acc: cute.Tensor, carry: Int32, row: Int32, end: Int32, column: Int32, expert: Int32
    ) -> Int32:
        sums = self.new_sums()
        top = row + self.warp.first
        of_expert = self.expert_values(expert)
        fragment = Fragment(self, self.row_values(top, end), of_expert, sums)
        fragment.zero_sums()
        for b in cutlass.range_constexpr(self.loop.columns // BLOCK):
            first = column * self.loop.columns + BLOCK * b
            if top < end and first < self.width:
                # No branch inside: values that it left unchanged would hold registers before it.
                values = [Values() for _ in self.stored]
                for j in cutlass.range_constexpr(_STEPS):
                    carry = self._wait_for_load(_STEPS * b + j, carry, row, column)
                    if cutlass.const_expr(j == 0):  # TMA may still read the regions of `_parked`
                        self.staging.drain(0)
                    inside = first + STEP * j < self.width
                    counted = cutlass.select_(inside, Uint32(MAGNITUDES), Uint32(0))
                    self._step(acc, _STEPS * b + j, first, expert, fragment, values, counted)
                self._send(values, top, end, first)
            else:
                # Nothing to store, but rows were requested: their barriers complete, and their
                # phases have to be followed.
                for j in cutlass.range_constexpr(_STEPS):
                    carry = self._wait_for_load(_STEPS * b + j, carry, row, column)
        for name in self.epilogue.sums:
            self.warp.put_row_sums(sums[name], self.tensors[name], top, end, column)
        return carry

    def _wait_for_load(self, i: int, carry: Int32, row: Int32, column: Int32) -> Int32:
        """Wait for rows of step i, and load those of step i + 2 over those of step i - 1."""
        cute.arch.mbarrier_wait(self.loaded + i % LOADED, (carry >> i % LOADED) & 1)
        self._release_loaded()
        self._load(i + 2, row, column)
        return carry ^ (1 << i % LOADED)

    def _step(
        self,
        acc: cute.Tensor,
        i: int,
        first: Int32,
        expert: Int32,
        fragment: Fragment,
        values: list[Values],
        counted: Uint32,
    ) -> None:
        """32 channels; those past the last one have no part in the scale."""
        loaded, strip = self.epilogue.loaded, i % LOADED * self.epilogue.loaded
        for q in range(STEP // 16):
            place = STEP // 16 * (i % _STEPS) + q

            def read_acc(part: int, q: int = q) -> list[Float32]:
                return self.warp.values(acc, 0, STEP // 16 * i + q)

            def read(q: int = q) -> list[Any]:
                return [self.staging.read(strip + part, q) for part in range(loaded)]

            def write(name: str, part: int, words: list[Uint32], place: int = place) -> None:
                if name == self.last_name:
                    values[-1].count(words, counted)
                    # 16 bytes a lane, side by side: no bank conflicts, and no other lane reads
                    # them.
                    ptx.store_shared(self._parked(place), *words)
                else:
                    values[part].put(place, words, counted)

            self.epilogue.compute(fragment.at(read_acc, write, first, place, expert, read))

    def _parked(self, q: int) -> Int32:
        """Shared address of a lane's four words of the last output's channels 16 q to 16 q + 15.
        They wait in the regions until rows are written there: registers do not hold them beside the
        other output and the accumulators."""
        return self.last_bytes.base + ptx.lane() * 16 + q * 512

    @cute.jit
    def _send(self, values: list[Any], top: Int32, end: Int32, first: Int32) -> None:
        """Store 128 channels of both outputs, once the stores of the last block have drained. A
        region that is written twice is free when its first store has."""
        parts, block = self.epilogue.loaded, first // BLOCK
        for q in range(BLOCK // 16):
            values[parts].set(q, ptx.load_shared(self._parked(q)))
        # All lanes have their words back: rows are now written over them.
        cute.arch.sync_warp()
        tma, rows = self.first
        for part in cutlass.range_constexpr(parts):
            of_part = part * ((self.width + (BLOCK - 1)) // BLOCK)
            at = (top, end, of_part + block)
            self.first_bytes.write(part, values[part], self.first_scale, at)
            self.first_bytes.store(part, tma, rows, top, end, first, part)
        region = parts % _REGIONS
        # With a gate the regions are taken twice: the last output may be written where the first
        # part of the other one was.
        if cutlass.const_expr(region == 0):
            self.staging.drain(1)
        tma, rows = self.last
        self.last_bytes.write(region, values[parts], self.last_scale, (top, end, block))
        self.last_bytes.store(region, tma, rows, top, end, first, 0)
