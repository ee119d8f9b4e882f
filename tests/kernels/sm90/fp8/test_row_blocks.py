"""Rows to FP8 in an epilogue, by running a warp's own functions on the CPU, against the oracle."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from phalanx.kernels.quantize.blocks import quantize_rows, scales
from phalanx.kernels.sm90.fp8 import row_blocks
from phalanx.kernels.sm90.fp8.row_blocks import REGION, RowBytes, Values
from tests.kernels.sm90.fp8.lanes import LANES, Warp, bind, integers

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
BASE = 4096


@pytest.mark.parametrize("name", FORMATS)
def test_scales_of_every_amax_in_bf16(name, monkeypatch):
    Warp(0).install(monkeypatch, row_blocks)
    bits = np.arange(0x7F81, dtype=np.int64) << 16  # 0 to infinity
    amax = torch.from_numpy(bits.astype(np.int32)).view(torch.float32)
    up, down = (t.view(torch.int32) for t in scales(amax, FORMATS[name]))
    exponent = row_blocks.power(integers(bits), name)
    assert (row_blocks.scale_up(exponent) == up.numpy()).all()
    assert (row_blocks.scale_down(exponent, integers(bits)) == down.numpy()).all()


def _matrix() -> torch.Tensor:
    """16 rows of 128 channels: of every magnitude, zeros, subnormal, NaN, infinite."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(16, 128, generator=g) * torch.exp2(torch.randint(-90, 90, (16, 1), generator=g))
    x *= torch.exp2(torch.randint(-12, 1, (16, 128), generator=g).float())
    x[3], x[4, 5], x[5, 77], x[6, 127] = 0, float("nan"), float("inf"), -float("inf")
    x[7] = torch.randint(-3, 4, (128,), generator=g) * 2.0**-133
    x[8], x[9] = 1.75, 1.7578125
    x[10, 0], x[11] = 3.3895e38, -0.0
    return x.bfloat16()


def _values(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Values of the lanes of a warp, stored as an epilogue puts it."""
    made = SimpleNamespace(words=[None] * 32, amax=[np.zeros(32, np.uint32)] * 2)
    bind(made, Values, row_blocks, "put", "set", "count", "row_amax")
    bits = x.view(torch.int16).numpy().astype(np.uint32) & 0xFFFF
    for q in range(8):
        words = []
        for i in range(4):
            row, column = LANES // 4 + i % 2 * 8, 16 * q + i // 2 * 8 + LANES % 4 * 2
            words.append(bits[row, column] | (bits[row, column + 1] << np.uint32(16)))
        made.put(q, words)
    return made


def _row_bytes(name: str, scales: dict[int, Any]) -> Any:
    made = SimpleNamespace(name=name, base=BASE)
    bind(made, RowBytes, row_blocks, "write", "_start")

    def put(to: dict, half: int, value: np.ndarray, top: int, end: int, block: int) -> None:
        to[half] = value

    made._put_scale = put
    return made


@pytest.mark.parametrize("region", [0, 1])
@pytest.mark.parametrize("name", FORMATS)
def test_a_warp_makes_the_bytes_of_the_oracle(name, region, monkeypatch):
    warp, x, down = Warp(BASE + 2 * REGION), _matrix(), dict[int, Any]()
    warp.install(monkeypatch, row_blocks)
    _row_bytes(name, down).write(region, _values(x, monkeypatch), down, (0, 16, 0))
    want = quantize_rows(x, dtype=FORMATS[name])
    rows = warp.shared[BASE + region * REGION :][:REGION].reshape(16, 8, 16)
    chunk = np.arange(8)[None] ^ (np.arange(16) % 8)[:, None]  # swizzled by 128 bytes
    made = np.take_along_axis(rows, chunk[..., None], 1).reshape(16, 128)
    assert (made == want.data.view(torch.uint8).numpy()).all()
    for half in range(2):
        of_rows = want.scale[8 * half : 8 * half + 8, 0].numpy().repeat(4)
        assert (down[half].view(np.int32) == of_rows.view(np.int32)).all()
    assert np.isnan(down[0][4 * 5]) and np.isnan(down[0][4 * 6]) and down[0][4 * 3] == 1
