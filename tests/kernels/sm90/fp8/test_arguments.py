"""The GEMMs in FP8 refuse what they cannot do, and name it; a tile is chosen by columns."""

import pytest
import torch

pytest.importorskip("cutlass")

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.calls import Operand
from phalanx.kernels.quantize.blocks import Quantized, QuantizedColumns
from phalanx.kernels.quantize.quantize import row_bytes, unpack_rows
from phalanx.kernels.sm90.experts.fc1_act import fc1_act
from phalanx.kernels.sm90.experts.fc2_dgrad_dact import fc2_dgrad_dact
from phalanx.kernels.sm90.experts.grouped_gemm import grouped_gemm
from phalanx.kernels.sm90.experts.tile_choice import choose, require_tile
from phalanx.kernels.sm90.fp8.act import Fp8Act, Fp8ActGrad
from phalanx.kernels.sm90.fp8.mainloop import Fp8Mainloop
from phalanx.kernels.sm90.gemm import operands
from phalanx.kernels.sm90.gemm.mainloop import Mainloop
from phalanx.kernels.sm90.wgrad.wgrad import wgrad

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
    ("epilogue", "columns"),
    [
        (Fp8Act(Activation("swiglu")), 192),
        (Fp8Act(Activation("swiglu")), 128),
        (Fp8Act(Activation("squared_relu")), 192),
        (Fp8ActGrad(Activation("swiglu")), 192),
    ],
)
def test_tiles_without_whole_blocks_are_refused(epilogue, columns):
    with pytest.raises(ValueError, match=f"of {columns} columns has no whole blocks of 128"):
        epilogue.bytes(Fp8Mainloop(columns))
    assert epilogue.bytes(Fp8Mainloop(256)) > 0


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
        grouped_gemm(**{**ROWS, **change}, offsets=OFFSETS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w1_LHD": quantized(2, 192, 192, blocks=(2, 2, 2))}, "2 part.s. of N and 1 of K"),
        ({"w1_LHD": quantized(2, 384, 96, blocks=(2, 4, 1))}, "must be multiples of 64"),
        ({"w1_LHD": torch.zeros(2, 384, 192)}, "x in FP8, w1 in bf16: must be the same"),
        ({}, "w1 must be on a CUDA device, not on cpu"),
    ],
)
def test_arguments_of_fc1_act(change, message):
    with pytest.raises(ValueError, match=message):
        fc1_act(**{**FC1, **change}, offsets=OFFSETS)


@pytest.mark.parametrize(
    "data", [torch.zeros(8, 200, dtype=E4M3)[:, :192], torch.zeros(192, 8, dtype=E4M3).T]
)
def test_rows_that_lie_apart_begin_at_multiples_of_16_bytes(data):
    with pytest.raises(
        ValueError, match="x: rows must be .* contiguous and begin at multiples of 16"
    ):
        operands.rows("x", Quantized(data, torch.ones(8, 2)), (8, 192))


def test_rows_as_they_travel_can_be_read(monkeypatch):
    monkeypatch.setattr(operands, "check", lambda *arguments: None)
    packed = unpack_rows(torch.zeros(8, row_bytes(192), dtype=torch.uint8), 192, E4M3)
    assert operands.rows("x", packed, (8, 192)).pitch == row_bytes(192)
    assert operands.rows("x", ROWS["a"], (8, 192)).pitch == 192


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
        fc2_dgrad_dact(**{**given, **change}, h_SH=torch.zeros(8, 256), offsets=OFFSETS)


def columns(channels: int, tokens: int = 256) -> QuantizedColumns:
    data = torch.zeros(channels, tokens, dtype=E4M3)
    return QuantizedColumns(data, torch.ones(tokens // 128, -(-channels // 128)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d": Operand(torch.zeros(256, 192))}, "d is in bf16 and v is in fp8: must"),
        ({"d": Operand(columns(96))}, "d has 96 channels in 1 part.s., each of which must be"),
        ({"d": Operand(columns(192), parts=2)}, "d has 192 channels in 2 part.s., each of which"),
        ({"v": Operand(columns(128), parts=2)}, "v must be in one part, not 2"),
        ({"d": Operand(columns(192, 192))}, "d has 192 tokens: must be a multiple of 128"),
        ({"accumulate": True}, "accumulate: needs out_LOI"),
        ({"dtype": torch.float16}, "out .or dtype. must be torch.bfloat16 or torch.float32"),
        ({"tile": 100}, "columns=100"),
        ({}, "d must be on a CUDA device, not on cpu"),
    ],
)
def test_arguments_of_wgrad(change, message):
    given = {"d": Operand(columns(192)), "v": Operand(columns(128)), **change}
    with pytest.raises(ValueError, match=message):
        wgrad(**given, offsets=OFFSETS)


def test_the_tile_that_wastes_little_is_chosen():
    widths = (64, 192, 256, 2048, 2880, 5760, 7168)
    chosen = [choose("grouped_gemm", ROWS["a"], n, 192).columns for n in widths]
    assert chosen == [192, 192, 256, 256, 192, 256, 256]


def test_a_tile_is_for_one_format():
    e5m2 = Fp8Mainloop(256, rows_format="e5m2")
    for loop in (Mainloop(256), e5m2):
        with pytest.raises(ValueError, match="loop must be a tile for rows in e4m3"):
            require_tile(loop, ROWS["a"])
    with pytest.raises(ValueError, match="loop must be a tile for rows in bf16"):
        require_tile(e5m2, torch.zeros(8, 64, dtype=torch.bfloat16))
    require_tile(Fp8Mainloop(256), ROWS["a"])
