"""The order of own experts and of replicas out of that of all slots; its kernel, bit for bit."""

from pathlib import Path

import pytest
import torch

from phalanx.kernels.routing.plan import split_order, split_order_by_sort
from tests.kernels.interpreter import interpret

SIZES = [(6, 4), (6, 0), (6, 6), (1, 1), (33, 32), (40, 32), (300, 256)]


@pytest.mark.parametrize(("slots", "own"), SIZES)
def test_places_stay_in_their_order(slots: int, own: int) -> None:
    order = torch.randperm(slots).int()
    first, behind = split_order(order, own)
    assert first.tolist() == [p for p in order.tolist() if p < own]
    assert behind.tolist() == [p - own for p in order.tolist() if p >= own]
    assert first.dtype == behind.dtype == torch.int32


def test_the_kernel_in_the_interpreter() -> None:
    interpret(__name__)


def interpreted() -> None:
    from phalanx.kernels.routing.plan_triton import split_order_in_triton

    for slots, own in SIZES:
        order = torch.randperm(slots).int()
        pairs = zip(split_order_in_triton(order, own), split_order_by_sort(order, own), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), (slots, own)


@pytest.mark.parametrize(("slots", "own"), [(1, 1), (40, 32), (300, 256)])
def test_the_kernel_compiles_for_hopper(slots: int, own: int, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from phalanx.kernels.routing import plan_triton
    from tests.kernels.triton_code import launched

    order = torch.empty(slots, dtype=torch.int32, device="meta")

    def call() -> None:
        plan_triton.split_order_in_triton(order, own)

    code = launched(plan_triton, "split_order_kernel", call, tmp_path)
    assert code.stack == 0 and code.threads == 32


@pytest.mark.gpu
@pytest.mark.parametrize(("slots", "own"), SIZES)
def test_the_kernel_on_a_gpu(slots: int, own: int) -> None:
    order = torch.randperm(slots).int()
    got, want = split_order(order.cuda(), own), split_order_by_sort(order, own)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want, strict=True))
