"""Checks of arguments by the wrappers of cuDNN's grouped GEMMs."""

from collections.abc import Iterator

import torch
from torch import Tensor

BF16 = torch.bfloat16
ROWS = 256


def operand(
    name: str,
    tensor: Tensor,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...] | None = None,
    align: int = 16,
) -> Tensor:
    """Check a tensor's properties and return it; without `stride`, it must be contiguous."""
    assert isinstance(tensor, Tensor), f"{name} is {tensor}"
    assert tensor.dtype == dtype, f"{name} is {tensor.dtype}, not {dtype}"
    assert tensor.shape == shape, f"{name} is {tuple(tensor.shape)}, not {shape}"
    if stride is None:
        assert tensor.is_contiguous(), f"{name} has strides {tensor.stride()}"
    else:
        # Strides of dimensions of size 1 are ignored.
        wanted = [s for s, n in zip(stride, shape, strict=True) if n != 1]
        given = [s for s, n in zip(tensor.stride(), shape, strict=True) if n != 1]
        assert given == wanted, f"{name} has strides {tensor.stride()}, not {stride}"
    assert tensor.data_ptr() % align == 0, f"{name} does not start at {align} bytes"
    return tensor


def defaults(**given: object) -> None:
    """Options that the adapter must not set: name=(value, default)."""
    for name, (value, default) in given.items():
        assert value == default, f"{name} is {value}"


def rows(a: Tensor, padded_offsets: Tensor) -> tuple[int, int, int]:
    """S, channels and L of expert rows."""
    S, k = a.shape
    assert S % ROWS == 0, f"{S} rows are no whole blocks of {ROWS}"
    L = len(padded_offsets)
    assert 1 <= L <= 1024
    operand("padded_offsets", padded_offsets, torch.int32, (L,))
    return S, k, L


def spans(offsets: Tensor, limit: int) -> Iterator[tuple[int, slice]]:
    """Expert and its rows; the offsets' values are checked as the package's debug mode does."""
    begin = 0
    for expert, end in enumerate(offsets.tolist()):
        assert begin <= end <= limit and end % ROWS == 0, offsets.tolist()
        yield expert, slice(begin, end)
        begin = end


def apart(name: str, output: Tensor, *inputs: Tensor | None) -> None:
    """Check that an output shares no memory with other operands."""
    own = output.untyped_storage().data_ptr()
    for tensor in inputs:
        assert tensor is None or tensor.untyped_storage().data_ptr() != own, f"{name} overlaps"
