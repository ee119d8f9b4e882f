"""Bytes and scales of Transformer Engine's Float8BlockQuantizer on a GPU, where it is installed."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformer_engine.pytorch")

from transformer_engine.pytorch.constants import TE_DType
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

from phalanx.kernels.quantize import quantize
from tests.kernels.quantize import problems
from tests.kernels.quantize.problems import BF16
from tests.kernels.quantize.same import assert_same

pytestmark = pytest.mark.gpu
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])


def theirs(x_RC: Tensor, dtype: torch.dtype, sides: int):
    """Quantised in blocks with one long side or two, rows and columns."""
    how = dict(rowwise=True, columnwise=True, force_pow_2_scales=True, block_scaling_dim=sides)
    quantizer = Float8BlockQuantizer(TE_DType[dtype], **how)
    made = quantizer.make_empty(x_RC.shape, dtype=x_RC.dtype, device=x_RC.device)
    return quantizer.update_quantized(x_RC, made)


def numbers(rows: int, channels: int) -> Tensor:
    """bf16: normal numbers and zeros in the order of their bits, again and again."""
    every = problems.patterns()
    every = every[(every.abs() >= 2.0**-126) | (every == 0)]
    return every.repeat(-(-rows * channels // len(every)))[: rows * channels].view(rows, channels)


@FORMATS
@pytest.mark.parametrize(("rows", "channels"), [(640, 1024), (304, 304), (256, 2880)])
def test_rows(rows: int, channels: int, dtype: torch.dtype) -> None:
    for x in (numbers(rows, channels), problems.spread(rows, channels, BF16)):
        x = x.cuda()
        want, got = theirs(x, dtype, 1), quantize.quantize_rows(x, dtype=dtype)
        assert_same(got.data, want._rowwise_data.view(dtype))
        assert_same(got.scale, want._rowwise_scale_inv[:, :rows].T.contiguous())


@pytest.mark.parametrize(("outs", "ins"), [(640, 1024), (304, 304), (2880, 256)])
def test_weights(outs: int, ins: int) -> None:
    for w in (numbers(outs, ins), problems.spread(outs, ins, BF16)):
        w = w.cuda()
        want, got = theirs(w, E4M3, 2), quantize.quantize_weights(w[None])
        assert_same(got.data_LOI[0], want._rowwise_data.view(E4M3))
        assert_same(got.data_LIO[0], want._columnwise_data.view(E4M3))
        across = got.scale.shape[2]
        assert_same(got.scale[0], want._rowwise_scale_inv[:, :across].contiguous())
