"""Launches of a function, recorded once and repeated: for eager calls whose time is the host's.

A function of tensors launches kernels at addresses, with integers that follow from shapes. Most of
its time on the host goes into Python that finds the same integers again. A `Tape` records, in one
call, the launches, the allocations between them and the few other operators; later calls of the
same shapes allocate the same memory and launch with its addresses. Unlike a CUDA graph it needs no
static inputs and keeps no memory: what it allocates is freed where the last launch has used it,
and small scratch is one piece of memory of a call, as each allocation takes microseconds.

A tape holds for shapes, dtypes, devices, a stream and alignments, which are its key. It is neither
for captures, whose counters are the graph's, nor under modes of torch that look at operators.
"""

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.kernels.tracing import LOCAL, recorder

_ALIGN = 16  # bytes; kernels assume no more of an input
_APART = 512  # bytes; as torch's allocator aligns what it returns
_SMALL = 16 << 20  # bytes of the largest scratch that waits in the piece of memory
_ALLOCATIONS = frozenset(
    ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted")
)

Step = Callable[[list[int], list[Any]], None]
"""Takes addresses of the buffers, and their tensors while they live."""
Rebuild = Callable[[list[Any]], Any]
"""Makes a value of a replay of the tensors of its buffers."""


_NEW, _KNOWN = object(), object()


class Tapes:
    """A function of tensors that is repeated from tapes.

    Args:
        function: of tensors (or None) and hashable keywords; returns tensors that are its inputs or
            were allocated in it, or None. It reads no tensor on the host.
    """

    def __init__(self, function: Callable[..., Sequence[Any]]) -> None:
        self._function = function
        self._tapes: dict[Any, Tape | object | None] = {}  # None: it cannot be repeated

    def __call__(self, tensors: Sequence[Tensor | None], **static: Any) -> Sequence[Any]:
        """Result of the function. The first call runs it, the second one records it.

        Tensors are contiguous. `static` are the keywords of the function.
        """
        device = next(t for t in tensors if t is not None).get_device()
        key = (
            device,
            0 if device < 0 else torch._C._cuda_getCurrentRawStream(device),
            *static.values(),
            *[None if t is None else (t.shape, t.dtype, t.data_ptr() % _ALIGN) for t in tensors],
        )
        tape = self._tapes.get(key, _NEW)
        if isinstance(tape, Tape):
            return tape.play(tensors)
        # The first call compiles kernels and makes what lasts, as counters.
        if tape is _KNOWN and not _overlap(tensors):
            recording = Recorder(tensors)
            with recording:
                results = self._function(*tensors, **static)
            self._tapes[key] = recording.tape(results)
            return results
        self._tapes[key] = None if tape is None else _KNOWN
        return self._function(*tensors, **static)


class Piece(NamedTuple):
    """Memory that a call allocates once."""

    size: int  # bytes
    device: torch.device
    places: dict[int, int]  # where buffers begin


