"""A new fusion: a = scale[e] * relu(h)^2 with h = x @ w[e]^T, which is kept, rounded."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32

from phalanx.kernels.sm90.gemm.epilogues import Epilogue, Fragment, Load, Out


@dataclass(frozen=True)
class ScaledSquaredRelu(Epilogue):
    """Legend: S rows, F channels, L experts. scale fp32 [L]; h and a bf16 [S, F]."""

    loads = (Load("scale", "expert"),)
    outputs = (Out("h"), Out("a"))

    def compute(self, at: Fragment) -> None:
        h = at.put("h", at.acc())
        relu = [cute.arch.fmax(x, Float32(0), nan=True) for x in h]
        at.put("a", [at.load("scale", i) * x * x for i, x in enumerate(relu)])
