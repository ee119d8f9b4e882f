"""Kernel of `wgrad_pair` in FP8 on a Hopper GPU: exact integers, error, uneven experts."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")
if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from phalanx.kernels.expert_mlp.calls import ExpertRows
from phalanx.kernels.launch_options import LaunchOptions
from phalanx.kernels.sm90.wgrad.wgrad import wgrad_pair
from tests.kernels.sm90.fp8.test_fp8_wgrad_gpu import FORMATS, FP32, MODES, TILES, WgradProblem

pytestmark = pytest.mark.gpu

COUNTS = {
    "even": ([256] * 3, [128] * 3),
    "ragged": ([1, 130, 0, 333, 64, 127, 129, 0, 65], [70, 0, 0, 64, 1, 300, 63, 128, 257]),
    "the first has none": ([0, 0, 0], [100, 64, 1]),
    "the second has none": ([100, 64, 1], [0, 0, 0]),
    "other experts": ([0, 1000, 0, 0], [5, 0, 0, 500]),
}


def pair(counts: str, O: int, I: int, **options) -> list[WgradProblem]:  # noqa: E741
    return [WgradProblem(c, O, I, **options) for c in COUNTS[counts]]


def ours(both: list[WgradProblem], mode: str, **options) -> Tensor:
    dtype, add = MODES[mode]
    rows = [ExpertRows(*p.operands, p.ends_T) for p in both]
    start = both[0].start().to(dtype)
    out = start.clone() if add else torch.full_like(start, float("nan"))
    return wgrad_pair(*rows, out, accumulate=add, **options)


def exact(both: list[WgradProblem], mode: str) -> Tensor:
    first, second = both
    return first.exact(mode) + second.exact("fp32")


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("counts", COUNTS)
def test_integers_are_exact(counts, mode, tile):
    both = pair(counts, 192, 320, integers=True)
    made = ours(both, mode, tile=tile)
    assert torch.equal(made, exact(both, mode).to(FP32).to(made.dtype))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("O", "I", "parts"), [(5760, 2880, 2), (2048, 768, 1)])
def test_error_against_fp64(O, I, parts, name):  # noqa: E741
    both = pair("ragged", O, I, parts=parts, dtype=FORMATS[name])
    made, wanted = ours(both, "fp32").double(), exact(both, "fp32")
    assert (made - wanted).norm() <= 3e-4 * wanted.norm()


def test_bits_do_not_depend_on_who_computes():
    both = pair("ragged", 448, 704)
    first = ours(both, "fp32 +=")
    for margin in (8, 32, 131):
        assert torch.equal(ours(both, "fp32 +=", options=LaunchOptions(margin)), first)
