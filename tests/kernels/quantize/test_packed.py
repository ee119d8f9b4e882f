"""Rows in FP8 as bytes and back."""

import pytest
import torch

from phalanx.kernels.quantize import quantize as operation
from phalanx.kernels.quantize.blocks import Quantized, quantize_rows
from phalanx.kernels.quantize.quantize import quantize_packed, row_bytes, unpack_rows

E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("channels", [1, 128, 129, 2880, 7168])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_byte_comes_back(dtype, channels, rows):
    x = torch.randn(rows, channels)
    q, packed = quantize_rows(x, dtype=dtype), quantize_packed(x, dtype)
    assert packed.shape == (rows, row_bytes(channels)) and packed.shape[1] % 16 == 0
    back = unpack_rows(packed.clone(), channels, dtype)
    assert back.data.dtype == dtype
    assert torch.equal(back.data.view(torch.uint8), q.data.view(torch.uint8))
    assert torch.equal(back.scale, q.scale)


def test_bytes_of_deepseek_v3():
    assert row_bytes(7168) == 7168 + 4 * 56


def test_memory_that_does_not_fit():
    x, out = torch.randn(4, 256), Quantized(torch.empty(4, 256, dtype=E4M3), torch.empty(4, 2))
    assert operation.quantize_rows(x, out=out) is out
    with pytest.raises(ValueError, match="scales must be fp32"):
        operation.quantize_rows(x, out=out._replace(scale=torch.empty(4, 1)))
    with pytest.raises(ValueError, match="out must be torch.float8_e4m3fn"):
        operation.quantize_rows(x[:2], out=out)
    with pytest.raises(ValueError, match="out must be torch.float8_e5m2"):
        operation.quantize_rows(x, dtype=torch.float8_e5m2, out=out)
