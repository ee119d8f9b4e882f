"""Sums of blocks in their order, bit for bit."""

import pytest
import torch
from torch import Tensor

from phalanx.kernels.elementwise.sums import block_sum
from tests.kernels.interpreter import interpret

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def given(ranks: int, n: int, dtype: torch.dtype) -> Tensor:
    """Blocks of such different sizes that every order of summing them gives another sum."""
    g = torch.Generator().manual_seed(ranks)
    size = 2.0 ** torch.randint(-12, 13, (ranks, n), generator=g)
    return (torch.randn(ranks, n, generator=g) * size).to(dtype)


def in_order(blocks: Tensor) -> Tensor:
    """One number at a time, by Python."""
    sums = []
    for column in blocks.float().T.tolist():
        total = torch.tensor(column[0])
        for value in column[1:]:
            total = total + torch.tensor(value)
        sums.append(total)
    return torch.stack(sums).to(blocks.dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
def test_is_the_sum_in_order(ranks: int, dtype: torch.dtype, device: str) -> None:
    blocks = given(ranks, 500, dtype)
    got = block_sum(blocks.to(device))
    assert got.dtype == dtype and got.device.type == device
    assert torch.equal(got.cpu(), in_order(blocks))
    if ranks == 8 and dtype == torch.float32:
        assert not torch.equal(got.cpu(), in_order(blocks.flip(0)))  # the order shows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("count", [1, 2])
def test_addends_on_a_cpu_follow_in_their_dtype(ranks: int, count: int, dtype: torch.dtype) -> None:
    blocks, addends = given(ranks, 500, dtype), given(9, 500, dtype)[:count].unbind()
    want = in_order(blocks)
    for addend in addends:
        want = want + addend
    assert torch.equal(block_sum(blocks, addends), want)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("count", [1, 2])
def test_addends_on_a_gpu_are_rounded_with_the_sum(
    ranks: int, count: int, dtype: torch.dtype
) -> None:
    blocks, addends = given(ranks, 500, dtype), given(9, 500, dtype)[:count]
    got = block_sum(blocks.cuda(), addends.cuda().unbind())
    assert torch.equal(got.cpu(), in_order(torch.cat([blocks, addends])))


@pytest.mark.parametrize("device", DEVICES)
def test_shapes(device: str) -> None:
    blocks = given(3, 7 * 1000, torch.float32).view(3, 7, 1000)
    assert torch.equal(block_sum(blocks.to(device)).cpu(), blocks[0] + blocks[1] + blocks[2])
    assert block_sum(torch.empty(4, 0, 64, device=device)).shape == (0, 64)


def interpreted() -> None:
    from phalanx.kernels.elementwise.sums_triton import add_up

    for ranks, n in ((1, 5), (3, 2048), (8, 4097)):
        blocks = given(ranks, n, torch.float32)
        assert torch.equal(add_up(blocks), block_sum(blocks))
        addends = given(9, n, torch.float32)[:2].unbind()
        for some in (addends[:1], addends):
            assert torch.equal(add_up(blocks, some), block_sum(blocks, some))


def test_the_kernel_by_an_interpreter() -> None:
    interpret(__name__)
