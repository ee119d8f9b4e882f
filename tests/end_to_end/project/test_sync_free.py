"""The helper that proves code sync-free must catch what is not."""

import pytest
import torch

from tests.support.sync_free import HostSync, sync_free


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.numpy(),
        lambda x: bool(x.sum() > 0),
        lambda x: int(x.sum()),
        lambda x: x.nonzero(),
        lambda x: torch.where(x > 0),
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
        lambda x: x.unique(),
        lambda x: torch.equal(x, x),
        lambda x: x.repeat_interleave(x.long()),
    ],
)
def test_host_reads_raise(read):
    x = torch.ones(4)
    with pytest.raises(HostSync), sync_free():
        read(x)


def test_mask_assignment_raises():
    x = torch.ones(4)
    with pytest.raises(HostSync), sync_free():
        x[x > 0] = torch.zeros(4)


def test_backward_is_watched():
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * grad.sum().item()

    y = Reads.apply(torch.ones(4, requires_grad=True)).sum()
    with pytest.raises(HostSync), sync_free():
        y.backward()


def test_device_code_passes():
    x = torch.arange(4.0, requires_grad=True)
    with sync_free():
        y = torch.where(x > 1, x.index_select(0, torch.tensor([3, 2, 1, 0])), 0.0)
        y.sum().backward()
    assert x.grad.tolist() == [1.0, 1.0, 0.0, 0.0]
