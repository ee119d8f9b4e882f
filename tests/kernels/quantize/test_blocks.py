"""The definition of FP8 in blocks against Transformer Engine's rule, byte by byte."""

import itertools

import pytest
import torch
from torch import Tensor

from phalanx.kernels.quantize import blocks
from phalanx.kernels.quantize.blocks import (
    BLOCK,
    Quantized,
    QuantizedColumns,
    column_offsets,
    column_rows,
    dequantize_columns,
    dequantize_rows,
    dequantize_weights,
    quantize_columns,
    quantize_rows,
    quantize_weights,
)
from tests.kernels.quantize import problems
from tests.kernels.quantize.problems import BF16, COUNTS, FP32, WIDTHS, expert_rows, offsets_of
from tests.kernels.quantize.same import assert_same
from tests.kernels.quantize.transformer_engine import expected, numbers

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])


def check_rows(x: Tensor, dtype: torch.dtype = E4M3, parts: int = 1) -> Quantized:
    got, want = quantize_rows(x, parts, dtype), expected(x, (1, BLOCK), dtype, parts)
    assert got.data.dtype == dtype and got.scale.dtype == FP32
    assert_same(got.data, want.codes)
    assert_same(got.scale, want.scale)
    return got


@FORMATS
def test_numbers_of_the_formats(dtype: torch.dtype) -> None:
    """The codes that the rule below is written in are those of torch."""
    values = numbers(dtype)
    codes = torch.arange(len(values), dtype=torch.uint8)
    assert torch.equal(codes.view(dtype).double(), torch.from_numpy(values))
    assert values[-1] == torch.finfo(dtype).max


@FORMATS
def test_every_finite_bf16_alone(dtype: torch.dtype) -> None:
    """Each as the amax of its block, and as a block beside another number."""
    every = problems.patterns()
    check_rows(every[:, None], dtype)
    got = check_rows(torch.stack([every, torch.full_like(every, -0.0)], 1), dtype)
    assert bool((got.data[:, 1].view(torch.uint8) == 0x80).all())
    # In fp64, as the largest are rounded up to 2^128. The smallest are denormal in FP8 too.
    value, every = got.data.double()[:, 0] * got.scale[:, 0].double(), every.double()
    kept = (value - every).abs() <= every.abs() * 2.0**-3
    assert bool(kept[every.abs() >= 2.0**-130].all())


@FORMATS
@pytest.mark.parametrize("amax", [1.75 * 2.0**-126, 1.0, 448.0, 464.0, 1.75 * 2.0**120, 3.38e38])
def test_every_bf16_below_an_amax(amax: float, dtype: torch.dtype) -> None:
    check_rows(problems.below(amax), dtype)


@FORMATS
@pytest.mark.parametrize("kind", [BF16, FP32], ids=["bf16", "fp32"])
def test_scales_at_every_boundary(kind: torch.dtype, dtype: torch.dtype) -> None:
    amax = problems.boundaries(kind)
    got = check_rows(amax[:, None], dtype)
    check_rows(torch.stack([amax / 3, -amax], 1), dtype)
    # The largest power of two by which amax does not pass the largest number.
    top = torch.finfo(dtype).max
    amax, scale = amax.double(), got.scale[:, 0].double()
    assert bool((amax / scale <= top).all())
    grows = (amax > 0) & (scale > 2.0**-127)
    assert bool((amax / scale * 2 > top)[grows].all())


@FORMATS
def test_powers_of_two_are_exact(dtype: torch.dtype) -> None:
    """All exponents of both numbers, the denormal one too."""
    amax = torch.ldexp(torch.ones(277, dtype=torch.float64), torch.arange(-149, 128)).float()
    up, down = blocks.scales(amax, dtype)
    assert torch.equal(torch.frexp(up)[0], torch.full_like(up, 0.5))
    assert torch.equal(up.double() * down.double(), torch.ones(277, dtype=torch.float64))
    assert down.min() == 2.0**-127


@FORMATS
def test_zeros_nan_and_inf(dtype: torch.dtype) -> None:
    got = check_rows(problems.special(), dtype)
    assert got.scale[:, 0].isnan().tolist() == [False, False, False, True, True, False, False]
    assert got.scale[0] == got.scale[1] == got.scale[5] == got.scale[6] == 1
    assert got.data.view(torch.uint8)[1].unique().tolist() == [0x80]
    assert got.data.float().isnan().sum(1).tolist() == [0, 0, 1, 0, 1, 128, 1]
    assert dequantize_rows(got).isnan().sum(1).tolist() == [0, 0, 1, 128, 128, 128, 1]


@pytest.mark.parametrize("rows", [0, 1, 127, 128, 129])
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_of_any_size(width: str, rows: int) -> None:
    channels, parts = WIDTHS[width]
    x = problems.spread(rows, channels)
    got = check_rows(x, parts=parts)
    assert got.scale.shape == (rows, blocks.block_count(channels, parts))
    strided = torch.cat([x, x], 1)[:, :channels]
    assert_same(quantize_rows(strided, parts).data, got.data)
    back = dequantize_rows(got, parts)
    largest = x.float().abs().amax(1, keepdim=True) if rows else x.float()
    assert bool(((back - x.float()).abs() <= largest * 2.0**-4).all())
    again = quantize_rows(back, parts)
    assert torch.equal(dequantize_rows(again, parts), back)  # of other scales maybe, no other value


