"""The definition of NVFP4 against Transformer Engine's reference, bit by bit."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from phalanx.extras.microscaling import nvfp4
from phalanx.kernels.quantize.blocks import column_offsets
from tests.extras.microscaling import formats
from tests.kernels.quantize import problems
from tests.kernels.quantize.problems import BF16, COUNTS, INF, NAN, WIDTHS, expert_rows, offsets_of
from tests.kernels.quantize.same import assert_same


def spans(offsets: Tensor) -> list[tuple[int, int]]:
    ends = offsets.tolist()
    return list(itertools.pairwise(ends))


def draws(x: np.ndarray) -> np.ndarray:
    key = formats.key(x)
    return np.array([formats.uniform(key, i) for i in range(x.size)]).reshape(x.shape)


def check(x: Tensor, counts: list[int], parts: int = 1, *, random: bool = False) -> nvfp4.NVFP4:
    offsets = offsets_of(counts)
    got = nvfp4.quantize_rows(x, offsets, parts, stochastic=random)
    tensors = np.split(x[: sum(counts)].float().numpy(), offsets[1:-1])
    amax = np.array([np.max(np.abs(mine), initial=0) for mine in tensors], np.float32)
    assert_same(got.amax, amax)
    drawn = np.concatenate([draws(mine) for mine in tensors]) if random else None
    want = formats.nvfp4(np.concatenate(tensors), np.repeat(amax, counts), parts, random=drawn)
    assert_same(got.code[: sum(counts)], want.codes)
    assert_same(got.scale[: sum(counts)].view(torch.uint8), want.scale)
    assert not got.code[offsets[-1] :].any()
    return got


def test_every_number_and_both_neighbours_of_every_middle() -> None:
    table = torch.from_numpy(formats.E2M1).float()
    middle = (table[1:] + table[:-1]) / 2
    size = torch.cat([table, middle, middle.nextafter(table[1:]), middle.nextafter(table[:-1])])
    x = torch.cat([size, -size])
    want = formats.with_sign(formats.nearest(x.abs().numpy(), formats.E2M1), x.numpy(), 4, 0)
    assert_same(nvfp4.e2m1(x), want)
    code = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(nvfp4.e2m1(nvfp4.e2m1_value(code)), code)
    assert nvfp4.e2m1(torch.tensor([NAN, INF, 7.0])).tolist() == [0, 7, 7]


def test_every_finite_bf16_as_the_largest_of_its_tensor() -> None:
    every = problems.patterns()
    every = every[every != 0]
    x = torch.stack([every, every / 3], 1).to(BF16)
    check(x, [1] * len(x))


@pytest.mark.parametrize("amax", [448.0, 6.0, 1.0, 2.0**-100, 2.0**-130, 3e38])
def test_every_finite_bf16_below_another(amax: float) -> None:
    x = problems.below(amax)
    check(x, [len(x)])


def test_special_numbers() -> None:
    """NaN and infinity spread to their whole tensor, and to no other tensor."""
    x = problems.special()
    got = check(x, [1] * len(x))
    values = nvfp4.values_of_rows(got) * nvfp4.tensor_scale(got.amax)[:, None]
    assert not values[:2].any()
    assert not values[2:6].isfinite().any() and not values[6].isfinite().any()


@pytest.mark.parametrize("random", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_rows_of_ragged_experts(counts: list[int], random: bool) -> None:
    check(expert_rows(counts, 40), counts, random=random)


@pytest.mark.parametrize(("channels", "parts"), WIDTHS.values(), ids=WIDTHS)
def test_widths(channels: int, parts: int) -> None:
    x = problems.spread(9, channels)
    got = check(x, [4, 5], parts)
    values = nvfp4.values_of_rows(got, parts)
    assert torch.equal(values, values.to(BF16).float())
    back = values * nvfp4.tensor_scale(got.amax).repeat_interleave(torch.tensor([4, 5]))[:, None]
    # Scales far below the largest are multiples of 2^-9.
    allowed = x.abs().amax(1, keepdim=True) / 5 + x.abs().max() * 6 * 2.0**-9 / nvfp4.TOP
    assert bool(((back - x).abs() <= allowed).all())


@pytest.mark.parametrize(("parts", "parts_in"), [(1, 1), (2, 1), (1, 2)])
def test_weights_and_their_transpose(parts: int, parts_in: int) -> None:
    w = problems.spread(2 * 48, 72).view(2, 48, 72)
    got = nvfp4.quantize_weights(w, parts, parts_in)
    for e in range(2):
        amax = np.full(48 // parts, w[e].float().abs().max().item(), np.float32)
        made = [
            formats.nvfp4(m.float().numpy(), amax, parts_in, square=True) for m in w[e].chunk(parts)
        ]
        assert_same(got.code[e], np.concatenate([m.codes for m in made]))
        scales = np.concatenate([m.scale[::16] for m in made])
        assert_same(got.scale[e].view(torch.uint8), scales)
    across = nvfp4.quantize_weights(w.mT, parts_in, parts)
    assert torch.equal(across.code, got.code.mT) and torch.equal(across.amax, got.amax)
    values = nvfp4.values_of_weights(got, parts, parts_in)
    assert torch.equal(values, values.to(BF16).float())


@pytest.mark.parametrize("random", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("align", [16, 256])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_columns_of_ragged_experts(counts: list[int], align: int, random: bool) -> None:
    x, offsets = expert_rows(counts, 20), offsets_of(counts)
    x[: sum(counts)] = x[: sum(counts)].clamp(-100, 100).round()  # sums of 16 are exact
    got = nvfp4.quantize_columns(x, offsets, align, stochastic=random)
    starts = column_offsets(offsets, align).tolist()
    for e, (begin, end) in enumerate(spans(offsets)):
        mine = np.zeros((starts[e + 1] - starts[e], 20))
        mine[: end - begin] = x[begin:end].double().numpy()
        turned = rotation_of(mine).astype(np.float32)
        amax = np.max(np.abs(turned), initial=np.float32(0))
        assert_same(got.amax[e : e + 1], np.array([amax], np.float32))
        if begin == end:
            continue
        drawn = draws(turned).T if random else None
        want = formats.nvfp4(turned.T, np.full(20, amax), random=drawn)
        span = slice(starts[e], starts[e + 1])
        assert_same(got.code[:, span], want.codes)
        scale = got.scale[:, span.start // 16 : span.stop // 16]
        assert_same(scale.view(torch.uint8), want.scale)
    assert not got.code[:, starts[-1] :].any()


def rotation_of(x: np.ndarray) -> np.ndarray:
    """fp64 [T, C] -> exact, and rounded to bf16."""
    groups = x.reshape(-1, 16, x.shape[1])
    exact = torch.from_numpy((formats.rotation() @ groups).reshape(x.shape)) + 0.0
    return exact.to(BF16).double().numpy()


def test_rotation_is_the_matrix_and_cancels() -> None:
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, 24, generator=g).to(BF16) for _ in range(2))
    turned = nvfp4.rotate(a).double()
    exact = torch.from_numpy(formats.rotation() @ a.double().numpy().reshape(4, 16, 24)).flatten(
        0, 1
    )
    assert bool(((turned - exact).abs() <= exact.abs() * 2.0**-8).all())
    assert (turned != exact.to(BF16).double()).float().mean() < 1e-2
    product = nvfp4.rotate(a).double().T @ nvfp4.rotate(b).double()
    assert (product - a.double().T @ b.double()).norm() < 0.01 * product.norm()


def test_two_elements_share_a_byte() -> None:
    code = torch.randint(0, 16, (3, 7), dtype=torch.uint8)
    data = nvfp4.packed(code)
    assert data.shape == (3, 4) and data[0, 0] == code[0, 0] + 16 * code[0, 1]
    assert torch.equal(data & 15, code[:, ::2]) and torch.equal(data[:, :3] >> 4, code[:, 1::2])


def test_stochastic_rounding_is_right_in_the_mean_and_to_nearest_is_not() -> None:
    """One element of 1.1 in tensors that differ elsewhere."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(4000, 16, generator=g).clamp(-5, 5)
    x[:, 0], x[:, 1] = 6.0, 1.1
    x, offsets = x.to(BF16), torch.arange(4001, dtype=torch.int32)
    means = []
    for random in (True, False):
        q = nvfp4.quantize_rows(x, offsets, stochastic=random)
        values = nvfp4.e2m1_value(q.code[:, 1])  # with amax 6 the scales are 1 together
        assert set(values.tolist()) == ({1.0, 1.5} if random else {1.0})
        means.append(values.mean().item() - x[0, 1].item())
    assert abs(means[0]) < 4 * 0.25 / 4000**0.5 < abs(means[1])


