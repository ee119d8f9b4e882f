"""Addresses of the scales of a thread of a GEMM in FP8, and of a loading warp's blocks of
channels."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass")

from phalanx.kernels.sm90.fp8 import mainloop, promotion, wgrad_mma
from phalanx.kernels.sm90.fp8.mainloop import Fp8Mainloop, Fp8Producer
from phalanx.kernels.sm90.fp8.promotion import Fp8MmaConsumer, Scales
from phalanx.kernels.sm90.fp8.wgrad_mma import Fp8WgradMma, VectorWgradMma
from tests.kernels.sm90.fp8.lanes import LANES, Warp, bind

ROWS_AT, WEIGHTS_AT = 1 << 40, 1 << 42
ROW_STRIDES = [(23, 1), (1, 4096)]
WEIGHT_STRIDES = [(10_000, 23, 1), (10_000, 1, 45)]
"""Strides of experts, blocks of N and blocks of K: as stored, and transposed."""


def _math(loop: Any, strides: tuple[int, int], of_weights: tuple[int, ...], **given: Any) -> Any:
    expert, n, k = of_weights
    blocks = given.pop("blocks")
    rows = SimpleNamespace(iterator=SimpleNamespace(toint=lambda: ROWS_AT), stride=strides)
    weights = SimpleNamespace(
        iterator=SimpleNamespace(toint=lambda: WEIGHTS_AT), stride=(n, k, expert), shape=(blocks,)
    )
    made = SimpleNamespace(loop=loop, of_rows=rows, of_weights=weights, zero=0, **given)
    bind(made, Fp8MmaConsumer, promotion, "_scales")
    return made


@pytest.fixture
def warp(monkeypatch) -> Warp:
    warp = Warp(0)
    warp.install(monkeypatch, promotion)
    monkeypatch.setattr(promotion, "Int64", lambda x: x)
    return warp


def _check_rows(found: Scales, picked: Any, strides: tuple[int, int]) -> None:
    assert found.row_step == 4 * strides[1]
    for half in range(2):
        want = [ROWS_AT + 4 * strides[0] * picked(lane // 4 + 8 * half) for lane in LANES]
        assert list(found.rows[half]) == want


@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("strides", ROW_STRIDES)
def test_scales_of_rows_are_those_of_the_expert(strides, gather, warp):
    """Rows past the expert's end have none: its last row stands in."""
    index = np.arange(5000)[::-1].copy()
    loop = SimpleNamespace(columns=256, gather=gather)
    given = dict(half=None, index=index, first=64 + 48, blocks=45)
    made = _math(loop, strides, WEIGHT_STRIDES[0], **given)
    for row, end in ((1000, 5000), (1000, 1115), (1000, 1113)):
        at = [min(row + 112 + r, end - 1) for r in range(16)]
        picked = (lambda r, at=at: index[at[r]]) if gather else (lambda r, at=at: at[r])
        _check_rows(made._scales(row, end, 2, 1), picked, strides)


