"""The epilogue of `fc1_act` in FP8: h in bf16, if it is saved, and the activations in FP8.

Legend: S rows, F expert width, H = 2F or F channels of h, L experts.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from phalanx.kernels.sm90.fp8 import row_blocks
from phalanx.kernels.sm90.fp8.promotion import BLOCK
from phalanx.kernels.sm90.fp8.row_blocks import RowBytes, Values
from phalanx.kernels.sm90.gemm import activate
from phalanx.kernels.sm90.gemm.epilogues import Act, _add_bias, _pack, _unpack, _Warp
from phalanx.kernels.sm90.gemm.mainloop import Mainloop
from phalanx.kernels.sm90.gemm.operands import Rows
from phalanx.kernels.sm90.gemm.smem_strips import Staging, Strips

_STEP = 32  # channels that are computed at a time


@dataclass(frozen=True)
class Fp8Act(Act):
    """`Act` that stores a in e4m3, with a scale for 128 channels of a row.

    Two sets of strips for h alternate; a is written over the first one.
    """

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
        """Store the tile at `row` and column tile `column` of an expert that ends at `end`."""
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
        """128 channels from `first` on, without those past the last one."""
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
