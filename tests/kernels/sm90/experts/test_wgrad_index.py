"""Addresses of weight gradients, by running their own functions as plain Python.

A function runs for one thread, or for a warp whose lanes are an array, with the few parts of CuTe
DSL that it uses replaced.
"""

from contextlib import nullcontext
from types import FunctionType, SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cutlass")

import itertools

from phalanx.kernels.sm90.experts import accumulate, bias_grad, contraction_loads
from phalanx.kernels.sm90.experts.accumulate import Output, Store
from phalanx.kernels.sm90.experts.bias_grad import CHUNK, BiasGradConfig, BiasGradKernel
from phalanx.kernels.sm90.experts.contraction import BOX, Contraction, D, V
from phalanx.kernels.sm90.experts.contraction_loads import Clear, Gather
from phalanx.kernels.sm90.gemm import expert_tiles
from phalanx.kernels.sm90.gemm.expert_tiles import ExpertTiles, unpack


def _plain(method, module):
    """A method as it is written; the first compilation of a kernel rewrites it for the device."""
    return FunctionType(method.__wrapped__.__code__, vars(module))


WINDOW, LOCATE = _plain(ExpertTiles.window, expert_tiles), _plain(ExpertTiles.locate, expert_tiles)
WRITE = _plain(Store._write, accumulate)
GATHER = _plain(Gather._copy, contraction_loads)
CLEAR = _plain(Clear.__call__, contraction_loads)
FIND = _plain(BiasGradKernel._find, bias_grad)


class Pointer(int):
    """An address, in elements."""

    def align(self, _: int) -> "Pointer":
        return self

    def __add__(self, other: int) -> "Pointer":
        return Pointer(int(self) + int(other))


def _language(**arch) -> tuple[SimpleNamespace, SimpleNamespace]:
    """Stand-ins for `cute` and `cutlass`, for one thread."""
    cute = SimpleNamespace(arch=SimpleNamespace(**arch))
    cutlass = SimpleNamespace(
        min=min,
        range_constexpr=range,
        range=lambda *bounds, unroll: range(*bounds),
        const_expr=bool,
        select_=lambda condition, a, b: a if condition else b,
    )
    return cute, cutlass


