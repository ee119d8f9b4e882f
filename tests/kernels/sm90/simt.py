"""Run a kernel class of kernels.sm90 on the CPU: its own Python code, one thread of the host each.

A stand-in for the parts of CuTe DSL that kernels without TMA and tensor cores use. The threads of a
block run truly side by side, so a missing barrier shows; every index is checked against the memory
behind it, and so is the alignment of vector accesses. Blocks of a grid run in random order.
"""

import builtins
import importlib.util
import math
import random
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch

LANES = 32
_CURRENT = threading.local()
_ATOMIC = threading.Lock()
_APART = 1 << 40
_KNOWN: dict[int, int] = {}
_MEMORY: dict[int, list] = {}  # keeps lists, so that their ids stay theirs


class Pointer:
    """An element of a list."""

    def __init__(self, data: list, at: int = 0) -> None:
        self.data, self.at = data, at

    def __add__(self, offset: int) -> "Pointer":
        return Pointer(self.data, self.at + int(offset))

    def align(self, size: int) -> "Pointer":
        assert self.at * 4 % size == 0, f"element {self.at} of 4 bytes is not at {size} bytes"
        return self

    def get(self) -> Any:
        assert 0 <= self.at < len(self.data), f"reads element {self.at} of {len(self.data)}"
        return self.data[self.at]

    def set(self, value: Any) -> None:
        assert 0 <= self.at < len(self.data), f"writes element {self.at} of {len(self.data)}"
        self.data[self.at] = value

    def toint(self) -> int:
        """Address, of elements of 4 bytes; `at_address` is the inverse."""
        with _ATOMIC:
            number = _KNOWN.setdefault(id(self.data), len(_KNOWN) + 1)
            _MEMORY[number] = self.data
        return number * _APART + 4 * self.at


