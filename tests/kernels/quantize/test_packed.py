"""Rows in FP8 as bytes and back."""

import pytest
import torch

from phalanx.kernels.quantize.blocks import quantize_rows
from phalanx.kernels.quantize.packed import pack_rows, row_bytes, unpack_rows


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("channels", [1, 128, 129, 2880, 7168])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_byte_comes_back(dtype, channels, rows):
    q = quantize_rows(torch.randn(rows, channels), dtype=dtype)
    packed = pack_rows(q)
    assert packed.shape == (rows, row_bytes(channels)) and packed.shape[1] % 16 == 0
    back = unpack_rows(packed.clone(), channels, dtype)
    assert back.data.dtype == dtype
    assert torch.equal(back.data.view(torch.uint8), q.data.view(torch.uint8))
    assert torch.equal(back.scale, q.scale)


def test_bytes_of_deepseek_v3():
    assert row_bytes(7168) == 7168 + 4 * 56
