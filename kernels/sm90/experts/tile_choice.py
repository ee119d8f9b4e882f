"""Choice of a grouped GEMM's tile by the format of its operands."""

from phalanx.kernels.quantize.blocks import Quantized
from phalanx.kernels.sm90.fp8 import tiles as fp8_tiles
from phalanx.kernels.sm90.fp8.mainloop import Fp8Mainloop
from phalanx.kernels.sm90.gemm import tiles
from phalanx.kernels.sm90.gemm.mainloop import Mainloop
from phalanx.kernels.sm90.gemm.operands import Matrix, format_of


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
        return fp8_tiles.choose(name, columns, format_of("rows", rows), gather=gather)
    shape: dict[str, int] = dict(columns=columns, depth=depth, num_gate_parts=num_gate_parts)
    return tiles.choose(name, **shape, transposed=transposed, gather=gather)


def require_tile(loop: Mainloop, rows: Matrix) -> None:
    """Check that a tile is one for the format of `rows`.

    Raises:
        ValueError: it is not.
    """
    wanted = format_of("rows", rows)
    has = loop.rows_format if isinstance(loop, Fp8Mainloop) else "bf16"
    if has != wanted:
        raise ValueError(f"loop must be a tile for rows in {wanted}, not {loop}")