def at_address(address: int, align: int = 4) -> Pointer:
    assert address % align == 0, f"address {address} is not at {align} bytes"
    return Pointer(_MEMORY[address // _APART], address % _APART // 4)


class Layout:
    def __init__(self, shape: Any, stride: Any = None) -> None:
        self.shape = shape
        self.sizes = shape if isinstance(shape, tuple) else (shape,)
        if stride is None:  # columns first, as in CuTe
            strides = [1]
            for size in self.sizes[:-1]:
                strides.append(strides[-1] * size)
            self.strides: tuple = tuple(strides)
        else:
            self.strides = stride if isinstance(stride, tuple) else (stride,)


class Tensor:
    def __init__(self, iterator: Pointer, layout: Layout) -> None:
        self.iterator, self.layout = iterator, layout

    @property
    def shape(self) -> Any:
        return self.layout.shape

    def _coordinates(self, at: Any) -> tuple:
        if not isinstance(at, tuple):
            assert 0 <= at < size(self), f"{at} of {size(self)}"
            if len(self.layout.sizes) == 2:  # columns first
                at = (at % self.layout.sizes[0], at // self.layout.sizes[0])
        at = at if isinstance(at, tuple) else (at,)
        assert all(i is None or 0 <= i < n for i, n in zip(at, self.layout.sizes, strict=True)), (
            f"{at} of {self.layout.sizes}"
        )
        return at

    def _offset(self, at: Sequence[Any]) -> int:
        return sum(int(i) * s for i, s in zip(at, self.layout.strides, strict=True))

    def __getitem__(self, at: Any) -> Any:
        at = self._coordinates(at)
        kept = [d for d, i in enumerate(at) if i is None]
        if kept:
            sizes, strides = self.layout.sizes, self.layout.strides
            start = self.iterator + self._offset([0 if i is None else i for i in at])
            layout = Layout(tuple(sizes[d] for d in kept), tuple(strides[d] for d in kept))
            return Tensor(start, layout)
        return (self.iterator + self._offset(at)).get()

    def __setitem__(self, at: Any, value: Any) -> None:
        at = self._coordinates(at)
        (self.iterator + self._offset(at)).set(value)

    def fill(self, value: Any) -> None:
        for i in range(size(self)):
            self.iterator.data[self.iterator.at + i] = value


def size(tensor: Tensor) -> int:
    return math.prod(tensor.layout.sizes)


def _copy(source: Tensor, target: Tensor) -> None:
    """A vector of 4-byte elements, which must be aligned to its size."""
    assert size(source) == size(target)
    source.iterator.align(4 * size(source))
    target.iterator.align(4 * size(source))
    for i in range(size(source)):
        target[i] = source[i]


class _Barrier:
    """A threading.Barrier that costs each thread one lock of its own."""

    def __init__(self, threads: int) -> None:
        self.threads, self.waiting, self.broken = threads, list[Any](), False
        self.mutex = threading.Lock()

    def wait(self) -> None:
        with self.mutex:
            last = len(self.waiting) == self.threads - 1
            waiting = self.waiting
            if last:
                self.waiting = []
            else:
                waiting.append(_CURRENT.lock)
        if last:
            for lock in waiting:
                lock.release()
        elif not self.broken and not _CURRENT.lock.acquire(timeout=120):
            self.abort()
        if self.broken:
            raise threading.BrokenBarrierError

    def abort(self) -> None:
        with self.mutex:
            self.broken = True
            for lock in self.waiting:
                lock.release()
            self.waiting = []


class _Block:
    def __init__(self, index: int, grid: int, threads: int) -> None:
        self.index, self.grid, self.threads = index, grid, threads
        self.barrier = _Barrier(threads)
        self.warps = [_Barrier(LANES) for _ in range(threads // LANES)]
        self.slots: list[tuple[list, list]] = [([None] * LANES, [None] * LANES) for _ in self.warps]
        self.memory: Any = None
        self.errors: list[BaseException] = []

    def allocate(self, fields: dict[str, int]) -> Any:
        with _ATOMIC:
            if self.memory is None:
                self.memory = SimpleNamespace(**{n: _Range(s) for n, s in fields.items()})
        return self.memory

    def abort(self, error: BaseException) -> None:
        self.errors.append(error)
        for barrier in (self.barrier, *self.warps):
            barrier.abort()


class _Range:
    def __init__(self, count: int) -> None:
        self.data: list = [None] * count  # whatever is read before it is written fails

    def get_tensor(self, layout: Layout) -> Tensor:
        return Tensor(Pointer(self.data), layout)


def _exchange(value: Any) -> list:
    """Values of all lanes of the warp."""
    block, warp = _CURRENT.block, _CURRENT.thread // LANES
    # Two sets of slots by turns: who is in the next exchange does not change those of this one.
    _CURRENT.turn ^= 1
    slots = block.slots[warp][_CURRENT.turn]
    slots[_CURRENT.thread % LANES] = value
    block.warps[warp].wait()
    return list(slots)


def _lane() -> int:
    return _CURRENT.thread % LANES


def _shuffle_up(value: Any, by: int) -> Any:
    values, lane = _exchange(value), _lane()
    return values[lane - by] if lane >= by else value


def _reduce(value: Any, kind: str) -> Any:
    return {"add": sum, "max": max, "min": min}[kind](_exchange(value))


def _match(mask: int, value: Any) -> int:
    assert mask == 0xFFFFFFFF
    return sum(1 << i for i, other in enumerate(_exchange(value)) if other == value)


def _atomic_add(pointer: Pointer, value: int, sem: str, scope: str) -> int:
    with _ATOMIC:
        before = pointer.get()
        pointer.set(before + value)
    return before


def _ballot(predicate: bool) -> int:
    return sum(1 << i for i, other in enumerate(_exchange(bool(predicate))) if other)


ARCH = dict(
    thread_idx=lambda: (_CURRENT.thread, 0, 0),
    block_idx=lambda: (_CURRENT.block.index, 0, 0),
    grid_dim=lambda: (_CURRENT.block.grid, 1, 1),
    lane_idx=_lane,
    warp_idx=lambda: _CURRENT.thread // LANES,
    make_warp_uniform=lambda x: x,
    sync_threads=lambda: _CURRENT.block.barrier.wait(),
    sync_warp=lambda: _exchange(None),
    shuffle_sync=lambda value, lane: _exchange(value)[lane],
    shuffle_sync_up=_shuffle_up,
    shuffle_sync_bfly=lambda value, offset: _exchange(value)[_lane() ^ offset],
    warp_redux_sync=_reduce,
    match_sync=_match,
    vote_ballot_sync=_ballot,
    popc=lambda bits: bits.bit_count(),
    lanemask_lt=lambda: (1 << _lane()) - 1,
    mul_hi=lambda a, b: (a * b) >> 32,
    atomic_add=_atomic_add,
    fence_acq_rel_sys=lambda: None,
    warp_reduction_sum=lambda value: sum(_exchange(value)),
    griddepcontrol_wait=lambda: None,
    griddepcontrol_launch_dependents=lambda: None,
    fmax=np.fmax,
)


def _int32(x: Any) -> int:
    return (int(x) + (1 << 31)) % (1 << 32) - (1 << 31)


def _as_bits(x: np.float32) -> int:
    return 0x7FFFFFFF if np.isnan(x) else int(np.float32(x).view(np.uint32))


def _as_float(bits: int) -> np.float32:
    return np.uint32(bits % (1 << 32)).view(np.float32)


def _pack(low: np.float32, high: np.float32) -> int:
    pair = torch.tensor([low, high]).to(torch.bfloat16)
    return int(pair.view(torch.int32).item()) % (1 << 32)


def _unpack(word: int) -> tuple[np.float32, np.float32]:
    low, high = np.array([word << 16 & 0xFFFFFFFF, word & 0xFFFF0000], np.uint32).view(np.float32)
    return low, high


def _load_global(address: int) -> list:
    first = at_address(address, align=16)
    return [(first + i).get() for i in range(4)]


def _store_global(address: int, *words: int) -> None:
    first = at_address(address, align=16)
    for i, word in enumerate(words):
        (first + i).set(word)


def _wait(flag: int, epoch: int, limit_ms: int, report: int, who: int) -> None:
    """Kernels run one after the other: what is not there does not come any more."""
    found = at_address(flag).get()
    assert found >= epoch, f"waits for {epoch} of rank {who}, but finds {found}"


PEER = dict(
    load_global=_load_global,
    store_release=lambda where, value: at_address(where).set(value),
    store_flag=lambda where, value: at_address(where).set(value),
    wait=_wait,
)


def _range(*bounds: int, unroll: int = 1) -> range:
    return range(*bounds)


def _cute() -> Any:
    return SimpleNamespace(
        arch=SimpleNamespace(**ARCH),
        math=SimpleNamespace(exp=np.exp),
        jit=lambda function: function,
        kernel=_launchable,
        Pointer=Pointer,
        Tensor=Tensor,
        make_tensor=Tensor,
        make_layout=Layout,
        make_rmem_tensor=lambda shape, _: _Range(math.prod(Layout(shape).sizes)).get_tensor(
            Layout(shape)
        ),
        domain_offset=lambda at, t: Tensor(t.iterator + t._offset(at), t.layout),
        autovec_copy=_copy,
        assume=_assume,
        size=size,
    )


def _assume(value: int, divby: int) -> int:
    assert value % divby == 0, f"{value} is no multiple of {divby}"
    return value


def _launchable(kernel: Callable) -> Callable:
    def bound(*args: Any) -> Any:
        return SimpleNamespace(
            launch=lambda *, grid, block, **_: _run(lambda: kernel(*args), grid[0], block[0])
        )

    return bound


def _cutlass() -> Any:
    allocator = SimpleNamespace(allocate=lambda fields: _CURRENT.block.allocate(fields))
    return SimpleNamespace(
        cute=_cute(),
        Int32=_int32,
        Uint32=lambda x: int(x) % (1 << 32),
        Uint64=lambda x: int(x) % (1 << 64),
        Boolean=bool,
        Int64=int,
        Float32=np.float32,
        BFloat16=None,  # of pointers alone
        Constexpr=int,
        range=_range,
        range_constexpr=range,
        const_expr=lambda x: x,
        select_=lambda condition, a, b: a if condition else b,
        min=min,
        max=max,
        utils=SimpleNamespace(SmemAllocator=lambda: allocator),
    )


def load(name: str, **constants: Any) -> SimpleNamespace:
    """A module of kernels.sm90 whose kernels run on the CPU when they are called.

    Args:
        name: of the module. constants: names to replace, such as THREADS, in it and in those of
            kernels.sm90 that it imports.

    A kernel's call takes a `Pointer` to a list for each pointer, the sizes, and None as the stream.
    """
    fakes = {
        "cutlass": _cutlass(),
        "phalanx.kernels.sm90.gemm.tensors": SimpleNamespace(
            struct=lambda **fields: fields, array=lambda dtype, count, align=8: count
        ),
        "phalanx.kernels.sm90.jit.ptx": SimpleNamespace(
            pack=_pack,
            unpack=_unpack,
            store_global=_store_global,
            lowest=lambda bits: (bits & -bits).bit_length() - 1,
        ),
        "phalanx.kernels.sm90.exchange.peer": SimpleNamespace(**PEER),
        "phalanx.kernels.sm90.jit.launch": MagicMock(),
        "phalanx.kernels.sm90.gemm.mainloop": SimpleNamespace(
            GROUP_THREADS=128, TILE_ROWS=128, Mainloop=None
        ),
        "cuda": MagicMock(),
    }

    def importer(module: str, scope: Any = None, _: Any = None, names: Any = (), level: int = 0):
        for fake in (module, module.partition(".")[0]):
            if fake in fakes:
                return fakes[fake]
        if module.startswith("phalanx.kernels.sm90."):
            spec = importlib.util.find_spec(module)
            if spec is not None and spec.submodule_search_locations:
                return SimpleNamespace(**{n: importer(f"{module}.{n}") for n in names})
            return load(module, **constants)
        return __import__(module, scope, _, names, level)

    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    code = compile(Path(spec.origin).read_text(), spec.origin, "exec")
    scope = {"__name__": name, "__builtins__": {**vars(builtins), "__import__": importer}}
    exec(code, scope)
    for replaced, value in {"as_bits": _as_bits, "as_float": _as_float, **constants}.items():
        if replaced in scope:
            scope[replaced] = value
    return SimpleNamespace(**scope)


def _run(kernel: Callable, grid: int, threads: int) -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for index in random.Random(grid).sample(range(grid), grid):
            block = _Block(index, grid, threads)
            running = [
                threading.Thread(target=_thread, args=(kernel, block, i)) for i in range(threads)
            ]
            for each in running:
                each.start()
            for each in running:
                each.join()
            if block.errors:
                raise block.errors[0]
    finally:
        sys.setswitchinterval(interval)


def _thread(kernel: Callable, block: _Block, number: int) -> None:
    _CURRENT.thread, _CURRENT.block, _CURRENT.turn = number, block, 0
    _CURRENT.lock = threading.Lock()
    _CURRENT.lock.acquire()
    np.seterr(all="ignore")
    try:
        kernel()
    except threading.BrokenBarrierError as error:
        if not block.errors:
            block.abort(error)
    except BaseException as error:
        block.abort(error)
