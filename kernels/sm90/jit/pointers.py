"""Pointer arguments of kernels: annotations of `__call__` from which a launch takes its arguments.

An alias names the element and the alignment in bytes that a kernel assumes.
"""

from inspect import signature
from typing import Annotated, Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32


class Element(NamedTuple):
    """Element of a pointer argument."""

    dtype: Any
    align: int
    """Bytes."""


type Bf16Ptr = Annotated[cute.Pointer, Element(cutlass.BFloat16, 16)]
type Bf16ScalarPtr = Annotated[cute.Pointer, Element(cutlass.BFloat16, 4)]
type Fp8Ptr = Annotated[cute.Pointer, Element(cutlass.Float8E4M3FN, 16)]
"""FP8, as e4m3; kernels recast it to e5m2."""
type WordPtr = Annotated[cute.Pointer, Element(cutlass.Uint32, 4)]
"""Words of two bf16."""
type WordVecPtr = Annotated[cute.Pointer, Element(cutlass.Uint32, 16)]
type Fp32Ptr = Annotated[cute.Pointer, Element(cutlass.Float32, 4)]
type Fp32VecPtr = Annotated[cute.Pointer, Element(cutlass.Float32, 16)]
type IntPtr = Annotated[cute.Pointer, Element(Int32, 4)]
type IntVecPtr = Annotated[cute.Pointer, Element(Int32, 16)]
type LongPtr = Annotated[cute.Pointer, Element(cutlass.Int64, 8)]


class Arguments(NamedTuple):
    """Arguments of a kernel without the stream, in the order of its `__call__`."""

    pointers: dict[str, Element]
    integers: tuple[str, ...]
    """Names of Int32 arguments, which follow the pointers."""


_KNOWN: dict[type, Arguments] = {}


def arguments_of(kernel: type) -> Arguments:
    """Arguments of a kernel class, read once from the annotations of its `__call__`.

    Raises:
        TypeError: an argument is neither a pointer of this file nor an Int32.
    """
    if kernel not in _KNOWN:
        pointers, integers = dict[str, Element](), list[str]()
        _, *parameters, _ = signature(kernel.__call__).parameters.values()  # self, ..., stream
        for parameter in parameters:
            if parameter.annotation is Int32:
                integers.append(parameter.name)
                continue
            metadata = getattr(getattr(parameter.annotation, "__value__", None), "__metadata__", ())
            if integers or not metadata:
                raise TypeError(f"{kernel.__name__}: {parameter} is no pointer before the integers")
            pointers[parameter.name] = metadata[0]
        _KNOWN[kernel] = Arguments(pointers, tuple(integers))
    return _KNOWN[kernel]
