"""Tensors over pointer arguments, and structs of the fields that parts of a kernel need."""

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64


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
