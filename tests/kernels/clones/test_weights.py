"""Weights to guest slots and gradients back: the kernels against the definitions."""

import pytest
import torch
from torch import Tensor

from phalanx.kernels.clones.weights import lend, take_back
from tests.kernels.interpreter import interpret

R, L, G = 4, 2, 3
SHAPE = (40, 24)
HELD = torch.tensor([[2, -1, -1], [0, 1, 7], [-1, -1, -1], [0, 3, 2]], dtype=torch.int32)
"""Experts in slots: expert 0 twice, of rank 0, and 2 twice, of rank 1; those of rank 2 nowhere."""


def drawn(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_guests_are_their_owners_experts(dtype: torch.dtype) -> None:
    own = [drawn(L, *SHAPE, seed=rank, dtype=dtype) for rank in range(R)]
    guests = [torch.full((G, *SHAPE), -1.0, dtype=dtype) for _ in range(R)]
    for rank in range(R):
        lend(own[rank], HELD, guests, rank)
    for held_G, got_G in zip(HELD.tolist(), guests, strict=True):
        for expert, got in zip(held_G, got_G, strict=True):
            want = torch.full(SHAPE, -1.0) if expert < 0 else own[expert // L][expert % L]
            assert torch.equal(got, want.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_are_added_in_the_order_of_ranks(dtype: torch.dtype) -> None:
    room = [drawn(G, *SHAPE, seed=rank, dtype=torch.float32) for rank in range(R)]
    for rank in range(R):
        got = drawn(L, *SHAPE, seed=9, dtype=dtype)
        want = got.clone()
        for held_G, grads_G in zip(HELD.tolist(), room, strict=True):
            for expert, grad in zip(held_G, grads_G, strict=True):
                if expert >= 0 and expert // L == rank:
                    want[expert % L] = (want[expert % L].float() + grad).to(dtype)
        take_back(got, HELD, room, rank)
        assert torch.equal(got, want)


def compared(device: str) -> None:
    """The kernels, and the definitions on the CPU; two programs for more pieces than these."""
    from phalanx.kernels.clones import weights_triton

    weights_triton._LENT, weights_triton._ADDED = 256, 256
    held = HELD.to(device)
    for dtype in (torch.bfloat16, torch.float32):
        guests = [torch.zeros(G, *SHAPE, dtype=dtype) for _ in range(R)]
        room = [drawn(G, *SHAPE, seed=rank, dtype=torch.float32) for rank in range(R)]
        there, rooms = ([m.to(device, copy=True) for m in ms] for ms in (guests, room))
        addresses = [torch.tensor([m.data_ptr() for m in ms]).to(device) for ms in (there, rooms)]
        for rank in range(R):
            own = drawn(L, *SHAPE, seed=rank, dtype=dtype)
            lend(own, HELD, guests, rank)
            weights_triton.lend(own.to(device), held, addresses[0], rank=rank, sms=2)
            added = own.to(device, copy=True)
            weights_triton.take_back(added, held, addresses[1], rank=rank, sms=2)
            take_back(own, HELD, room, rank)
            assert torch.equal(added.cpu(), own)
        for got, want in zip(there, guests, strict=True):
            assert torch.equal(got.cpu(), want)


def interpreted() -> None:
    compared("cpu")


def test_the_kernels_by_an_interpreter() -> None:
    interpret(__name__)


@pytest.mark.gpu
def test_the_kernels_on_a_gpu() -> None:
    compared("cuda")
