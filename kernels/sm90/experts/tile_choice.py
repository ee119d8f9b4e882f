"""Choice of a grouped GEMM's tile by the format of its operands."""

from phalanx.kernels.quantize.blocks import Quantized
from phalanx.kernels.sm90.fp8.mainloop import Fp8Mainloop
from phalanx.kernels.sm90.gemm import tiles
from phalanx.kernels.sm90.gemm.mainloop import Mainloop
from phalanx.kernels.sm90.gemm.operands import Matrix, format_of

_COLUMNS = {
    # 128 of the gate and 128 of the linear half, so that a block of the activations is whole.
    "fc1_act": 256,
    # Two blocks of F. While one of them becomes dh and a, 18 to 42 registers of a thread are in
    # local memory beside the accumulators of the other one. On one H200 that is up to 7 % faster
    # than tiles of 128 columns, which fit, but load a third more for a product.
    "fc2_dgrad_dact": 256,
}  # columns of the only tile of a kernel; `grouped_gemm` has two
_RELATIVE = {256: 1.0, 192: 1.03}
"""Time of the tiles of `grouped_gemm` for a number of columns that both divide: on one H200, six
shapes of 65,536 and 32,768 rows."""


def _fp8_tile(name: str, columns: int, rows_format: str, gather: bool) -> Fp8Mainloop:
    def cost(tile: int) -> float:
        return _RELATIVE[tile] * (-(-columns // tile) * tile)

    wide = _COLUMNS.get(name) or min(_RELATIVE, key=cost)
    return Fp8Mainloop(wide, gather=gather, rows_format=rows_format)


def choose(
    name: str,
    rows: Matrix,
    columns: int,
    depth: int,
    *,
    transposed: bool = False,
    gather: bool = False,
    num_gate_parts: int = 1,
) -> Mainloop:
    """The fastest tile, an `Fp8Mainloop` for rows in FP8; arguments as in `gemm.tiles.choose`."""
    if isinstance(rows, Quantized):
        return _fp8_tile(name, columns, format_of("rows", rows), gather)
    shape: dict[str, int] = dict(columns=columns, depth=depth, num_gate_parts=num_gate_parts)
    return tiles.choose(name, **shape, transposed=transposed, gather=gather)


def require_tile(loop: Mainloop, rows: Matrix) -> None:
    """Raise ValueError if a tile is not one for the format of `rows`."""
    wanted = format_of("rows", rows)
    has = loop.rows_format if isinstance(loop, Fp8Mainloop) else "bf16"
    if has != wanted:
        raise ValueError(f"loop must be a tile for rows in {wanted}, not {loop}")
