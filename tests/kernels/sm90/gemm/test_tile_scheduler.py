"""The scheduler's own code, run by a warp of 32 lanes in numpy: every tile once, counter back at 0.

A value that all lanes share is an int, another one an array; a branch on an array fails, as it
must not be taken by a part of the warp only.
"""

import random
from types import FunctionType, SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cutlass")

import itertools

from phalanx.kernels.sm90.gemm import tile_scheduler
from phalanx.kernels.sm90.gemm.tile_scheduler import Schedule, Scheduler, raster
from phalanx.kernels.sm90.jit.launch import persistent_ctas

LANES = np.arange(32)


def _plain(method):
    """A method as it is written; the first compilation of a kernel rewrites it for the device."""
    return FunctionType(method.__wrapped__.__code__, vars(tile_scheduler))


LOCATE, WINDOW = _plain(Scheduler.locate), _plain(Scheduler.window)


@pytest.fixture(autouse=True)
def _warp(monkeypatch):
    arch = SimpleNamespace(
        lane_idx=lambda: LANES,
        shuffle_sync=lambda value, lane: int(np.broadcast_to(value, 32)[lane]),
        shuffle_sync_up=lambda value, by: np.where(by <= LANES, np.roll(value, by), value),
        vote_ballot_sync=lambda pred: sum(1 << int(i) for i in LANES[pred]),
        popc=lambda bits: bits.bit_count(),
    )
    integers = SimpleNamespace(
        min=np.minimum, range_constexpr=range, select_=np.where, const_expr=bool
    )
    monkeypatch.setattr(tile_scheduler, "cute", SimpleNamespace(arch=arch))
    monkeypatch.setattr(tile_scheduler, "cutlass", integers)
    monkeypatch.setattr(tile_scheduler, "Int32", int)


def _scheduler(
    config: Schedule, offsets: list[int], column_tiles: int, bits: int | None = None
) -> SimpleNamespace:
    made = SimpleNamespace(
        slice_bits=bits,
        config=config,
        offsets=np.array(offsets),
        experts=len(offsets) - 1,
        column_tiles=column_tiles,
        _row_tiles=lambda begin, end: Scheduler._row_tiles(made, begin, end),
        window=lambda first: WINDOW(made, first),
        locate=lambda *args: LOCATE(made, *args),
    )
    return made


class _Cta:
    def __init__(self, scheduler: SimpleNamespace, first: int) -> None:
        self.scheduler, self.tile, self.state = scheduler, first, (0, 0, *scheduler.window(0))

    def record(self) -> tuple[int, ...]:
        *state, row, end, column, expert, tiles = self.scheduler.locate(self.tile, *self.state)
        self.state = state
        return int(row), int(end), int(column), int(expert), int(tiles)


@pytest.mark.parametrize("ctas", [1, 7, 66])
@pytest.mark.parametrize("experts", [1, 4, 32, 33, 200])
@pytest.mark.parametrize("skew", ["even", "random", "one", "none"])
def test_every_tile_is_claimed_once(experts, ctas, skew):
    rng = random.Random(experts * 100 + ctas)
    counts = {
        "even": [512] * experts,
        "random": [rng.choice([0, 1, 127, 128, 129, 256, 257, 900]) for _ in range(experts)],
        "one": [0] * (experts - 1) + [3000],
        "none": [0] * experts,
    }[skew]
    offsets = [0, *np.cumsum(counts).tolist()]
    config, column_tiles = Schedule(256, 9, band=3), 5
    scheduler = _scheduler(config, offsets, column_tiles)
    waiting, running = list(range(ctas)), {}
    seen, counter, zeroed = [], 0, []
    while waiting or running:
        if waiting and (not running or rng.random() < 0.2):  # some come late
            running[waiting.pop()] = _Cta(scheduler, counter)
            counter += 1
            continue
        c = rng.choice(sorted(running))
        row, end, column, expert, tiles = running[c].record()
        if expert < 0:
            if running[c].tile == tiles + ctas - 1:
                zeroed.append(counter)
            del running[c]
            continue
        assert offsets[expert] <= row < end == offsets[expert + 1]
        assert (row - offsets[expert]) % 256 == 0 and 0 <= column < column_tiles
        seen.append((expert, row, column))
        running[c].tile, counter = counter, counter + 1
    wanted = [
        (e, row, column)
        for e in range(experts)
        for row in range(offsets[e], offsets[e + 1], 256)
        for column in range(column_tiles)
    ]
    assert sorted(seen) == wanted
    assert counter == len(wanted) + ctas  # one past the end each, hence the last claim is known
    assert zeroed == [counter]


@pytest.mark.parametrize("bits", [0, 1, 4])
@pytest.mark.parametrize("columns", [1, 5, 20])
def test_slices_of_an_expert_follow_each_other(columns, bits):
    counts = [1, 0, 900, 128, 5000, 0]
    offsets = [0, *np.cumsum(counts).tolist()]
    config = Schedule(128, 9, sliced=True)
    cta = _Cta(_scheduler(config, offsets, columns, bits), 0)
    seen, sliced = [], []
    while (found := cta.record())[3] >= 0:
        row, end, column, which, _ = found
        expert, number = which >> bits, which % (1 << bits)
        tiles = -(-counts[expert] // 128)
        height = -(-tiles // (1 << bits))
        assert end == offsets[expert + 1]
        assert (row - offsets[expert]) // 128 // height == number
        seen.append((row, column))
        sliced.append(which)
        cta.tile += 1
    assert sliced == sorted(sliced)
    rows = [r for e in range(len(counts)) for r in range(offsets[e], offsets[e + 1], 128)]
    assert sorted(seen) == [(row, column) for row in rows for column in range(columns)]


@pytest.mark.parametrize("rows", [1, 2, 5, 16])
@pytest.mark.parametrize("columns", [1, 7, 8, 9, 28])
@pytest.mark.parametrize("band", [1, 8])
def test_raster_visits_every_tile_by_neighbours(rows, columns, band):
    visited = [raster(i, rows, columns, band, min) for i in range(rows * columns)]
    assert sorted(visited) == [(m, n) for m in range(rows) for n in range(columns)]
    for (m0, n0), (m1, n1) in itertools.pairwise(visited):
        assert abs(m1 - m0) <= 1 and abs(n1 - n0) <= band
    for (m0, n0), (m1, n1) in itertools.pairwise(visited):
        assert m0 == m1 or n1 // band == n0 // band  # a band starts in the row where one ended


def test_the_grid_leaves_the_margin_free():
    assert [persistent_ctas(132, m) for m in (0, 1, 8, 131, 200)] == [132, 131, 124, 1, 1]
    with pytest.raises(ValueError, match="sm_margin=-1"):
        persistent_ctas(132, -1)
