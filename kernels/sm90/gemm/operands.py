"""Operands of the grouped GEMMs: checked where they enter, and an argument of a kernel each.

An operand is a tensor in bf16, or a `Quantized` in FP8. `rows` and `weights` check one and return
the record by which kernels take it, whatever its format; for shape, dtype, strides, alignment or
device they raise a ValueError. A main loop makes tensors of the records (`Mainloop.operands`).

Legend: R rows, C channels, L experts, N and K channels out and in of weights.
"""

import torch
from torch import Tensor

from phalanx.kernels.quantize.blocks import Quantized, block_count
from phalanx.kernels.sm90.gemm.tensors import Rows, Weights
from phalanx.kernels.sm90.jit.launch import check

type Matrix = Tensor | Quantized
"""bf16, or FP8 with a scale for 128 channels of a row or 128 x 128 of weights."""
E4M3 = torch.float8_e4m3fn
FORMATS = {torch.bfloat16: "bf16", E4M3: "e4m3", torch.float8_e5m2: "e5m2"}


def data_of(x: Matrix) -> Tensor:
    """The elements of an operand, in FP8 without their scales."""
    return x.data if isinstance(x, Quantized) else x


def format_of(name: str, x: Matrix) -> str:
    """Format of rows, `bf16`, `e4m3` or `e5m2`, or a ValueError."""
    dtype, quantized = data_of(x).dtype, isinstance(x, Quantized)
    if dtype not in FORMATS or (dtype == torch.bfloat16) == quantized:
        wanted = "float8_e4m3fn or e5m2" if quantized else "bfloat16"
        raise ValueError(f"{name} must be torch.{wanted}, not {dtype}")
    return FORMATS[dtype]


def rows(name: str, x: Matrix, shape: tuple[int, int], parts: int = 1) -> Rows:
    """Check rows of `shape` (R, C), with C in `parts` in FP8, and return them as an argument.

    x is bf16, contiguous; or FP8, where rows begin at multiples of 16 bytes.
    """
    device = data_of(x).device
    if not isinstance(x, Quantized):
        check(device, name, x, torch.bfloat16, shape)
    elif x.data.is_contiguous():
        check(device, name, x.data, x.data.dtype, shape)
    else:
        if x.data.stride(-1) != 1 or x.data.stride(0) % 16 or tuple(x.data.shape) != shape:
            raise ValueError(
                f"{name}: rows must be {list(shape)}, contiguous and begin at multiples of 16 "
                f"bytes, not {list(x.data.shape)} of strides {list(x.data.stride())}"
            )
        check(device, name, x.data[:1], x.data.dtype, None)
    if isinstance(x, Quantized):
        require_scales(device, f"{name}'s scale", x.scale, (shape[0], block_count(shape[1], parts)))
    return as_rows(x, parts)


def as_rows(x: Matrix, parts: int = 1) -> Rows:
    """Rows that need no check as an argument."""
    data = data_of(x)
    R, C = data.shape
    pitch = C if data.is_contiguous() else data.stride(0)
    if isinstance(x, Quantized):
        return Rows(data, x.scale, R, C // parts, parts, pitch, *x.scale.stride())
    return Rows(data, None, R, C, 1, pitch, 0, 0)


def new_rows(
    like: Matrix, R: int, C: int, parts: int = 1, dtype: torch.dtype | None = None
) -> Matrix:
    """Rows to write to, in the format of others; `dtype` replaces the one of data in FP8."""
    if not isinstance(like, Quantized):
        return like.new_empty(R, C)
    scale = like.scale.new_empty(R, block_count(C, parts))
    return Quantized(like.data.new_empty(R, C, dtype=dtype or like.data.dtype), scale)


def require_output(
    name: str,
    x: Matrix,
    like: Matrix,
    shape: tuple[int, int],
    parts: int = 1,
    dtype: torch.dtype | None = None,
) -> None:
    """Check rows that a caller gave to be written to, which are as `new_rows` makes them."""
    device = data_of(like).device
    if not isinstance(like, Quantized) or not isinstance(x, Quantized):
        require_same_format("the operands", like, name, x)
        check(device, name, data_of(x), torch.bfloat16, shape)
        return
    blocks = block_count(shape[1], parts)
    check(device, name, x.data, dtype or like.data.dtype, shape)
    check(device, f"{name}'s scale", x.scale, torch.float32, (shape[0], blocks))


def weights(
    device: torch.device, name: str, w: Matrix, *, n_parts: int = 1, k_parts: int = 1
) -> Weights:
    """Check stacked weights and return them as an argument.

    Args:
        w: bf16 [L, N, K], contiguous or the transpose of a contiguous [L, K, N]; or e4m3 [L, N, K],
            contiguous. N and K are multiples of 64.
        n_parts, k_parts: parts of N and of K, multiples of 64, in each of which blocks restart.
    """
    data = data_of(w)
    shape = list(data.shape)
    if len(shape) != 3 or not all(shape):
        raise ValueError(f"{name} must be [L, N, K], not empty, but is {shape}")
    L, N, K = shape
    if N % (64 * n_parts) or K % (64 * k_parts):
        raise ValueError(
            f"{name} is {shape}: {n_parts} part(s) of N and {k_parts} of K must be multiples of 64"
        )
    if not isinstance(w, Quantized):
        check(device, name, w.mT if is_transposed(w) else w, torch.bfloat16, None)
        return Weights(data, None, L, N, K, 1, 0, 0, 0, 0)
    check(device, name, data, E4M3, None)
    blocks = block_count(N, n_parts)
    require_scales(device, f"{name}'s scale", w.scale, (L, blocks, block_count(K, k_parts)))
    return Weights(data, w.scale, L, N, K // k_parts, k_parts, blocks, *w.scale.stride())


def is_transposed(w: Matrix) -> bool:
    """True if weights are the transpose of contiguous ones."""
    return not data_of(w).is_contiguous()


def require_scales(device: torch.device, name: str, scale: Tensor, shape: tuple[int, ...]) -> None:
    """Check scales, of which only the strides are free."""
    if scale.dtype != torch.float32 or scale.shape != shape or scale.device != device:
        raise ValueError(
            f"{name} must be torch.float32 {list(shape)} on {device}, not {scale.dtype} "
            f"{list(scale.shape)} on {scale.device}"
        )


def require_same_format(name: str, x: Matrix, other_name: str, other: Matrix) -> None:
    """Raise ValueError unless two operands are both in bf16 or both in FP8."""
    if isinstance(x, Quantized) != isinstance(other, Quantized):
        fp8, bf16 = (name, other_name) if isinstance(x, Quantized) else (other_name, name)
        raise ValueError(f"{fp8} in FP8, {bf16} in bf16: must be the same")
