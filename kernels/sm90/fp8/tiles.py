"""Choice of a grouped GEMM's tile in FP8."""

from phalanx.kernels.sm90.fp8.mainloop import Fp8Mainloop

_COLUMNS = {
    # 128 of the gate and 128 of the linear half, so that a block of the activations is whole.
    "fc1_act": 256,
    # Two blocks of F. While one of them becomes dh and a, 18 to 42 registers of a thread are in
    # local memory beside the accumulators of the other one. On one H200 that is up to 7 % faster
    # than tiles of 128 columns, which fit, but load a third more for a product.
    "fc2_dgrad_dact": 256,
}
"""Columns of the only tile of a kernel; `grouped_gemm` has two."""
_RELATIVE = {256: 1.0, 192: 1.03}
"""Time of the tiles of `grouped_gemm` for a number of columns that both divide: on one H200, six
shapes of 65,536 and 32,768 rows."""


def choose(name: str, columns: int, rows_format: str, *, gather: bool = False) -> Fp8Mainloop:
    """The fastest tile of a kernel, for so many columns of the output and a format of its rows."""

    def cost(tile: int) -> float:
        return _RELATIVE[tile] * (-(-columns // tile) * tile)

    wide = _COLUMNS.get(name) or min(_RELATIVE, key=cost)
    return Fp8Mainloop(wide, gather=gather, rows_format=rows_format)
