"""Rows multiplied in what an optimizer updates in their place: shards that begin and end anywhere,
master copies in two parts."""

import pytest
import torch
from torch import Tensor

from phalanx.kernels.elementwise.adam import merged, split_
from phalanx.parallel.megatron import updated
from phalanx.parallel.megatron.updated import Updated

SHARDS = [
    *[(0, 35), (0, 5), (5, 10), (3, 35), (3, 4), (3, 5), (3, 12), (10, 13), (4, 6)],
    *[(0, 30), (7, 32), (34, 35), (14, 14)],
]


@pytest.mark.parametrize("columns", [5, 1])
@pytest.mark.parametrize(("start", "stop"), SHARDS)
@pytest.mark.parametrize("split", [False, True], ids=["fp32", "bf16 and remainder"])
@pytest.mark.parametrize("at_a_time", [updated._SLICE, 11, 1])
def test_a_shard(
    columns: int,
    start: int,
    stop: int,
    split: bool,
    at_a_time: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(updated, "_SLICE", at_a_time)
    torch.manual_seed(start)
    shape = (7, columns) if columns > 1 else (35,)
    parameter = torch.randn(shape)
    factor_R = torch.rand(shape[0])
    factor_R[2] = 1
    whole = parameter * factor_R.view(-1, *(1,) * (parameter.dim() - 1))
    want = whole.flatten()[start:stop]
    main, remainder = parameter.flatten()[start:stop].clone(), None
    if split:
        main, remainder = parts(main)
    updated.rescale_(Updated(parameter, start, stop, main), factor_R, remainder)
    if remainder is not None:
        main = merged(main, remainder)
    assert torch.equal(main, want)


def parts(master: Tensor) -> tuple[Tensor, Tensor]:
    weight = torch.empty(master.shape, dtype=torch.bfloat16)
    remainder = torch.empty(master.shape, dtype=torch.int16)
    split_(master, weight, remainder)
    return weight, remainder


def test_a_factor_of_one_keeps_every_bit() -> None:
    bits = torch.randint(-(2**31), 2**31, (1 << 16,), dtype=torch.int64).int()
    master = bits.view(torch.float32)
    master = torch.where(master.isfinite() & (master.abs() < 1e38), master, -0.0)
    weight, remainder = parts(master)
    before = weight.clone(), remainder.clone()
    part = Updated(master.view(256, -1), 0, master.numel(), weight)
    updated.rescale_(part, torch.ones(256), remainder)
    assert torch.equal(weight.view(torch.int16), before[0].view(torch.int16))
    assert torch.equal(remainder, before[1])
