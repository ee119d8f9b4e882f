"""Epilogues in FP8, of `fc1_act` and of `fc2_dgrad_dact`, and their `RowStore`.

They compute as those in bf16 do, and store rows with a scale for 128 channels (`row_blocks`). Roles
and barriers are those of `gemm.row_store`: a warp works alone on its 16 rows. A block is 128
channels, in 4 steps of 32, whose values stay in registers until all, and so the scale, are known.

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

from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from phalanx.kernels.sm90.fp8 import row_blocks
from phalanx.kernels.sm90.fp8.mainloop import BLOCK
from phalanx.kernels.sm90.fp8.row_blocks import MAGNITUDES, REGION, RowBytes, Values
from phalanx.kernels.sm90.gemm.epilogues import Act, ActGrad, Out
from phalanx.kernels.sm90.gemm.row_store import (
    LOADED,
    LOADED_ROWS,
    STEP,
    WARPS,
    LoadedStripWalk,
    Places,
    RowStore,
    Strips,
    Walk,
    bf16_rows,
)
from phalanx.kernels.sm90.jit import ptx

_REGIONS = 2  # regions for 16 rows in FP8: one is stored by TMA while the other one is written
_STEPS = BLOCK // STEP


class BlockWalk(Walk):
    """128 channels of the last output at a time, in steps of 32, which are stored in bf16 too."""

    def __init__(self, store: RowStore, storage: Any, thread: Int32, args: Any) -> None:
        super().__init__(store, storage, thread, args)
        out, (self.tma, self.rows) = self.outputs[-1]
        (self.scale,) = self.scales
        # 16 rows of bytes take two strips of 32 channels in bf16: region 0 lies over the first set
        # of strips, and `_block` drains the one before it writes the other.
        self.bytes = RowBytes(out.fp8, storage.data, store.strips.count // 2, thread)

    @cute.jit
    def __call__(
        self, acc: cute.Tensor, carry: Int32, row: Int32, end: Int32, column: Int32, expert: Int32
    ) -> Int32:
        wide = self.loop.columns // self.epilogue.num_gate_parts
        top = row + self.warp.first
        fragment = self.epilogue.fragment(self, top, end, expert)
        for b in cutlass.range_constexpr(wide // BLOCK):
            f = column * wide + BLOCK * b
            if top < end and f < self.width:
                self._block(acc, b, top, end, f, fragment)
        return carry

    @cute.jit
    def _block(
        self,
        acc: cute.Tensor,
        b: cutlass.Constexpr,
        top: Int32,
        end: Int32,
        first: Int32,
        fragment: Any,
    ) -> None:
        # Rounded values stay in registers until all 128 channels, and so the scale, are known.
        values, in_bf16 = Values(), len(self.stored) - 1
        for j in cutlass.range_constexpr(_STEPS):
            f = first + STEP * j
            if f < self.width:
                # The other set may still be read by TMA; before the first step it holds bytes.
                self.staging.drain(0 if j == 0 else in_bf16)
                self._compute(acc, 0, _STEPS * b + j, f, self._to(j, values), fragment)
                self._store(self._to(j, values), top, end, f)
        # Channels come in multiples of 64, so the last 32 in bf16 are in the second set, and bytes
        # can be written to the first one as soon as the stores before those have drained.
        self.staging.drain(in_bf16)
        self.bytes.write(0, values, self.scale, (top, end, first // BLOCK))
        self.bytes.store(0, self.tma, self.rows, top, end, first, 0)

    def _to(self, j: int, values: Values) -> Places:
        # h goes to the sets of two strips in turn; words of the last output stay in registers.
        to: Places = {part: j % 2 * 2 + k for k, part in enumerate(self.stored)}
        to[self.stored[-1]] = lambda at, words: values.put(at.block % (BLOCK // 16), words)
        return to


class LoadedBlockWalk(LoadedStripWalk):
    """128 channels at a time in steps of 32, with loaded rows of the next ones in flight."""

    def __init__(self, store: RowStore, storage: Any, thread: Int32, args: Any) -> None:
        super().__init__(store, storage, thread, args)
        self.order = self.stored  # nothing is written over strips that are still read
        self.bytes = [
            RowBytes(out.fp8, storage.regions, _REGIONS, thread) for out, _ in self.outputs
        ]

    @cute.jit
    def prefetch(self, row: Int32, end: Int32, column: Int32) -> None:
        self._release_loaded()
        # Nothing is stored from these strips, so that no store has to drain; what has to come first
        # are the last tile's reads.
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
        sums = self._new_sums()
        top = row + self.warp.first
        fragment = self.epilogue.fragment(self, top, end, expert, sums)
        for b in cutlass.range_constexpr(self.loop.columns // BLOCK):
            first = column * self.loop.columns + BLOCK * b
            if top < end and first < self.width:
                # No branch inside: values that it left unchanged would hold registers before it.
                values = [Values() for _ in self.stored]
                for j in cutlass.range_constexpr(_STEPS):
                    carry = self._wait_for_load(_STEPS * b + j, carry, row, column)
                    if cutlass.const_expr(j == 0):  # TMA may still read the regions of `_parked`
                        self.staging.drain(0)
                    f = first + STEP * j
                    # Past the last channel of a part the strips hold other channels: they are
                    # computed, but have no part in a scale, and TMA clips them.
                    counted = cutlass.select_(f < self.width, Uint32(MAGNITUDES), Uint32(0))
                    to = self._to(_STEPS * b + j, values, counted)
                    self._compute(acc, 0, _STEPS * b + j, f, to, fragment)
                # All words are known, and so are the scales of the block's rows.
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
        # Phases are in `carry`, a bit a strip: steps of a tile are no multiple of two rounds over
        # the strips, so that a phase does not follow from the step alone.
        cute.arch.mbarrier_wait(self.loaded + i % LOADED, (carry >> i % LOADED) & 1)
        self._release_loaded()
        self._load(i + 2, row, column)
        return carry ^ (1 << i % LOADED)

    def _to(self, i: int, values: list[Values], counted: Uint32) -> Places:
        """Places of 32 channels; those past the last one have no part in the scale."""

        def keep(k: int) -> Any:
            return lambda at, words: values[k].put(at.block % (BLOCK // 16), words, counted)

        def park(at: Any, words: list[Uint32]) -> None:
            # The largest magnitude now, while the words are in registers.
            values[-1].count(words, counted)
            # 16 bytes a lane, side by side: no bank conflicts, and no other lane reads them.
            ptx.store_shared(self._parked(at.block % (BLOCK // 16)), *words)

        to: Places = {part: keep(k) for k, part in enumerate(self.stored)}
        return {**to, self.stored[-1]: park, LOADED_ROWS: self._strips(i)}

    def _parked(self, q: int) -> Int32:
        """Shared address of a lane's four words of the last output's channels 16 q to 16 q + 15.
        They wait in the regions until rows are written there: registers do not hold them beside the
        other output and the accumulators."""
        return self.bytes[-1].base + ptx.lane() * 16 + q * 512

    @cute.jit
    def _send(self, values: list[Any], top: Int32, end: Int32, first: Int32) -> None:
        """Store 128 channels of both outputs, once the stores of the last block have drained. A
        region that is written twice is free when its first store has."""
        parts, block = self.epilogue.loaded, first // BLOCK
        for q in range(BLOCK // 16):
            # Both regions hold parked words: all are taken back before the first row of bytes is
            # written.
            values[parts].set(q, ptx.load_shared(self._parked(q)))
        # All lanes have their words back: rows are now written over them.
        cute.arch.sync_warp()
        (_, (tma, rows)), (_, (last_tma, last_rows)) = self.outputs
        for part in cutlass.range_constexpr(parts):
            # Scales of the linear half follow those of the gate, of as many blocks.
            of_part = part * ((self.width + (BLOCK - 1)) // BLOCK)
            at = (top, end, of_part + block)
            self.bytes[0].write(part, values[part], self.scales[0], at)
            self.bytes[0].store(part, tma, rows, top, end, first, part)
        region = parts % _REGIONS
        # With a gate the regions are taken twice: the last output may be written where the first
        # part of the other one was.
        if cutlass.const_expr(region == 0):
            self.staging.drain(1)
        # Without a gate region 1 was drained before the block, and holds nothing but words that are
        # back.
        self.bytes[1].write(region, values[parts], self.scales[1], (top, end, block))
        self.bytes[1].store(region, last_tma, last_rows, top, end, first, 0)


@dataclass(frozen=True)
class BlockStore(RowStore):
    """Two outputs: the last one in FP8, and the first one in bf16, or in FP8 if rows are loaded."""

    walks = BlockWalk, LoadedBlockWalk
    regions = WARPS * _REGIONS * REGION

    def __post_init__(self) -> None:
        # Channels behind the last whole block of a tile would not be stored.
        loop = self.loop
        if loop is not None and loop.columns // self.epilogue.product_parts % BLOCK:
            raise ValueError(f"a tile of {loop.columns} columns has no whole blocks of {BLOCK}")

    @property
    def strips(self) -> Strips:
        if self.epilogue.loaded:
            # Of loaded rows alone: both outputs leave through the regions.
            return Strips(STEP, LOADED * self.epilogue.loaded)
        first, _ = self.epilogue.outputs
        # Two sets of h's two parts; without h the space of one region of bytes.
        return Strips(STEP, 4 if first.kept else 2)

    def host(self, loaded: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, Any]:
        """Outputs in FP8 are `Rows`, [S, F, parts]."""
        strips, pairs, scales = self.strips, [], []
        for out, x in zip(self.epilogue.outputs, outputs, strict=True):
            if loaded or x is outputs[-1]:
                tensor, scale = row_blocks.tensors(x, out.fp8)
                pairs.append((row_blocks.to_memory(tensor), tensor))
                scales.append(scale)
            else:
                tensor = bf16_rows(x)
                pairs.append((strips.to_memory(tensor), tensor))
        return (tuple(map(strips.from_memory, loaded)), *pairs), tuple(scales)


@dataclass(frozen=True)
class Fp8Act(Act):
    """`Act` that stores a in e4m3."""

    row_store: ClassVar[type[RowStore]] = BlockStore


@dataclass(frozen=True)
class Fp8ActGrad(ActGrad):
    """`ActGrad` that stores dh and a in FP8, a in e4m3."""

    grad_format: str = "e4m3"  # format of dh

    row_store: ClassVar[type[RowStore]] = BlockStore

    @property
    def outputs(self) -> tuple[Out, ...]:
        return Out("dh", self.loaded, fp8=self.grad_format), Out("a")
