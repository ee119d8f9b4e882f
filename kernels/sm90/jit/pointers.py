"""Arguments of kernels: annotations of `__call__` from which a launch takes its arguments.

An argument is a pointer, whose alias names the element and the alignment in bytes that a kernel
assumes, an Int32, or a record of these: a NamedTuple whose fields are annotated in the same way. A
launch fills a record with tensors and ints, and the kernel finds pointers and Int32 in it.
"""

from inspect import signature
from typing import Annotated, Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32


class Element(NamedTuple):
    """Element of a pointer argument."""

    dtype: Any
    align: int  # bytes


type Bf16Ptr = Annotated[cute.Pointer, Element(cutlass.BFloat16, 16)]
type Bf16ScalarPtr = Annotated[cute.Pointer, Element(cutlass.BFloat16, 4)]
type BytesPtr = Annotated[cute.Pointer, Element(cutlass.Uint8, 16)]
"""Elements of a type that the configuration names; kernels recast the pointer to it."""
type WordPtr = Annotated[cute.Pointer, Element(cutlass.Uint32, 4)]  # words of two bf16
type WordVecPtr = Annotated[cute.Pointer, Element(cutlass.Uint32, 16)]
type Fp32Ptr = Annotated[cute.Pointer, Element(cutlass.Float32, 4)]
type Fp32VecPtr = Annotated[cute.Pointer, Element(cutlass.Float32, 16)]
type IntPtr = Annotated[cute.Pointer, Element(Int32, 4)]
type IntVecPtr = Annotated[cute.Pointer, Element(Int32, 16)]
type LongPtr = Annotated[cute.Pointer, Element(cutlass.Int64, 8)]


class Parameter(NamedTuple):
    """An argument of a kernel: one value, or a record."""

    record: Any  # the record's class; None for one value
    elements: tuple[Element | None, ...]  # element of each of its pointers, None for an Int32


class Arguments(NamedTuple):
    """Arguments of a kernel without the stream, in the order of its `__call__`."""

    parameters: dict[str, Parameter]
    values: dict[str, Element | None]
    """All values by name, those of records as `argument.field`; None for an Int32."""
    pointers: tuple[tuple[int, int], ...]
    """Place among the values, and alignment in bytes, of each pointer."""

    @property
    def kinds(self) -> str:
        """A letter of `struct` for each value: Q for a pointer, i for an Int32."""
        return "".join("i" if element is None else "Q" for element in self.values.values())


_KNOWN: dict[type, Arguments] = {}


def arguments_of(kernel: type) -> Arguments:
    """Arguments of a kernel class, read once from the annotations of its `__call__`. One that is no
    pointer of this file, Int32 or record of them is a TypeError."""
    if kernel not in _KNOWN:
        parameters, values = dict[str, Parameter](), dict[str, Element | None]()
        _, *found, _ = signature(kernel.__call__).parameters.values()  # self, ..., stream
        for name, annotation in ((p.name, p.annotation) for p in found):
            fields = getattr(annotation, "_fields", None)
            named = {name: annotation}
            if fields:
                named = {f"{name}.{field}": annotation.__annotations__[field] for field in fields}
            elements = {key: _element(kernel, key, of) for key, of in named.items()}
            parameters[name] = Parameter(annotation if fields else None, tuple(elements.values()))
            values |= elements
        pointers = tuple((n, e.align) for n, e in enumerate(values.values()) if e is not None)
        _KNOWN[kernel] = Arguments(parameters, values, pointers)
    return _KNOWN[kernel]


def _element(kernel: type, name: str, annotation: Any) -> Element | None:
    if annotation is Int32:
        return None
    metadata = getattr(getattr(annotation, "__value__", None), "__metadata__", ())
    if not metadata:
        raise TypeError(f"{kernel.__name__}: {name}: {annotation} is no pointer, Int32 or record")
    element: Element = metadata[0]
    return element
