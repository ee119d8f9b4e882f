"""Rows added to rows of a table, against sums in fp64."""

import pytest
import torch
from torch import Tensor

from phalanx.kernels.elementwise.rows import index_add_, sort_keys
from tests.kernels.capture import check_replay
from tests.kernels.interpreter import interpret

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = [(7, 12, 5), (50, 3, 33), (4, 300, 20), (1, 1, 8), (2, 64, 3), (3, 0, 4), (1000, 600, 520)]


def given(V: int, T: int, D: int, device: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Indices that are often the same, and some that have no row."""
    g = torch.Generator().manual_seed(V + T)
    table, rows = torch.randn(V, D, generator=g), torch.randn(T, D, generator=g)
    index = (torch.rand(T, generator=g) ** 3 * (V + 2)).long() - 1
    index[2::7] += 1 << 32  # the lower half alone is a row
    return table.to(device, dtype), index.to(device), rows.to(device, torch.bfloat16)


def check(table: Tensor, index: Tensor, rows: Tensor) -> None:
    want = table.double()
    for i, row in zip(index.tolist(), rows.double(), strict=True):
        if 0 <= i < len(want):
            want[i] += row
    untouched = torch.ones(len(want), dtype=torch.bool, device=table.device)
    untouched[index[(index >= 0) & (index < len(want))]] = False
    before = table.clone()
    index_add_(table, index, rows)
    assert torch.equal(table[untouched], before[untouched])
    relative = 2**-8 if table.dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(table.double(), want, rtol=relative, atol=2e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("V", "T", "D"), SHAPES)
def test_adds_rows(V: int, T: int, D: int, dtype: torch.dtype, device: str) -> None:
    check(*given(V, T, D, device, dtype))


def test_keys_leave_the_indices_alone() -> None:
    index = torch.tensor([3, -1, 7, 6], dtype=torch.int32)
    assert sort_keys(index, 7).tolist() == [3, 7, 7, 6] and index.tolist() == [3, -1, 7, 6]


def test_shapes_that_do_not_fit() -> None:
    table, index, rows = given(7, 12, 5, "cpu", torch.float32)
    for wrong in ((table, index[:-1], rows), (table.t(), index, rows), (table, index, rows[:, 1:])):
        with pytest.raises(ValueError, match="contiguous"):
            index_add_(*wrong)


@pytest.mark.gpu
def test_the_same_bits_every_time_and_in_a_graph() -> None:
    table, index, rows = given(5000, 8192, 2048, "cuda", torch.float32)
    found = []
    for _ in range(3):
        out = table.clone()
        index_add_(out, index, rows)
        found.append(out)
    assert all(torch.equal(found[0], other) for other in found[1:])

    def step() -> list[Tensor]:
        out = table.clone()
        index_add_(out, index, rows)
        return [out]

    check_replay(step, index, index.flip(0))


def interpreted() -> None:
    from phalanx.kernels.elementwise.rows_triton import add_rows

    for V, T, D in SHAPES[:-1]:
        table, index, rows = given(V, T, D, "cpu", torch.float32)
        want = table.clone()
        index_add_(want, index, rows)
        key, order = torch.sort(sort_keys(index, V), stable=True)
        add_rows(table, key, order, rows.float())
        torch.testing.assert_close(table, want, rtol=1e-6, atol=2e-5)


def test_kernel_interpreted() -> None:
    interpret(__name__)