@pytest.mark.parametrize("kind", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("O", [1, 127, 128, 130, 258])
@pytest.mark.parametrize(("I", "parts"), [(1, 1), (128, 2), (200, 2)])
def test_weights(O: int, I: int, parts: int, kind: torch.dtype) -> None:  # noqa: E741
    O = O * parts if O % parts else O  # noqa: E741
    w = torch.stack([problems.spread(O, I, kind, seed=e) for e in range(3)])
    got = quantize_weights(w, parts)
    for e in range(3):
        # Parts of the rows: each is a matrix of its own.
        want = [expected(half, (BLOCK, BLOCK), E4M3) for half in w[e].chunk(parts)]
        assert_same(got.data_LOI[e], torch.cat([torch.from_numpy(part.codes) for part in want]))
        assert_same(got.scale[e], torch.cat([torch.from_numpy(part.scale) for part in want]))
    assert got.data_LIO.is_contiguous() and got.data_LIO.shape == (3, I, O)
    assert torch.equal(got.data_LIO.float(), got.data_LOI.float().transpose(1, 2))
    back = dequantize_weights(got.forward, parts)
    assert bool(((back - w.float()).abs() <= w.float().abs().amax() * 2.0**-4).all())


def check_columns(x: Tensor, counts: list[int], got: QuantizedColumns, parts: int) -> None:
    """Expert by expert, and zeros elsewhere."""
    dtype, channels = got.data_CT.dtype, x.shape[1]
    T = column_rows(len(x), len(counts))
    across = blocks.block_count(channels, parts)
    assert got.data_CT.shape == (channels, T) and got.data_CT.is_contiguous()
    assert got.scale.shape == (T // BLOCK, across)
    code, scale = torch.zeros(channels, T, dtype=torch.uint8), torch.ones(T // BLOCK, across)
    row = column = 0
    for count in counts:
        own = expected(x[row : row + count], (BLOCK, BLOCK), dtype, parts)
        code[:, column : column + count] = torch.from_numpy(own.codes).T
        scale[column // BLOCK :][: len(own.scale)] = torch.from_numpy(own.scale)
        row, column = row + count, column + -(-count // BLOCK) * BLOCK
    assert_same(got.data_CT, code)
    assert_same(got.scale, scale)


@pytest.mark.parametrize("counts", COUNTS)
def test_columns(counts: str) -> None:
    rows, offsets = COUNTS[counts], offsets_of(COUNTS[counts])
    for channels, parts, dtype in ((130, 1, E4M3), (400, 2, E4M3), (1, 1, E4M3), (130, 2, E5M2)):
        x = expert_rows(rows, channels)
        got = quantize_columns(x, offsets, parts, dtype)
        check_columns(x, rows, got, parts)
        back = dequantize_columns(got, offsets, len(x), parts)
        used = sum(rows)
        largest = x[:used].float().abs().amax() if used else 0.0
        assert back.shape == x.shape and not back[used:].any()
        relative = 2.0 ** -(4 if dtype == E4M3 else 3)
        assert bool(((back - x)[:used].abs() <= largest * relative).all())


def test_columns_of_special_numbers() -> None:
    """An infinity takes its block along, not those of its neighbours or of the next expert."""
    rows, counts = problems.special().repeat(1, 2), [3, 4]
    x = torch.cat([rows, torch.full((2, 256), problems.INF, dtype=BF16)])
    got = quantize_columns(x, offsets_of(counts))
    check_columns(x, counts, got, 1)
    assert not got.scale[0].isnan().any() and not got.scale[2:].isnan().any()
    # Channels 4 and 77 of the rows of the second expert have one; its block has both.
    assert got.scale[1].isnan().sum() == 2


def test_nothing_to_quantize() -> None:
    """No rows at all, and rows that no expert has."""
    for rows in (0, 3):
        x = torch.full((rows, 130), problems.NAN, dtype=BF16)
        check_columns(x, [0, 0], quantize_columns(x, offsets_of([0, 0])), 1)


def test_columns_are_enough_for_any_routing() -> None:
    """Whole blocks, and no more than the worst routing needs."""
    for S, L in itertools.product((0, 1, 2, 127, 128, 129, 255, 256, 1000), (1, 2, 3, 7)):
        T, worst = column_rows(S, L), 0
        assert T % BLOCK == 0
        # The most blocks: as many experts as there are rows have one more than a whole number.
        for started in range(min(S, L) + 1):
            counts = [1] * started + [0] * (L - started)
            if started:
                counts[0] += S - started
                worst = max(worst, int(column_offsets(offsets_of(counts))[-1]))
        assert worst <= T
        assert T - worst <= BLOCK * max(L - S, 0) + BLOCK - 1, (S, L, T, worst)


def test_column_offsets() -> None:
    counts = [0, 1, 127, 128, 129, 0]
    got = column_offsets(offsets_of(counts))
    assert got.dtype == torch.int32 and got.tolist() == [0, 0, 128, 256, 384, 640, 640]


def test_rows_and_columns_of_rows_have_the_same_values() -> None:
    """Powers of two: what is quantised again, in blocks of a like size, is not rounded again."""
    counts = COUNTS["edges"]
    g = torch.Generator().manual_seed(3)
    x = torch.randn(sum(counts), 256, generator=g).to(BF16)
    rows = dequantize_rows(quantize_rows(x))
    columns = quantize_columns(rows, offsets_of(counts))
    back = dequantize_columns(columns, offsets_of(counts), len(x))
    assert (back - rows).norm() <= 1e-3 * rows.norm()
    direct = quantize_columns(x, offsets_of(counts))
    straight = dequantize_columns(direct, offsets_of(counts), len(x))
    assert (back - straight).norm() <= 1e-3 * rows.norm()
