"""MXFP8 and NVFP4 and back by interpreted kernels: the bits of the definition."""

import pytest
import torch
from torch import Tensor

from phalanx.extras.microscaling import emulated
from tests.kernels.interpreter import interpret
from tests.kernels.quantize import problems
from tests.kernels.quantize.problems import BF16, COUNTS, expert_rows, offsets_of


def bits(x: Tensor) -> Tensor:
    """Every NaN the same."""
    return x.float().nan_to_num(nan=1e38, posinf=torch.inf, neginf=-torch.inf).view(torch.int32)


def same(got: tuple, want: emulated.Values, used: int | None = None) -> None:
    assert torch.equal(bits(got[0][:used]), bits(want.matrix[:used]))
    assert got[0].dtype == want.matrix.dtype
    assert (got[1] is None) == (want.amax_L is None)
    if got[1] is not None:
        assert torch.equal(bits(got[1]), bits(want.amax_L))


def check_rows(x: Tensor, counts: list[int], parts: int = 1) -> None:
    from phalanx.extras.microscaling import emulate_gpu

    offsets = offsets_of(counts)
    for form, random in (("mxfp8", False), ("nvfp4", False), ("nvfp4", True)):
        got = emulate_gpu.rows(x, offsets, form, parts, stochastic=random)
        same(got, emulated.rows(x, offsets, form, parts, stochastic=random), sum(counts))


def check_columns(x: Tensor, counts: list[int]) -> None:
    from phalanx.extras.microscaling import emulate_gpu

    offsets = offsets_of(counts)
    for form, random in (("mxfp8", False), ("nvfp4", False), ("nvfp4", True)):
        got = emulate_gpu.columns(x, offsets, form, stochastic=random)
        same(got, emulated.columns(x, offsets, form, stochastic=random))


def check_weights(w: Tensor, parts: int, parts_in: int) -> None:
    from phalanx.extras.microscaling import emulate_gpu

    for form in ("mxfp8", "nvfp4"):
        for given, of, inner in ((w, parts, parts_in), (w.mT, parts_in, parts)):
            made = emulate_gpu.weights(given, form, of, inner)
            assert made[0].stride() == given.stride()
            same(made, emulated.weights(given, form, of, inner))


def interpreted() -> None:
    torch.manual_seed(0)
    for counts in ([0, 1, 31, 0, 32, 33, 0], COUNTS["ones"], COUNTS["nobody"]):
        check_rows(expert_rows(counts, 20), counts)
        check_columns(expert_rows(counts, 20), counts)
    for channels, parts in ((1, 1), (96, 2), (129, 1), (2880, 2)):
        check_rows(problems.spread(5, channels), [2, 0, 3], parts)
    check_columns(problems.spread(40, 300), [17, 23])
    check_columns(problems.spread(5, 40).float(), [2, 3])
    small = problems.spread(5, 40).float()
    small[0, :3] = torch.tensor([2.0**-130, 3 * 2.0**-138, 0])
    small[0, 3:] = 0
    check_rows(small, [2, 3])
    check_rows(torch.zeros(0, 40, dtype=BF16), [0, 0])
    check_columns(torch.zeros(0, 40, dtype=BF16), [0, 0])
    special = problems.special()
    check_rows(special, [1, 1, 1, 4])
    check_columns(special, [1, 1, 1, 4])
    # Rows that differ as no sum of 16 in fp32 can hold, and the largest and smallest numbers.
    wide = problems.spread(20, 40) * torch.exp2(-torch.arange(20.0))[:, None].to(BF16)
    check_columns(wide, [20])
    for amax in (3e38, 448.0, 6.0, 2.0**-126, 2.0**-131):
        some = problems.below(amax)[::150]
        check_rows(some, [len(some)])
    every = problems.patterns()[::211, None]
    check_rows(torch.cat([every, every / 3], 1), [1] * len(every))
    for shape, parts, parts_in in (((2, 40, 72), 2, 1), ((1, 20, 300), 1, 2)):
        check_weights(problems.spread(shape[0] * shape[1], shape[2]).view(shape), parts, parts_in)


@pytest.mark.slow
def test_kernels_interpreted() -> None:
    pytest.importorskip("triton")
    interpret(__name__)