@pytest.mark.parametrize("strides", WEIGHT_STRIDES)
@pytest.mark.parametrize("columns", [128, 192, 256])
def test_scales_of_columns_are_those_of_their_blocks(columns, strides, warp):
    """Scale of every 64 columns of a tile: the first block's, or by `aligned` the first's or
    second's."""
    N, L = 2880, 3
    blocks = -(-N // 128)
    loop = SimpleNamespace(columns=columns, gather=False)
    made = _math(loop, (23, 1), strides, half=None, index=None, first=0, blocks=blocks)
    for expert in range(L):
        for column in range(-(-N // columns)):
            found = made._scales(0, 128, column, expert)
            assert found.column_step == 4 * strides[2]
            low, high = (int(found.columns[i][0]) for i in (0, -1))
            for group in range(columns // 64):
                n = column * columns + 64 * group
                if n < N:
                    if columns == 192:
                        ours = (low, low if found.aligned else high, high)[group]
                    else:
                        ours = (low, high)[group // 2]
                    want = expert * strides[0] + n // 128 * strides[1]
                    assert ours == WEIGHTS_AT + 4 * want, (column, group)


def test_a_tile_with_a_gate_has_a_block_of_each_half(warp):
    F, expert = 2880, 2
    each = -(-F // 128)
    loop = SimpleNamespace(columns=256, gather=True)
    given = dict(half=each, index=np.arange(200), first=0, blocks=2 * each)
    made = _math(loop, (23, 1), WEIGHT_STRIDES[0], **given)
    for column in range(each):
        found = made._scales(0, 128, column, expert)
        for half in range(2):
            want = expert * 10_000 + (half * each + column) * 23
            assert (found.columns[half] == WEIGHTS_AT + 4 * want).all()


@pytest.mark.parametrize("columns", [128, 192, 256])
@pytest.mark.parametrize(("each", "parts"), [(2880, 2), (192, 2), (64, 2), (256, 2), (2880, 1)])
def test_a_weight_gradient_has_a_scale_for_64_channels(each, parts, columns, warp, monkeypatch):
    """Scales of either operand, also where a tile has channels of both parts."""
    warp.install(monkeypatch, wgrad_mma)
    monkeypatch.setattr(wgrad_mma, "Int64", lambda x: x)
    I, blocks = 960, 8  # noqa: E741
    of_d = SimpleNamespace(iterator=SimpleNamespace(toint=lambda: ROWS_AT), stride=(50, 1))
    of_v = SimpleNamespace(
        iterator=SimpleNamespace(toint=lambda: WEIGHTS_AT), stride=(1, 700), shape=(1, blocks)
    )
    loop = SimpleNamespace(columns=columns)
    made = SimpleNamespace(loop=loop, of_d=of_d, of_v=of_v, each=each, zero=0)
    bind(made, Fp8WgradMma, wgrad_mma, "_scales")
    for channel in range(0, each * parts, 64):
        for across in range(-(-I // columns)):
            found = made._scales(9, channel, across)
            part = channel // each
            block = part * -(-each // 128) + (channel - part * each) // 128
            assert len(found.rows) == 1 and (found.rows[0] == ROWS_AT + 4 * (9 * 50 + block)).all()
            assert (found.row_step, found.column_step) == (200, 4)
            low, high = (int(found.columns[i][0]) for i in (0, -1))
            for group in range(columns // 64):
                n = across * columns + 64 * group
                if n < I:
                    narrow = (low, low if found.aligned else high, high)
                    ours = narrow[group] if columns == 192 else (low, high)[group // 2]
                    assert ours == WEIGHTS_AT + 4 * (9 + 700 * (n // 128))


@pytest.mark.parametrize("across", [0, 1, 2])
def test_every_accumulator_has_the_scales_of_its_channels(across, warp, monkeypatch):
    """In `vector` blocks, of a last tile that is half there too: what is read lies in the row."""
    warp.install(monkeypatch, wgrad_mma)
    monkeypatch.setattr(wgrad_mma, "Int64", lambda x: x)
    I, stride, block, number = 320, 50, 9, 3  # noqa: E741
    arch = SimpleNamespace(make_warp_uniform=lambda x: x, thread_idx=lambda: (128 + 2 * 32,))
    monkeypatch.setattr(wgrad_mma, "cute", SimpleNamespace(arch=arch))
    prefetched: list[Any] = []
    pair = lambda at: (at, at + 4)  # noqa: E731
    ptx = SimpleNamespace(
        lane=wgrad_mma.ptx.lane, prefetch=prefetched.append, load_constant_pair=pair
    )
    monkeypatch.setattr(wgrad_mma, "ptx", ptx)
    monkeypatch.setattr(wgrad_mma, "Float32", lambda x: x)
    of_d = SimpleNamespace(iterator=SimpleNamespace(toint=lambda: ROWS_AT), stride=(stride, 7))
    of_v = SimpleNamespace(
        iterator=SimpleNamespace(toint=lambda: WEIGHTS_AT), stride=(I, 1), shape=(1, I)
    )
    read: dict[int, Any] = {}

    class Scale:
        """Scale of a row, which half; times that of a column, of an accumulator: noted for
        `read`."""

        def __init__(self, half: int, column: Any = None) -> None:
            self.half, self.column = half, column

        def __mul__(self, other: Any) -> Any:
            if self.column is None:
                return Scale(self.half, other)
            read[other] = self
            return 0

    made = SimpleNamespace(loop=Fp8Mainloop(128), of_d=of_d, of_v=of_v, each=64, zero=0)
    made.acc, made.temporary = [0] * 64, list(range(64))
    bind(made, VectorWgradMma, wgrad_mma, "_scales", "_load_columns", "_add")
    found = made._scales(block, 64, across)
    for half in range(2):
        channels = 64 + 2 * 16 + LANES // 4 + 8 * half
        assert (found.rows[half] == ROWS_AT + 4 * (stride * block + 7 * channels)).all()
    made._load_columns(found.columns, True)
    columns = np.minimum(128 * across + 8 * LANES, I - 8)
    assert (prefetched[0] == WEIGHTS_AT + 4 * (I * block + columns)).all()
    made._add(0, number, (Scale(0), Scale(1)), (), found)
    for i, scale in read.items():
        column = 128 * across + i // 4 * 8 + LANES % 4 * 2 + i % 2
        row = WEIGHTS_AT + 4 * I * (block + number)
        assert scale.half == i // 2 % 2
        assert ((row <= scale.column) & (scale.column < row + 4 * I)).all()
        if column.max() < I:
            assert (scale.column == row + 4 * column).all()
    assert sorted(read) == list(range(64))


@pytest.mark.parametrize(("each", "parts"), [(2880, 2), (2880, 1), (64, 2), (256, 2), (7168, 1)])
def test_blocks_start_anew_in_each_part(each, parts, monkeypatch):
    Warp(0).install(monkeypatch, mainloop)
    made = SimpleNamespace(mA=SimpleNamespace(shape=(10, each, parts)))
    bind(made, Fp8Producer, mainloop, "place")
    blocks = Fp8Mainloop.blocks(None, made.mA)
    found = [tuple(int(i) for i in made.place(k)) for k in range(blocks)]
    assert found == [(b, part) for part in range(parts) for b in range(-(-each // 128))]


@pytest.mark.parametrize("channels", [64, 128, 2880, 2944])
def test_gathered_rows_end_with_zeros(channels, monkeypatch):
    """16 bytes of a row by each of 8 threads, and nothing past its last channel."""
    warp, copied = Warp(0), []
    warp.install(monkeypatch, mainloop)
    copy = lambda to, source, size: copied.append((to, source, int(size)))  # noqa: E731
    monkeypatch.setattr(mainloop, "ptx", SimpleNamespace(cp_async_or_zero=copy))
    for thread in range(16):
        made = SimpleNamespace(mA=SimpleNamespace(shape=(10, channels, 1)), thread=thread)
        bind(made, Fp8Producer, mainloop, "copy")
        for k in range(-(-channels // 128)):
            made.copy(thread, 5 * channels + 16 * (thread % 8), k)
    for _, source, size in copied:
        assert size == (16 if source < 6 * channels else 0)
    assert sum(size for *_, size in copied) == 2 * channels
