"""The GEMMs in FP8 refuse what they cannot do, and name it; a tile is chosen by columns."""

import pytest
import torch

pytest.importorskip("cutlass")

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.quantize.blocks import Quantized, QuantizedColumns
from phalanx.kernels.quantize.packed import row_bytes, unpack_rows
from phalanx.kernels.sm90.fp8 import operands
from phalanx.kernels.sm90.fp8.fc1_act import fp8_fc1_act
from phalanx.kernels.sm90.fp8.fc2_dgrad_dact import fp8_fc2_dgrad_dact
from phalanx.kernels.sm90.fp8.grouped_gemm import fp8_grouped_gemm
from phalanx.kernels.sm90.fp8.mainloop import Fp8Mainloop
from phalanx.kernels.sm90.fp8.operands import row_pitch, rows_tile
from phalanx.kernels.sm90.fp8.wgrad import fp8_wgrad

OFFSETS = torch.tensor([0, 4, 8], dtype=torch.int32)
E4M3 = torch.float8_e4m3fn


def quantized(*shape: int, blocks: tuple[int, ...], dtype: torch.dtype = E4M3) -> Quantized:
    return Quantized(torch.zeros(shape, dtype=dtype), torch.ones(blocks))


ROWS = dict(
    a=quantized(8, 192, blocks=(8, 2)), w_LNK=quantized(2, 320, 192, blocks=(2, 3, 2)), parts=1
)
FC1 = dict(x=ROWS["a"], w1_LHD=quantized(2, 384, 192, blocks=(2, 4, 2)), act=Activation("swiglu"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(columns=100), "columns=100"),
        (dict(columns=128, pingpong=True), "FP8: no ping-pong"),
        (dict(columns=256, b_transposed=True), "B has its contraction contiguous"),
        (dict(columns=256, rows_format="e3m4"), "rows_format='e3m4': one of e4m3, e5m2"),
    ],
)
def test_impossible_tiles_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Fp8Mainloop(**options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w_LNK": quantized(2, 320, 96, blocks=(2, 3, 1))}, r"w is \[2, 320, 96\]: 1 part"),
        ({"w_LNK": quantized(320, 192, blocks=(3, 2))}, r"w must be \[L, N, K\], not empty"),
        ({"parts": 2}, r"w is \[2, 320, 192\]: 1 part\(s\) of N and 2 of K must be multiples"),
        ({"parts": 3}, "parts=3: must be 1 or 2"),
        ({"bias_LN": torch.zeros(2, 320)}, "bias and scale"),
        ({}, "w must be on a CUDA device, not on cpu"),
    ],
)
def test_arguments_of_rows(change, message):
    with pytest.raises(ValueError, match=message):
        fp8_grouped_gemm(**{**ROWS, **change}, offsets=OFFSETS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w1_LHD": quantized(2, 192, 192, blocks=(2, 2, 2))}, "2 part.s. of N and 1 of K"),
        ({"w1_LHD": quantized(2, 384, 96, blocks=(2, 4, 1))}, "must be multiples of 64"),
        ({}, "w1 must be on a CUDA device, not on cpu"),
    ],
)
def test_arguments_of_fc1_act(change, message):
    with pytest.raises(ValueError, match=message):
        fp8_fc1_act(**{**FC1, **change}, offsets=OFFSETS)


@pytest.mark.parametrize(
    "data", [torch.zeros(8, 200, dtype=E4M3)[:, :192], torch.zeros(192, 8, dtype=E4M3).T]
)
def test_rows_that_lie_apart_begin_at_multiples_of_16_bytes(data):
    with pytest.raises(ValueError, match="x: rows must be contiguous and begin at multiples of 16"):
        row_pitch(torch.device("cuda"), "x", Quantized(data, torch.ones(8, 2)))


def test_rows_as_they_travel_can_be_read(monkeypatch):
    monkeypatch.setattr(operands, "require", lambda device, **arguments: None)
    packed = unpack_rows(torch.zeros(8, row_bytes(192), dtype=torch.uint8), 192, E4M3)
    assert row_pitch(packed.data.device, "x", packed) == row_bytes(192)
    assert row_pitch(packed.data.device, "x", ROWS["a"]) == 192


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w2_LFD": quantized(2, 96, 192, blocks=(2, 1, 2))}, r"w2 is \[2, 96, 192\]"),
        ({"w2_LFD": quantized(192, 192, blocks=(2, 2))}, r"w2 must be \[L, N, K\]"),
        ({}, "w2 must be on a CUDA device, not on cpu"),
    ],
)
def test_arguments_of_fc2_dgrad_dact(change, message):
    given = dict(dy=ROWS["a"], w2_LFD=quantized(2, 128, 192, blocks=(2, 1, 2)), act=FC1["act"])
    with pytest.raises(ValueError, match=message):
        fp8_fc2_dgrad_dact(**{**given, **change}, h_SH=torch.zeros(8, 256), offsets=OFFSETS)


def columns(channels: int, tokens: int = 256, blocks: str = "square") -> QuantizedColumns:
    data = torch.zeros(channels, tokens, dtype=E4M3)
    return QuantizedColumns(data, torch.ones(tokens // 128, -(-channels // 128)), blocks)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d": columns(192, blocks="vector")}, "d is in vector blocks and v in square ones"),
        (
            {"d": columns(192, blocks="vector"), "v": columns(128, blocks="vector"), "tile": 256},
            "columns=256: 128 in `vector` blocks",
        ),
        ({"d": columns(96)}, "O=96 in 1 part.s., I=128, T=256, L=2"),
        ({"parts": 2}, "O=192 in 2 part.s., I=128, T=256, L=2: a part of O and I must be"),
        ({"d": columns(192, 192)}, "I=128, T=192, L=2: .* T one of 128"),
        ({"accumulate": True}, "accumulate: needs out_LOI"),
        ({"dtype": torch.float16}, "out .or dtype. must be torch.bfloat16 or torch.float32"),
        ({"tile": 100}, "columns=100"),
        ({}, "d must be on a CUDA device, not on cpu"),
    ],
)
def test_arguments_of_wgrad(change, message):
    given = {"d": columns(192), "v": columns(128), **change}
    with pytest.raises(ValueError, match=message):
        fp8_wgrad(**given, column_offsets=OFFSETS)


def test_the_tile_that_wastes_little_is_chosen():
    assert [rows_tile(n) for n in (64, 192, 256, 2048, 2880, 5760, 7168)] == [
        *(192, 192, 256, 256, 192, 256, 256)
    ]
