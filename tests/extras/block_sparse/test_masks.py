"""Choice of blocks, slices of matrices and masks against loops over blocks."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.extras.block_sparse.selection import choose
from phalanx.extras.block_sparse.slices import squares, zero_dead_
from tests.moe.cases import draw

B = 4


def statement(
    living: list[bool], weight: list[float], gradient: list[float], most: int, exchanged: float
) -> list[bool]:
    number = min(most, sum(living))
    grown = round(number * exchanged)
    places = range(len(living))
    by_weight = sorted(places, key=lambda i: (-weight[i], i))
    kept = by_weight[: number - grown]
    others = [i for i in by_weight if i not in kept]
    chosen = sorted(others, key=lambda i: -gradient[i])[:grown]  # sorted is stable
    return [i in kept or i in chosen for i in places]


@pytest.mark.parametrize("exchanged", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("most", [1, 5, 12, 16])
def test_choice_is_its_statement_and_exact_in_number(most: int, exchanged: float) -> None:
    living = draw(6, 16, seed=1) > -0.5
    living[0] = True
    weight = draw(6, 16, seed=2).square().masked_fill(~living, 0)
    gradient = draw(6, 16, seed=3).square()
    gradient[1] = 0  # an expert without tokens
    weight[2, 3:9], gradient[2, 3:9] = 0.5, 2.0  # equal scores
    weight[2] *= living[2]
    chosen = choose(living, weight, gradient, most=most, exchanged=exchanged)
    for i in range(6):
        rows = (t[i].tolist() for t in (living, weight, gradient))
        assert chosen[i].tolist() == statement(*rows, most=most, exchanged=exchanged)
    assert chosen.sum(1).tolist() == living.sum(1).clamp(max=most).tolist()
    assert (chosen[1] <= living[1]).all()  # nothing grows without a gradient


SLICES = [(0, 144), (0, 12), (3, 5), (3, 17), (7, 141), (12, 36), (30, 31), (25, 144), (11, 13)]


@pytest.mark.parametrize(("start", "stop"), SLICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16])
def test_slices_are_parts_of_matrices(start: int, stop: int, dtype: torch.dtype) -> None:
    rows, columns = 12, 12
    matrix = (draw(rows, columns, seed=4) * 100).to(dtype)
    dead = draw(rows, columns // B, seed=5) > 0
    masked = matrix.clone()
    masked[dead.repeat_interleave(B, 1)] = 0
    flat = matrix.flatten()[start:stop].clone()
    zero_dead_(flat, start, dead, B)
    assert torch.equal(flat, masked.flatten()[start:stop])
    if dtype.is_floating_point:
        inside = torch.zeros(rows * columns, dtype=torch.float64)
        inside[start:stop] = matrix.flatten()[start:stop].double()
        want = inside.view(rows, -1, B).square().sum(2)
        got = squares(matrix.flatten()[start:stop], start, rows, columns, B)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=0)


def test_dead_blocks_become_zeros_whatever_they_hold() -> None:
    flat = torch.tensor([float("nan"), -1.0, float("inf"), 1.0])
    zero_dead_(flat, 0, torch.tensor([[True, False]]), 2)
    assert torch.equal(flat[:2], torch.zeros(2)) and not flat[0].signbit()
    assert flat[2:].tolist() == [float("inf"), 1.0]


def experts(order: Any, halves: int) -> Any:
    local, hidden, width = 3, 128, 192
    return SimpleNamespace(
        w1=torch.nn.Parameter(draw(local, halves * width, hidden, seed=6)),
        w2=torch.nn.Parameter(draw(local, hidden, width, seed=7)),
        spec=SimpleNamespace(channel_order=order),
        expert_dp_group=None,
    )


def cudnn_order() -> Any:
    from pkgutil import resolve_name

    from phalanx.configs.tables.backends import expert_backend

    return resolve_name(expert_backend("cudnn").channel_order)()


def of_blocks(matrix_LRC: Tensor, living: Tensor, block: int) -> Tensor:
    """Squares of blocks of matrices in the order of checkpoints, by a loop."""
    width = living.shape[1] * block
    parts_LHRC = matrix_LRC.double().unflatten(1, (-1, width))
    want = torch.zeros(living.shape, dtype=torch.float64)
    for e, i, j in living.nonzero_static(size=living.numel()).tolist():
        rows, columns = slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block)
        want[e, i, j] = parts_LHRC[e, :, rows, columns].square().sum()
    return want


@pytest.mark.parametrize("case", ["gated", "plain", "cudnn"])
def test_a_gate_and_its_half_share_a_mask_in_any_order_of_channels(case: str) -> None:
    from phalanx.extras.block_sparse.masks import BlockMasks

    order = cudnn_order() if case == "cudnn" else None
    own = experts(order, 1 if case == "plain" else 2)
    masks, told = BlockMasks(own, 64), []
    assert masks.living_fc1.shape == (3, 3, 2) and masks.living_fc2.shape == (3, 2, 3)
    canonical = own.w1.detach() if order is None else order.canonical(own.w1.detach(), 1)
    for matrix, whole in zip(masks.matrices(), (canonical, own.w2.detach()), strict=True):
        rows = matrix.weight.shape[:2].numel()
        square = squares(matrix.weight.detach().view(-1), 0, rows, matrix.weight.size(2), 64)
        want = of_blocks(whole, torch.ones_like(matrix.living), 64)
        torch.testing.assert_close(matrix.of_blocks(square).double(), want, rtol=1e-5, atol=0)

    masks.after_changes(told.append)
    masks.living_fc1.copy_(draw(3, 3, 2, seed=8) > 0)
    masks.living_fc2.copy_(draw(3, 2, 3, seed=9) > 0)
    before = canonical.clone(), own.w2.detach().clone()
    masks.changed()
    assert told == [masks]
    canonical = own.w1.detach() if order is None else order.canonical(own.w1.detach(), 1)
    for weight, old, living in (
        (canonical, before[0], masks.living_fc1),
        (own.w2.detach(), before[1], masks.living_fc2),
    ):
        lives = living.repeat_interleave(64, 1).repeat_interleave(64, 2)
        lives = lives.repeat(1, weight.size(1) // lives.size(1), 1)
        assert torch.equal(weight, old * lives)
