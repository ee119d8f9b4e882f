"""The epilogue of `fc2_dgrad_dact` in FP8: dh and a as rows with a scale for 128 channels.

Legend: S rows, F expert width, H = 2F or F channels of h and dh, L experts.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from phalanx.kernels.sm90.fp8 import row_blocks
from phalanx.kernels.sm90.fp8.promotion import BLOCK
from phalanx.kernels.sm90.fp8.row_blocks import MAGNITUDES, REGION, RowBytes, Values
from phalanx.kernels.sm90.gemm.epilogues import ActGrad, _ActGrad, _Warp
from phalanx.kernels.sm90.gemm.mainloop import Mainloop
from phalanx.kernels.sm90.gemm.operands import Rows
from phalanx.kernels.sm90.gemm.smem_strips import WARPS, Staging, Strips
from phalanx.kernels.sm90.gemm.storage import array, struct
from phalanx.kernels.sm90.jit import ptx

_STEP = 32  # channels that are computed at a time
_REGIONS = 2  # regions for 16 rows in FP8: one is stored by TMA while the other one is written


@dataclass(frozen=True)
class Fp8ActGrad(ActGrad):
    """`ActGrad` that stores dh and a in FP8, a in e4m3."""

    grad_format: str = "e4m3"  # format of dh

    def strips(self, loop: Mainloop) -> Strips:
        """Three for each part of h."""
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
        """Start to load h of the first channels, under the multiplication."""
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
        """Store the tile at `row` and column tile `column` of an expert that ends at `end`."""
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
        """dh and a of 32 channels from accumulators and h. Channels past the last one have weights
        of zero, and do not count for the scale."""
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
        """Shared address of a lane's four words of a's channels 16 q to 16 q + 15.

        They wait in the regions until rows are written there: registers do not hold them beside dh
        and the accumulators.
        """
        return self.activations.base + ptx.lane() * 16 + q * 512

    @cute.jit
    def _send(self, values: list[Any], top: Int32, end: Int32, first: Int32) -> None:
        """Store 128 channels of dh and of a.

        The stores of the last block have drained; a region that is written twice is free when its
        first store has.
        """
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