def test_random_bits_depend_on_the_tensor_alone() -> None:
    x = expert_rows([7, 9], 24, padding=0)
    rows = nvfp4.quantize_rows(x, offsets_of([7, 9]), stochastic=True).code
    alone = nvfp4.quantize_rows(x[7:], offsets_of([9]), stochastic=True).code
    assert torch.equal(rows[7:], alone)
    other = x.clone()
    other[15, 23] += other[15, 23] / 64  # neither its expert's nor its block's largest
    again = nvfp4.quantize_rows(other, offsets_of([7, 9]), stochastic=True).code
    assert torch.equal(again[:7], rows[:7]) and not torch.equal(again[7:15], rows[7:15])


def test_random_numbers_are_uniform() -> None:
    element = nvfp4.elements(torch.arange(256, dtype=torch.int32), 256)
    u = nvfp4.uniform(torch.tensor(12345, dtype=torch.int32), element).double()
    assert u.min() >= 0 and u.max() < 1
    counts = torch.histc(u.float(), 64, 0, 1)
    assert ((counts - 1024) ** 2 / 1024).sum() < 120  # chi square of 63 degrees: mean 63, sd 11
    for shift in (1, 256):
        assert (
            abs(torch.corrcoef(torch.stack([u.flatten()[shift:], u.flatten()[:-shift]]))[0, 1])
            < 0.02
        )
