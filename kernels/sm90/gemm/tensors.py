"""Tensors over pointer arguments, and structs of the fields that parts of a kernel need."""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64

from phalanx.kernels.sm90.jit.pointers import BytesPtr, Fp32Ptr


class Rows(NamedTuple):
    """Rows as an argument: tensors and ints at a launch, pointers and Int32 in a kernel."""

    data: BytesPtr  # [R, parts * channels]; a row is contiguous
    scale: Fp32Ptr  # fp32 [R, blocks of the channels], of any strides; null in bf16
    rows: Int32
    channels: Int32  # channels of a part, a multiple of 64
    parts: Int32  # parts of the channels, in each of which blocks restart; 1 in bf16
    pitch: Int32  # elements from a row to the next one
    scale_row: Int32  # stride of the scales from a row to the next one
    scale_block: Int32  # stride of the scales from a block to the next one


class Weights(NamedTuple):
    """Stacked weights as an argument, like `Rows`."""

    data: BytesPtr  # [L, N, parts * channels], or the transpose of a contiguous tensor in bf16
    scale: Fp32Ptr  # fp32 [L, blocks of N, blocks of K], of any strides; null in bf16
    experts: Int32
    columns: Int32  # N, a multiple of 64
    channels: Int32  # channels of a part of K, a multiple of 64
    parts: Int32  # parts of K, in each of which blocks restart; 1 in bf16
    blocks: Int32  # blocks of N
    scale_expert: Int32  # stride of the scales from an expert to the next one
    scale_n: Int32  # stride of the scales from a block of N to the next one
    scale_k: Int32  # stride of the scales from a block of K to the next one


def matrix(pointer: cute.Pointer, rows: Int32, columns: Int32) -> cute.Tensor:
    """[rows, columns], contiguous; columns a multiple of 64."""
    columns = cute.assume(columns, divby=64)
    pitch = cute.assume(Int64(columns), divby=64)
    return cute.make_tensor(pointer, cute.make_layout((rows, columns), stride=(pitch, 1)))


def stacked(pointer: cute.Pointer, N: Int32, K: Int32, L: Int32, transposed: bool) -> cute.Tensor:
    """[N, K, L] over storage [L, N, K], or [L, K, N] if transposed; N and K multiples of 64."""
    N, K = cute.assume(N, divby=64), cute.assume(K, divby=64)
    wide_n, wide_k = cute.assume(Int64(N), divby=64), cute.assume(Int64(K), divby=64)
    plane = cute.assume(Int64(N) * Int64(K), divby=64)
    stride = (1, wide_n, plane) if transposed else (wide_k, 1, plane)
    return cute.make_tensor(pointer, cute.make_layout((N, K, L), stride=stride))


def words(pointer: cute.Pointer, L: Int32, N: Int32) -> cute.Tensor:
    """[L, N] of bf16 as words of two."""
    return cute.make_tensor(pointer, cute.make_layout((L, N // 2), stride=(N // 2, 1)))


def vector(pointer: cute.Pointer, size: Any) -> cute.Tensor:
    """A contiguous tensor of one dimension."""
    return cute.make_tensor(pointer, cute.make_layout(size))


def struct(**fields: Any) -> Any:
    """A `cute.struct` of these fields, in this order, created while tracing."""
    return cute.struct(type("Storage", (), {"__annotations__": fields}))


def array(dtype: Any, size: int, align: int = 8) -> Any:
    """Field: `size` elements at a multiple of `align` bytes."""
    return cute.struct.Align[cute.struct.MemRange[dtype, size], align]  # type: ignore[misc]
