"""Shared memory of a kernel, composed of the fields that its parts need."""

from typing import Any

import cutlass.cute as cute


def struct(**fields: Any) -> Any:
    """A `cute.struct` of these fields, in this order, created while tracing."""
    return cute.struct(type("Storage", (), {"__annotations__": fields}))


def array(dtype: Any, size: int, align: int = 8) -> Any:
    """Field: `size` elements at a multiple of `align` bytes."""
    return cute.struct.Align[cute.struct.MemRange[dtype, size], align]  # type: ignore[misc]
