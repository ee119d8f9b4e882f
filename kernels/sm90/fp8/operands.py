"""Checks of operands in FP8, and the tile for them."""

import torch
from torch import Tensor

from phalanx.kernels.quantize.blocks import Quantized, block_count
from phalanx.kernels.sm90.fp8.mainloop import Fp8Mainloop
from phalanx.kernels.sm90.gemm.mainloop import Mainloop
from phalanx.kernels.sm90.jit.arguments import require

_ROWS_FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
_RELATIVE = {256: 1.0, 192: 1.03}
"""Time of the tiles of `rows` for a number of columns that both divide: on one H200, six shapes of
65,536 and 32,768 rows."""


def rows_format(name: str, data: Tensor) -> str:
    """Format of rows in FP8, as the kernels name it.

    Raises:
        ValueError: another dtype.
    """
    if data.dtype not in _ROWS_FORMATS:
        raise ValueError(f"{name} must be torch.float8_e4m3fn or e5m2, not {data.dtype}")
    return _ROWS_FORMATS[data.dtype]


def require_rows(device: torch.device, name: str, q: Quantized, parts: int = 1) -> None:
    """Check rows [R, C] in FP8, contiguous, and their scales [R, blocks], of any strides.

    Raises:
        ValueError: shape, dtype, strides or device; C is no multiple of 64 in each of the parts.
    """
    rows_format(name, q.data)
    if q.data.ndim != 2 or not q.data.shape[1] or q.data.shape[1] % (64 * parts):
        shape = list(q.data.shape)
        raise ValueError(f"{name} is {shape}: each of {parts} part(s) must be a multiple of 64")
    require(device, **{name: (q.data, q.data.dtype, None)})
    blocks = block_count(q.data.shape[1], parts)
    require_scales(device, f"{name}'s scale", q.scale, (q.data.shape[0], blocks))


def row_pitch(device: torch.device, name: str, q: Quantized) -> int:
    """Check rows as `require_rows` does, but allow a pitch (packed rows have one); returns it.

    Raises:
        ValueError: shape, dtype, strides or device.
    """
    if q.data.is_contiguous():
        require_rows(device, name, q)
        return q.data.shape[1]
    pitch = q.data.stride(0)
    if q.data.stride(1) != 1 or pitch % 16:
        raise ValueError(
            f"{name}: rows must be contiguous and begin at multiples of 16 bytes, not have strides "
            f"{list(q.data.stride())}"
        )
    require_rows(device, name, Quantized(q.data[:1], q.scale[:1]))
    require_scales(device, f"{name}'s scale", q.scale, (len(q.data), q.scale.shape[1]))
    return pitch


def require_weights(
    device: torch.device, name: str, q: Quantized, n_parts: int = 1, k_parts: int = 1
) -> tuple[int, int, int]:
    """Check e4m3 weights [L, N, K], contiguous, and their scales [L, N blocks, K blocks], of any
    strides; blocks restart in each of `n_parts` of N and `k_parts` of K. Returns L, N, K.

    Raises:
        ValueError: shape, dtype, strides or device; a part is no multiple of 64.
    """
    shape = list(q.data.shape)
    if q.data.ndim != 3 or not all(shape):
        raise ValueError(f"{name} must be [L, N, K], not empty, but is {shape}")
    L, N, K = shape
    if N % (64 * n_parts) or K % (64 * k_parts):
        raise ValueError(
            f"{name} is {shape}: {n_parts} part(s) of N and {k_parts} of K must be multiples of 64"
        )
    require(device, **{name: (q.data, torch.float8_e4m3fn, None)})
    wanted = (L, block_count(N, n_parts), block_count(K, k_parts))
    require_scales(device, f"{name}'s scale", q.scale, wanted)
    return L, N, K


def require_scales(device: torch.device, name: str, scale: Tensor, shape: tuple[int, ...]) -> None:
    """Check scales, of which only the strides are free.

    Raises:
        ValueError: shape, dtype or device.
    """
    if scale.dtype != torch.float32 or scale.shape != shape or scale.device != device:
        raise ValueError(
            f"{name} must be torch.float32 {list(shape)} on {device}, not {scale.dtype} "
            f"{list(scale.shape)} on {scale.device}"
        )


def require_tile(loop: Mainloop, a: Tensor) -> None:
    """Check that a tile is one for rows `a`.

    Raises:
        ValueError: it is not.
    """
    wanted = rows_format("rows", a)
    if not isinstance(loop, Fp8Mainloop) or loop.rows_format != wanted:
        raise ValueError(f"loop must be an Fp8Mainloop for rows in {wanted}, not {loop}")


def scale_sizes(name: str, rows: Tensor, weights: Tensor) -> dict[str, int]:
    """Integer arguments of kernels for scales of rows called `name` and of weights.

    Args:
        rows: [rows, K blocks]. weights: [L, N blocks, K blocks].
    """
    row, block = rows.stride()
    expert, n, k = weights.stride()
    return {
        **{f"{name}_row_stride": row, f"{name}_block_stride": block},
        **dict(w_blocks=weights.shape[1], w_expert_stride=expert, w_n_stride=n, w_k_stride=k),
        "zero": 0,  # hidden from the compiler, see `promotion.Fp8MmaConsumer`
    }


def rows_tile(columns: int) -> int:
    """Columns of the fastest tile of `rows`, for so many columns of the output."""

    def cost(tile: int) -> float:
        return _RELATIVE[tile] * (-(-columns // tile) * tile)

    return min(_RELATIVE, key=cost)


def choose(columns: int, a: Tensor, *, gather: bool = False) -> Fp8Mainloop:
    """A tile of so many columns for rows `a`."""
    return Fp8Mainloop(columns, gather=gather, rows_format=rows_format("rows", a))