@pytest.mark.parametrize("ordered", [False, True], ids=["in turn", "ordered"])
@pytest.mark.parametrize("experts", [1, 4, 32, 33, 200])
@pytest.mark.parametrize("grid", [(1, 1), (5, 11), (16, 8), (3, 28)])
def test_every_tile_is_found_once(experts, grid, ordered, monkeypatch):
    lanes = np.arange(32)
    cute, cutlass = _language(
        lane_idx=lambda: lanes,
        shuffle_sync=lambda value, lane: int(np.broadcast_to(value, 32)[lane]),
    )
    cutlass.min = np.minimum
    for name, value in dict(cute=cute, cutlass=cutlass, Int32=int).items():
        monkeypatch.setattr(expert_tiles, name, value)
    random = np.random.default_rng(experts)
    offsets = np.concatenate([[0], np.cumsum(random.integers(0, 300, experts))])
    order = random.permutation(experts)
    tiles = SimpleNamespace(
        offsets=offsets, order=order, ordered=ordered, band=4, experts=experts, row_tiles=grid[0]
    )
    tiles.column_tiles, tiles.each = grid[1], grid[0] * grid[1]
    tiles.window = lambda first: WINDOW(tiles, first)
    step = 7  # as the tiles of one of seven CTAs
    for start in range(step):
        state, tile, seen = (0, *tiles.window(0)), start, []
        while True:
            *state, row, end, position, expert = LOCATE(tiles, tile, *state)
            if expert < 0:
                break
            assert (row, end) == (offsets[expert], offsets[expert + 1])
            assert expert == (order[tile // tiles.each] if ordered else tile // tiles.each)
            seen.append((int(expert), *map(int, unpack(position))))
            tile += step
        assert tile >= experts * tiles.each > tile - step
        assert len(set(seen)) == len(seen) == len(range(start, experts * tiles.each, step))
        assert all(down < grid[0] and across < grid[1] for _, down, across in seen)


@pytest.mark.parametrize("columns", [128, 192, 256])
def test_accumulators_land_where_tma_reads_them(columns, monkeypatch):
    """fp32 blocks, swizzled by 128 bytes, and no two lanes of a half-warp on the same bank."""
    written: dict[int, tuple[int, int]] = {}
    banks: list[list[int]] = [[]]
    cute, cutlass = _language()
    cute.make_rmem_tensor = lambda size, dtype: [None] * size
    cute.make_tensor = lambda pointer, size: pointer

    def copy(pair, pointer):
        written.update({int(pointer) + i: value for i, value in enumerate(pair)})
        banks[-1].append(int(pointer) % 32)

    cute.autovec_copy = copy
    for name, value in dict(cute=cute, cutlass=cutlass, Int32=int).items():
        monkeypatch.setattr(accumulate, name, value)
    config = Output(columns, True, False, 2)
    for j in range(columns // 32):
        written.clear()
        accesses = []
        for thread in range(128):
            warp, lane = thread // 32, thread % 32
            at = [
                (16 * warp + lane // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (lane % 4) + i % 2)
                for i in range(columns // 2)
            ]
            banks[-1] = []
            store = SimpleNamespace(config=config, thread=thread)
            store._words = lambda buffer, at: Pointer(at)
            WRITE(store, at, j, 0)
            accesses.append(list(banks[-1]))
        wanted = {
            32 * m + ((n // 4) ^ (m % 8)) * 4 + n % 4: (m, 32 * j + n)
            for m in range(64)
            for n in range(32)
        }
        assert written == wanted
        for half in range(0, 128, 16):
            for access in zip(*accesses[half : half + 16], strict=True):
                assert len({bank for first in access for bank in (first, first + 1)}) == 32


@pytest.mark.parametrize("columns", [128, 192, 256])
@pytest.mark.parametrize("valid", [64, 70, 63, 20, 1])
@pytest.mark.parametrize("which", [D, V], ids=["d", "v"])
def test_gathered_rows_lie_as_tma_would_lay_them(which, valid, columns, monkeypatch):
    loop = Contraction(columns, 4, which)
    boxes, stage, base, start = loop.boxes[which], 3, 1 << 20, 1 << 40
    width, tile = loop.tile[which] + BOX, 1  # the last tile of columns is a single box wide
    random = np.random.default_rng(valid)
    sources = random.integers(0, 1000, 64)
    copied: dict[int, int | None] = {}
    cute, cutlass = _language()

    def ptx(code, read_only_args):
        assert code == "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};"
        to, from_, size = read_only_args
        assert to not in copied and size in (0, 16)
        copied[int(to)] = int(from_) if size else None

    cute.arch.inline_ptx = ptx
    cute.arch.shuffle_sync = lambda rows, lane: rows[lane]
    for name, value in dict(cute=cute, cutlass=cutlass, Int32=int, Int64=int).items():
        monkeypatch.setattr(contraction_loads, name, value)
    tensor = SimpleNamespace(
        shape=(width, 0), iterator=SimpleNamespace(toint=lambda: start), element_type=None
    )
    for warp in range(4):
        for lane in range(32):
            gather = SimpleNamespace(
                loop=loop, warp=warp, lane=lane, tensors=[tensor] * 2, bases=[base] * 2
            )
            GATHER(gather, which, stage, tile, sources[16 * warp : 16 * warp + 16], valid)
    wanted = {}
    for r in range(64):
        for box in range(boxes):
            for chunk in range(8):
                to = base + (stage * boxes + box) * 8192 + 128 * r + 16 * (chunk ^ r % 8)
                column = tile * loop.tile[which] + 64 * box + 8 * chunk
                there = r < valid and column < width
                wanted[to] = start + 2 * (sources[r] * width + column) if there else None
    assert copied == wanted


@pytest.mark.parametrize("columns", [128, 192, 256])
@pytest.mark.parametrize("rows", [1, 7, 32, 63])
def test_rows_after_the_last_are_cleared(rows, columns, monkeypatch):
    loop = Contraction(columns, 4)
    cleared: set[int] = set()
    arrived: list[int] = []
    waited: list[tuple[int, int]] = []
    cute, cutlass = _language(
        mbarrier_wait=lambda barrier, phase: waited.append((barrier, phase)),
        mbarrier_arrive=arrived.append,
        fence_proxy=lambda *_, **__: None,
        sync_warp=lambda: None,
        elect_one=nullcontext,
    )
    cute.make_rmem_tensor = lambda size, dtype: SimpleNamespace(fill=lambda value: None)
    cute.make_tensor = lambda pointer, size: pointer
    cute.recast_ptr = lambda pointer, dtype: pointer
    cute.autovec_copy = lambda zero, pointer: cleared.add(int(pointer))
    for name, value in dict(cute=cute, cutlass=cutlass, Int32=int).items():
        monkeypatch.setattr(contraction_loads, name, value)
    ring = SimpleNamespace(full=100, tma_done=200)
    bases = (Pointer(0), Pointer(1 << 20))
    for lane in range(32):
        cute.arch.lane_idx = lambda lane=lane: lane
        assert CLEAR(SimpleNamespace(loop=loop, ring=ring, bases=bases), 10, rows, 0b0100) == 0
    assert set(waited) == {(202, 1)} and set(arrived) == {102}
    assert cleared == {
        base + (2 * boxes + box) * 4096 + 64 * row + 8 * chunk
        for base, boxes in zip(bases, loop.boxes, strict=True)
        for box in range(boxes)
        for row in range(rows, 64)
        for chunk in range(8)
    }


@pytest.mark.parametrize("first", [0, 300, 513])
@pytest.mark.parametrize("experts", [1, 5, 64])
def test_slots_of_bias_gradients_are_their_own(experts, first, monkeypatch):
    kernel = SimpleNamespace(config=BiasGradConfig(behind=first > 0))
    cute, cutlass = _language()
    for name, value in dict(cute=cute, cutlass=cutlass, Int32=int).items():
        monkeypatch.setattr(bias_grad, name, value)
    random = np.random.default_rng(experts)
    for _ in range(50):
        counts = random.choice([0, 0, 1, 255, 256, 257, 3000], experts)
        offsets = [first, *(first + np.cumsum(counts)).tolist()]
        slots = offsets[-1] // CHUNK + experts
        chunks = []
        for slot in range(slots):
            row, end = FIND(kernel, offsets, experts, slot)
            if row < end:
                chunks.append((row, min(end, row + CHUNK), slot))
        wanted = [
            (row, min(end, row + CHUNK), begin // CHUNK + e + i)
            for e, (begin, end) in enumerate(itertools.pairwise(offsets))
            for i, row in enumerate(range(begin, end, CHUNK))
        ]
        assert chunks == wanted
