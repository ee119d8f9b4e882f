"""Its gradient: dh and the sums of dscale's rows, from acc = dy @ w2[e], the gradient of a."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32

from phalanx.kernels.sm90.gemm.epilogues import Epilogue, Fragment, Load, Out


@dataclass(frozen=True)
class ScaledSquaredReluGrad(Epilogue):
    """Legend: S rows, F channels, L experts, C column tiles. h and dh bf16 [S, F]; scale fp32 [L];
    dscale fp32 [C, S]."""

    loaded = 1
    loads = (Load("scale", "expert"),)
    outputs = (Out("dh"),)
    sums = ("dscale",)

    def compute(self, at: Fragment) -> None:
        at.put_each(self._gradient)

    def _gradient(self, at: Fragment, i: int, d: Float32, h: Float32) -> tuple[Float32, ...]:
        relu = cute.arch.fmax(h, Float32(0), nan=True)
        at.add_sum("dscale", i, d * relu * relu)
        return (d * at.load("scale", i) * (relu + relu),)
