"""Epilogues in FP8: of `fc1_act`, with h in bf16 if it is saved, and of `fc2_dgrad_dact`.

Activations and gradients of h are rows in FP8 with a scale for 128 channels.

Legend: S rows, F expert width, H = 2F or F channels of h and dh, L experts.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from phalanx.kernels.sm90.fp8 import row_blocks
from phalanx.kernels.sm90.fp8.mainloop import BLOCK
from phalanx.kernels.sm90.fp8.row_blocks import MAGNITUDES, REGION, RowBytes, Values
from phalanx.kernels.sm90.gemm import activate
from phalanx.kernels.sm90.gemm.epilogues import (
    Act,
    ActGrad,
    _ActGrad,
    _add_bias,
    _pack,
    _unpack,
    _Warp,
)
from phalanx.kernels.sm90.gemm.mainloop import Mainloop
from phalanx.kernels.sm90.gemm.operands import Rows
from phalanx.kernels.sm90.gemm.smem_strips import WARPS, Staging, Strips
from phalanx.kernels.sm90.gemm.tensors import array, struct
from phalanx.kernels.sm90.jit import ptx

_STEP = 32  # channels that are computed at a time


@dataclass(frozen=True)
class Fp8Act(Act):
    """`Act` that stores a in e4m3, over the first of two sets of strips for h, which alternate."""

    def strips(self, loop: Mainloop) -> Strips:
        return Strips(_STEP, 4 if self.keep_h else 2)

    def host(
        self,
        loop: Mainloop,
        mH: cute.Tensor,
        a: Rows,
        bias: cute.Tensor,
        prob: cute.Tensor,
    ) -> Any:
        """h [S, H]; a [S, F, 1]; bias [L, H / 2] in words of two; prob [S]."""
        tma_h = self.strips(loop).to_memory(mH)
        mA, scale = row_blocks.tensors(a, "e4m3")
        return tma_h, mH, row_blocks.to_memory(mA), mA, bias, prob, scale

    def device(self, loop: Mainloop, storage: Any, thread: Int32, args: Any) -> Any:
        return _Fp8Act(self, loop, storage, thread, args)


class _Fp8Act:
    """Device side of `Fp8Act`: 128 channels of a at a time, in steps of 32."""

    def __init__(
        self, config: Fp8Act, loop: Mainloop, storage: Any, thread: Int32, args: Any
    ) -> None:
        self.config, self.loop, self.warp = config, loop, _Warp(loop, thread)
        strips = config.strips(loop)
        self.staging = Staging(strips, storage, thread)
        self.bytes = RowBytes("e4m3", storage.data, strips.count // 2, thread)
        self.tma_h, self.mH, self.tma_a, self.mA, self.bias, self.prob, self.scale = args

    def prefetch(self, row: Int32, end: Int32, column: Int32) -> None:
        """Nothing to prepare."""

    @cute.jit
    def __call__(
        self, acc: cute.Tensor, carry: Int32, row: Int32, end: Int32, column: Int32, expert: Int32
    ) -> Int32:
        wide = self.loop.columns // self.config.num_gate_parts
        top = row + self.warp.first
        probs = []
        if cutlass.const_expr(self.config.prob):
            probs = self.warp.per_row(self.prob, top, end)
        for b in cutlass.range_constexpr(wide // BLOCK):
            f = column * wide + BLOCK * b
            if top < end and f < self.mA.shape[1]:
                self._block(acc, b, top, end, f, expert, probs)
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
        probs: list[Any],
    ) -> None:
        # Rounded activations stay in registers until all 128 channels, and so the scale, are known.
        values, h_strips = Values(), self.config.h_strips
        for j in cutlass.range_constexpr(BLOCK // _STEP):
            f = first + _STEP * j
            if f < self.mA.shape[1]:
                # The other set may still be read by TMA; before the first step it holds a.
                self.staging.drain(0 if j == 0 else h_strips)
                self._step(acc, BLOCK // 16 * b + 2 * j, f, expert, probs, values)
                for half in cutlass.range_constexpr(h_strips):
                    n = f + half * self.mA.shape[1]
                    strip = j % 2 * 2 + half
                    self.staging.store(strip, self.tma_h, self.mH, top, end, n)
        # Channels come in multiples of 64, so h of the last 32 is in the second set, and a can be
        # written to the first one as soon as the stores before those have drained.
        self.staging.drain(h_strips)
        self.bytes.write(0, values, self.scale, (top, end, first // BLOCK))
        self.bytes.store(0, self.tma_a, self.mA, top, end, first, 0)

    def _step(
        self,
        acc: cute.Tensor,
        columns: int,
        f: Int32,
        expert: Int32,
        probs: list[Any],
        values: Values,
    ) -> None:
        """32 channels of h and a; `columns`: in 16 channels, of the tile's first half."""
        config = self.config
        for q in range(2):
            h = []
            for half in range(config.num_gate_parts):
                accs = self.warp.values(acc, 0, half * (self.loop.columns // 32) + columns + q)
                if config.bias:
                    n = half * self.mA.shape[1] + f + 16 * q + self.warp.column
                    _add_bias(accs, self.bias, expert, n, [])
                words = _pack(accs)
                if config.keep_h:
                    self.staging.write(columns // 2 % 2 * 2 + half, q, words)
                # From h as it is rounded, which is what the backward pass has.
                h.append(_unpack(words))
            gate, up = h[0], h[-1]
            a = [activate.forward(config.act, gate[i], up[i]) for i in range(8)]
            if config.prob:
                a = [x * probs[i // 2 % 2] for i, x in enumerate(a)]
            values.put(columns % (BLOCK // 16) + q, _pack(a))

    def finish(self, carry: Int32) -> None:
        self.staging.drain(0)


_REGIONS = 2  # regions for 16 rows in FP8: one is stored by TMA while the other one is written


@dataclass(frozen=True)
class Fp8ActGrad(ActGrad):
    """`ActGrad` that stores dh and a in FP8, a in e4m3."""

    grad_format: str = "e4m3"  # format of dh

    def strips(self, loop: Mainloop) -> Strips:
        return Strips(_STEP, 3 * self.num_gate_parts)

    def bytes(self, loop: Mainloop) -> int:
        return self.strips(loop).bytes + WARPS * _REGIONS * REGION

    def storage(self, loop: Mainloop) -> Any:
        return struct(
            strips=self.strips(loop).storage(),
            regions=array(cutlass.Uint8, WARPS * _REGIONS * REGION, 1024),
            loaded=array(cutlass.Int64, WARPS * 3),
        )

    def host(
        self,
        loop: Mainloop,
        mH: cute.Tensor,
        dh: Rows,
        a: Rows,
        prob: cute.Tensor,
        dprob: cute.Tensor,
    ) -> Any:
        """h [S, H]; dh [S, F, halves]; a [S, F, 1]; prob [S]; dprob [column tiles, S]."""
        tma_h = self.strips(loop).from_memory(mH)
        mD, scale_d = row_blocks.tensors(dh, self.grad_format)
        mA, scale_a = row_blocks.tensors(a, "e4m3")
        tma_d, tma_a = row_blocks.to_memory(mD), row_blocks.to_memory(mA)
        return tma_h, tma_d, mD, tma_a, mA, prob, dprob, scale_d, scale_a

    def device(self, loop: Mainloop, storage: Any, thread: Int32, args: Any) -> Any:
        return _Fp8ActGrad(self, loop, storage, thread, args)


class _Fp8ActGrad(_ActGrad):
    """Device side: 128 channels at a time in steps of 32, with h of the next ones in flight."""

    def __init__(
        self, config: Fp8ActGrad, loop: Mainloop, storage: Any, thread: Int32, args: Any
    ) -> None:
        self.config, self.loop, self.warp = config, loop, _Warp(loop, thread)
        self.staging = Staging(config.strips(loop), storage.strips, thread)
        self.gradients = RowBytes(config.grad_format, storage.regions, _REGIONS, thread)
        self.activations = RowBytes("e4m3", storage.regions, _REGIONS, thread)
        self.tma_h, self.tma_d, self.mD, self.tma_a, self.mA, self.prob, self.dprob = args[:7]
        self.scale_d, self.scale_a = args[7:]
        self.loaded = storage.loaded.data_ptr() + self.warp.number * 3
        self.width = self.steps = loop.columns // _STEP

    @cute.jit
    def prefetch(self, row: Int32, end: Int32, column: Int32) -> None:
        self._release_h()
        self._load(0, row, column)
        self._load(1, row, column)

    def _release_h(self) -> None:
        """Barrier after which strips of h that all lanes have read may be loaded to."""
        # Reads of ldmatrix come before the writes of the next TMA load (async proxy).
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()

    @cute.jit
    def __call__(
        self, acc: cute.Tensor, carry: Int32, row: Int32, end: Int32, column: Int32, expert: Int32
    ) -> Int32:
        probs = []
        sums = cute.make_rmem_tensor(2, cutlass.Float32)
        top = row + self.warp.first
        if cutlass.const_expr(self.config.prob):
            probs = self.warp.per_row(self.prob, top, end)
            sums.fill(0.0)
        for b in cutlass.range_constexpr(self.loop.columns // BLOCK):
            first, steps = column * self.loop.columns + BLOCK * b, BLOCK // _STEP
            if top < end and first < self.mA.shape[1]:
                # No branch inside: values that it left unchanged would hold registers before it.
                values = [Values() for _ in range(self.config.num_gate_parts + 1)]
                for j in cutlass.range_constexpr(steps):
                    carry = self._wait_for_h(steps * b + j, carry, row, column)
                    if cutlass.const_expr(j == 0):  # TMA may still read the regions of `_parked`
                        self.staging.drain(0)
                    inside = first + _STEP * j < self.mA.shape[1]
                    counted = cutlass.select_(inside, Uint32(MAGNITUDES), Uint32(0))
                    self._step(acc, steps * b + j, probs, sums, values, counted)
                self._send(values, top, end, first)
            else:
                # Nothing to store, but h was requested: its barriers complete, and their phases
                # have to be followed.
                for j in cutlass.range_constexpr(steps):
                    carry = self._wait_for_h(steps * b + j, carry, row, column)
        if cutlass.const_expr(self.config.prob):
            self._sum(sums, top, end, column)
        return carry

    def _wait_for_h(self, i: int, carry: Int32, row: Int32, column: Int32) -> Int32:
        """Wait for h of step i, and load that of step i + 2 over that of step i - 1."""
        cute.arch.mbarrier_wait(self.loaded + i % 3, (carry >> i % 3) & 1)
        self._release_h()
        self._load(i + 2, row, column)
        return carry ^ (1 << i % 3)

    def _step(
        self,
        acc: cute.Tensor,
        i: int,
        probs: list[Any],
        sums: cute.Tensor,
        values: list[Values],
        counted: Uint32,
    ) -> None:
        """dh and a of 32 channels; those past the last one have no part in the scale."""
        parts = self.config.num_gate_parts
        for q in range(2):
            d = self.warp.values(acc, 0, 2 * i + q)
            h = [self.staging.read(i % 3 * parts + half, q) for half in range(parts)]
            words, at = self._words(d, h, probs, sums), 2 * (i % (BLOCK // _STEP)) + q
            for half in range(parts):
                values[half].put(at, words[half], counted)
            values[parts].count(words[parts], counted)
            # 16 bytes a lane, side by side: no bank conflicts, and no other lane reads them.
            ptx.store_shared(self._parked(at), *words[parts])

    def _parked(self, q: int) -> Int32:
        """Shared address of a lane's four words of a's channels 16 q to 16 q + 15. They wait in the
        regions until rows are written there: registers do not hold them beside dh and the
        accumulators."""
        return self.activations.base + ptx.lane() * 16 + q * 512

    @cute.jit
    def _send(self, values: list[Any], top: Int32, end: Int32, first: Int32) -> None:
        """Store 128 channels of dh and of a, once the stores of the last block have drained. A
        region that is written twice is free when its first store has."""
        parts, block = self.config.num_gate_parts, first // BLOCK
        for q in range(BLOCK // 16):
            values[parts].set(q, ptx.load_shared(self._parked(q)))
        # All lanes have their words back: rows are now written over them.
        cute.arch.sync_warp()
        for half in cutlass.range_constexpr(parts):
            of_half = half * ((self.mA.shape[1] + (BLOCK - 1)) // BLOCK)
            at = (top, end, of_half + block)
            self.gradients.write(half, values[half], self.scale_d, at)
            self.gradients.store(half, self.tma_d, self.mD, top, end, first, half)
        region = parts % _REGIONS
        # With a gate the regions are taken twice: a may be written where the first half of dh was.
        if cutlass.const_expr(region == 0):
            self.staging.drain(1)
        self.activations.write(region, values[parts], self.scale_a, (top, end, block))
        self.activations.store(region, self.tma_a, self.mA, top, end, first, 0)