class Tape:
    """Steps of a function.

    Args:
        steps: what is repeated.
        more: number of buffers besides the inputs.
        results: makers of the results.
        piece: memory of small scratch.
        kept: tensors whose addresses the steps have.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        more: int,
        results: Sequence[Rebuild],
        piece: Piece,
        kept: Sequence[Tensor],
    ) -> None:
        self._steps, self._results, self.piece = tuple(steps), tuple(results), piece
        self._kept = kept
        self._more = [None] * more
        self._places = tuple(piece.places.items())

    def play(self, inputs: Sequence[Tensor | None]) -> list[Any]:
        """Repeat the steps with other inputs; return the results."""
        tensors: list[Any] = [*inputs, *self._more]
        addresses = [0 if t is None else t.data_ptr() for t in inputs] + [0] * len(self._more)
        if self._places:
            scratch = torch.empty(self.piece.size, dtype=torch.uint8, device=self.piece.device)
            begin = scratch.data_ptr()
            for number, first in self._places:
                addresses[number] = begin + first
        for repeat in self._steps:
            repeat(addresses, tensors)
        return [rebuild(tensors) for rebuild in self._results]


class Recorder(TorchDispatchMode):
    """Inside, the launches and operators of this thread become steps of a tape."""

    def __init__(self, inputs: Sequence[Tensor | None]) -> None:
        super().__init__()
        self._given, self._sizes = inputs, [0] * len(inputs)
        self._shapes: list[Any] = [None if t is None else _shape_of(t) for t in inputs]
        self._inputs = [range(0) if t is None else _bytes_of(t) for t in inputs]
        self._allocated: dict[int, int] = {}  # newest buffer at the address of a storage
        self._steps: list[tuple[Step, tuple[int, ...]]] = []  # with the buffers that it uses
        self._empties: dict[int, tuple[int, Rebuild]] = {}  # steps that allocate, and how
        self._as_tensors: set[int] = set()  # buffers that operators or results need as tensors
        self._kept: list[Tensor] = []  # of other storages, as counters, which live as long as it
        self.fault = ""

    def __enter__(self) -> Any:
        _watch_triton()
        LOCAL.recorder = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        LOCAL.recorder = None
        super().__exit__(*error)

    def add(self, repeat: Step, reads: Sequence[int] = ()) -> None:
        """A step, which uses some buffers."""
        self._steps.append((repeat, tuple(reads)))

    def place(self, tensor: Tensor) -> tuple[int, int]:
        """Buffer and offset in bytes of a tensor; a buffer of -1: the offset is its address."""
        if not tensor.numel():
            return -1, 0
        address, whole = tensor.data_ptr(), tensor.untyped_storage().data_ptr()
        if (number := self._allocated.get(whole)) is not None:
            return number, address - whole
        for number, addresses in enumerate(self._inputs):
            if address in addresses:
                return number, address - addresses.start
        self._kept.append(tensor)  # it is older than the recording
        return -1, address

    def launched(
        self, call: Callable[[list[Any]], Any], values: Sequence[Any], places: Sequence[int]
    ) -> None:
        """A launch by `call(values)`, of which those at `places` are tensors or None."""
        fixed, moving = list(values), []
        for at in places:
            number, offset = (-1, 0) if values[at] is None else self.place(values[at])
            fixed[at] = offset
            if number >= 0:
                moving.append((at, number, offset))

        def repeat(addresses: list[int], tensors: list[Any]) -> None:
            found = fixed.copy()  # replays of several threads may overlap
            for at, number, offset in moving:
                found[at] = addresses[number] + offset
            call(found)

        self.add(repeat, [number for _, number, _ in moving])

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = op(*args, **kwargs)
        schema = op._schema
        if any(r.alias_info is not None for r in schema.returns):
            if any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments):
                self._computed(op, args, kwargs, None)
            return result  # a view has the buffer of its input
        if not isinstance(result, Tensor):
            self.fault = self.fault or f"{op} returns no tensor"
        elif op._schema.name.partition("::")[2] in _ALLOCATIONS:
            self._empty(result)
        else:
            self._computed(op, args, kwargs, result)
        return result

    def _new(self, result: Tensor) -> int:
        number = len(self._shapes)
        self._shapes.append(_shape_of(result))
        self._sizes.append(result.numel() * result.itemsize)  # allocations are dense
        if result.numel():
            self._allocated[result.untyped_storage().data_ptr()] = number
        return number

    def _empty(self, result: Tensor) -> None:
        self._empties[self._new(result)] = len(self._steps), _empty_like(result)
        self.add(_nothing)

    def _computed(self, op: Any, args: Any, kwargs: Any, result: Tensor | None) -> None:
        found: list[int] = []
        given = [self._rebuilt(value, found) for value in args]
        named = {key: self._rebuilt(value, found) for key, value in kwargs.items()}
        number = None if result is None else self._new(result)

        def repeat(addresses: list[int], tensors: list[Any]) -> None:
            made = op(*[g(tensors) for g in given], **{k: g(tensors) for k, g in named.items()})
            if number is not None:
                tensors[number], addresses[number] = made, made.data_ptr()

        if number is not None:
            self._as_tensors.add(number)
        self.add(repeat, found if number is None else [*found, number])

    def _rebuilt(self, value: Any, found: list[int]) -> Rebuild:
        """Makes the argument of an operator, or a result; adds to the buffers that are `found`."""
        if isinstance(value, (list, tuple)):
            parts = [self._rebuilt(part, found) for part in value]
            return lambda tensors: [part(tensors) for part in parts]
        if not isinstance(value, Tensor):
            return lambda tensors: value
        if not value.numel():
            return _empty_like(value)
        number, offset = self.place(value)
        if number < 0:
            return lambda tensors: value
        found.append(number)
        self._as_tensors.add(number)
        if _shape_of(value) == self._shapes[number]:
            return lambda tensors: tensors[number]
        if value.dtype != self._shapes[number][2] or offset % value.itemsize:
            self.fault = self.fault or "an operator reads another dtype than was allocated"
        shape, stride, first = value.shape, value.stride(), offset // value.itemsize

        def view(tensors: list[Any]) -> Any:
            whole = tensors[number]
            return whole.as_strided(shape, stride, whole.storage_offset() + first)

        return view

    def tape(self, results: Sequence[Tensor | None]) -> Tape | None:
        """The tape, or None if the function does what a tape cannot repeat."""
        wanted: list[int] = []
        rebuilds = [self._rebuilt(result, wanted) for result in results]
        if self.fault:
            return None
        last = {n: at for at, (_, used) in enumerate(self._steps) for n in used}
        scratch = [
            Span(number, size, first, last[number] + 1)
            for number, (first, _) in self._empties.items()
            if number in last
            and number not in self._as_tensors
            and (size := self._sizes[number]) <= _SMALL
        ]
        places, size = arrange(scratch)
        for number in {*last, *wanted} & self._empties.keys() - places.keys():
            first, empty = self._empties[number]
            self._steps[first] = _making(number, empty), ()
        ends: dict[int, list[int]] = {}
        for number, at in last.items():
            if number >= len(self._given) and number not in wanted and number not in places:
                ends.setdefault(at, []).append(number)
        steps: list[Step] = []
        for at, (repeat, _) in enumerate(self._steps):
            steps += [] if repeat is _nothing else [repeat]
            steps += [_freeing(ends[at])] if at in ends else []
        device = next(t.device for t in self._given if t is not None)
        more = len(self._sizes) - len(self._given)
        return Tape(steps, more, rebuilds, Piece(size, device, places), self._kept)


class Span(NamedTuple):
    """Memory that is in use from a step up to another."""

    number: int
    size: int  # bytes
    first: int
    end: int


def arrange(spans: Sequence[Span]) -> tuple[dict[int, int], int]:
    """Places in one piece of memory, and its size: those in use together lie apart.

    The largest first, each at the lowest place that is free while it is in use.
    """
    placed: list[tuple[int, Span]] = []
    for span in sorted(spans, key=lambda s: -s.size):
        begin = 0
        for other, taken in sorted(placed):
            if taken.first < span.end and span.first < taken.end:
                if begin + span.size <= other:
                    break
                begin = max(begin, other + -(-taken.size // _APART) * _APART)
        placed.append((begin, span))
    size = max((begin + span.size for begin, span in placed), default=0)
    return {span.number: begin for begin, span in placed}, size


def _nothing(addresses: list[int], tensors: list[Any]) -> None:
    """The step of an allocation that no replay makes by itself."""


def _making(number: int, empty: Rebuild) -> Step:
    def repeat(addresses: list[int], tensors: list[Any]) -> None:
        made = empty(tensors)
        tensors[number], addresses[number] = made, made.data_ptr()

    return repeat


def _freeing(numbers: Sequence[int]) -> Step:
    def repeat(addresses: list[int], tensors: list[Any]) -> None:
        for number in numbers:
            tensors[number] = None

    return repeat


def _empty_like(tensor: Tensor) -> Rebuild:
    shape, stride = tensor.shape, tensor.stride()
    dtype, device = tensor.dtype, tensor.device
    return lambda tensors: torch.empty_strided(shape, stride, dtype=dtype, device=device)


def _bytes_of(tensor: Tensor) -> range:
    """Addresses of a contiguous tensor."""
    return range(tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.itemsize)


def _overlap(tensors: Sequence[Tensor | None]) -> bool:
    """True if some share memory, so that an address does not say which of them it belongs to."""
    found = sorted((r.start, r.stop) for t in tensors if t is not None and (r := _bytes_of(t)))
    return any(stop > start for (_, stop), (start, _) in itertools.pairwise(found))


def _shape_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


_WATCHING = threading.Lock()


def _watch_triton() -> None:
    """From now on a launch in Triton tells the recorder of its thread, if there is one."""
    try:
        from triton.runtime.jit import JITFunction
    except ImportError:
        return
    with _WATCHING:
        run = JITFunction.run
        if getattr(run, "_records", False):
            return

        def watched(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            kernel = run(self, *args, grid=grid, warmup=warmup, **kwargs)
            if (recording := recorder()) is not None and not warmup:
                _record_triton(recording, self, kernel, args, grid, kwargs)
            return kernel

        watched._records = True  # type: ignore[attr-defined]
        JITFunction.run = watched


def _record_triton(
    recording: Recorder, function: Any, kernel: Any, args: Any, grid: Any, kwargs: Any
) -> None:
    from triton import knobs
    from triton.runtime import driver

    device = driver.active.get_current_device()
    stream = driver.active.get_current_stream(device)
    binder = function.device_caches[device][4]
    options = kwargs | {
        "debug": kwargs.get("debug", function.debug) or knobs.runtime.debug,
        "instrumentation_mode": knobs.compilation.instrumentation_mode,
    }
    bound, *_ = binder(*args, **options)
    values = list(bound.values())
    sizes = grid(bound) if callable(grid) else grid
    x, y, z = (*sizes, 1, 1)[:3]
    run, address, metadata = kernel.run, kernel.function, kernel.packed_metadata

    def call(found: list[Any]) -> None:
        run(x, y, z, stream, address, metadata, None, None, None, *found)

    places = [at for at, value in enumerate(values) if isinstance(value, Tensor)]
    recording.launched(call, values, places)
