"""The definition of MXFP8 against Transformer Engine's rule, byte by byte."""

import numpy as np
import pytest
import torch
from torch import Tensor

from phalanx.extras.microscaling import mxfp8
from phalanx.kernels.quantize.blocks import column_offsets
from tests.extras.microscaling import formats
from tests.kernels.quantize import problems
from tests.kernels.quantize.problems import BF16, COUNTS, INF, NAN, WIDTHS, expert_rows, offsets_of
from tests.kernels.quantize.same import assert_same


def check(x: Tensor, parts: int = 1) -> mxfp8.MXFP8:
    got, want = mxfp8.quantize(x, parts), formats.mxfp8(x.float().numpy(), parts)
    assert got.data.dtype == torch.float8_e4m3fn and got.scale.dtype == torch.uint8
    assert_same(got.data, want.codes)
    assert_same(got.scale, want.scale)
    return got


def test_scales_of_every_exponent_and_of_what_is_no_number() -> None:
    ends = torch.cat([problems.boundaries(torch.float32), problems.patterns().float().abs()])
    value = torch.cat([ends, torch.tensor([0.0, NAN, INF, torch.finfo(torch.float32).max])])
    got = mxfp8.e8m0(value)
    assert_same(got, formats.e8m0(value.numpy()))
    assert got[-4:].tolist() == [0, 0xFF, 0xFE, 0xFE]
    usual = value[: len(ends)][ends <= 2.0**127].double()
    power = mxfp8.power(got[: len(ends)][ends <= 2.0**127]).double()
    assert bool((power >= usual).all())
    assert bool(((power / 2 < usual) | (power == 2.0**-127)).all())


def test_every_finite_bf16_alone_and_beside_larger_ones() -> None:
    every = problems.patterns()
    check(every[:, None])
    for amax in (448.0, 1.0, 3.0, 2.0**-100, 2.0**-130, 3e38):
        check(problems.below(amax))


def test_special_numbers() -> None:
    got = check(problems.special())
    back = mxfp8.dequantize(got)
    assert back[3].isinf().sum() == 1 and back[2].isnan().sum() == 1 and back[5].isnan().all()
    assert not back[:2].any() and bool(back[1].signbit().all())


@pytest.mark.parametrize(("channels", "parts"), WIDTHS.values(), ids=WIDTHS)
def test_widths(channels: int, parts: int) -> None:
    x = problems.spread(9, channels)
    back = mxfp8.dequantize(check(x, parts), parts)
    assert bool(((back - x).abs() <= 2.0**-4 * x.abs().amax(1, keepdim=True)).all())


def test_weights_have_blocks_along_what_is_contracted() -> None:
    w = problems.spread(80, 70).view(2, 40, 70)
    for matrices in (w, w.mT):
        got = mxfp8.quantize(matrices, 2)
        want = [formats.mxfp8(m.float().numpy(), 2) for m in matrices]
        assert_same(got.data, np.stack([m.codes for m in want]))
        assert_same(got.scale, np.stack([m.scale for m in want]))
    assert not torch.equal(
        mxfp8.dequantize(mxfp8.quantize(w)), mxfp8.dequantize(mxfp8.quantize(w.mT)).mT
    )


@pytest.mark.parametrize("align", [32, 256])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_columns_of_ragged_experts(counts: list[int], align: int) -> None:
    x, offsets = expert_rows(counts, 20), offsets_of(counts)
    got, starts = mxfp8.quantize_columns(x, offsets, align), column_offsets(offsets, align).tolist()
    used = torch.zeros(got.data.shape[1], dtype=torch.bool)
    for e, (begin, end) in enumerate(zip(offsets.tolist(), offsets.tolist()[1:], strict=False)):
        if begin == end:
            continue
        want = formats.mxfp8(x[begin:end].T.float().numpy().copy())
        span = slice(starts[e], starts[e] + end - begin)
        used[span] = True
        assert_same(got.data[:, span], want.codes)
        assert_same(got.scale[:, starts[e] // 32 :][:, : want.scale.shape[1]], want.scale)
    assert not got.data[:, ~used].view(torch.uint8).any()
    assert got.data.shape[1] % align == 0 and starts[-1] <= got.data.shape[1]


def test_values_are_exact_in_bf16() -> None:
    back = mxfp8.dequantize(mxfp8.quantize(problems.spread(40, 160)))
    assert torch.equal(back, back.to(BF16).float())
