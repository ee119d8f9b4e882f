"""Weights to replica slots and gradients back: the kernels against the definitions."""

from collections.abc import Sequence
from itertools import product

import pytest
import torch
from torch import Tensor

from phalanx.extras.replication.kernels.weights import reduce_grads, send_weights
from phalanx.kernels.sm90.exchange.peer_buffers import (
    EPOCH,
    FINISHED_CTAS,
    MAX_RANKS,
    MAX_WAVES,
    SEEN,
    STATE,
    PeerBuffers,
    wave_begins,
)
from tests.kernels.interpreter import interpret

R, L, G = 4, 2, 3
SHAPE = (40, 24)
HELD = torch.tensor([[2, -1, -1], [0, 1, 7], [-1, -1, -1], [0, 3, 2]], dtype=torch.int32)
"""Experts in slots: expert 0 twice, of rank 0, and 2 twice, of rank 1; those of rank 2 nowhere."""


def drawn(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_replicas_are_their_owners_experts(dtype: torch.dtype) -> None:
    own = [drawn(L, *SHAPE, seed=rank, dtype=dtype) for rank in range(R)]
    replicas = [torch.full((G, *SHAPE), -1.0, dtype=dtype) for _ in range(R)]
    for rank in range(R):
        send_weights(own[rank], HELD, replicas, rank)
    for held_G, got_G in zip(HELD.tolist(), replicas, strict=True):
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
        reduce_grads(got, HELD, room, rank)
        assert torch.equal(got, want)


def compared(device: str) -> None:
    """The kernels, and the definitions on the CPU; two programs for more pieces than these."""
    from phalanx.extras.replication.kernels import weights_triton

    weights_triton._SENT, weights_triton._ADDED = 256, 256
    held = HELD.to(device)
    for dtype in (torch.bfloat16, torch.float32):
        give_and_take_all(held, dtype)
        for biases in (False, True):
            send_all(held, dtype, biases)


def addresses(memory: Sequence[Tensor]) -> Tensor:
    return torch.tensor([m.data_ptr() for m in memory])


def flags_of(device: torch.device) -> tuple[Tensor, list[PeerBuffers]]:
    """Memory of flags [R, parts, MAX_RANKS], and what every rank's kernels are given of it."""
    parts_RPR = torch.zeros(R, MAX_WAVES + 2, MAX_RANKS, dtype=torch.int32, device=device)
    where = addresses(parts_RPR.unbind()).to(device)
    states = torch.zeros(R, STATE, dtype=torch.int32, device=device)
    report = torch.zeros(4, dtype=torch.int32)
    report = report.pin_memory() if device.type == "cuda" else report
    of_ranks = enumerate(states)
    return parts_RPR, [PeerBuffers(*[where] * 3, state, report, r, 10_000) for r, state in of_ranks]


def give_and_take_all(held: Tensor, dtype: torch.dtype) -> None:
    """Gradients of both layers of all ranks, twice: sums and flags."""
    from phalanx.extras.replication.kernels import weights_triton

    device = held.device
    parts, flags = flags_of(device)
    for call in (1, 2):
        room = [drawn(G, *SHAPE, seed=10 * call + rank, dtype=torch.float32) for rank in range(R)]
        rooms = [m.to(device, copy=True) for m in room]
        where = addresses(rooms).to(device)
        for layer in (0, 1):
            for rank in range(R):
                weights_triton.send_grads(flags[rank], layer)
        for rank, layer in product(range(R), (0, 1)):
            own = drawn(L, *SHAPE, seed=rank, dtype=dtype)
            added = own.to(device, copy=True)
            weights_triton.reduce_grads(added, held, where, flags[rank], layer=layer, sms=2)
            reduce_grads(own, HELD, room, rank)
            assert torch.equal(added.cpu(), own)
        given = parts.cpu()
        assert (given[:, :2, :R] == call).all() and not given[..., R:].any()
        running = given[:, weights_triton.RUNNING, :R]
        assert torch.equal(running, call * torch.eye(R, dtype=torch.int32))
        for state in (f.state.cpu() for f in flags):
            assert state[EPOCH] == call and state[SEEN] == call
    assert not flags[0].report.any()


def send_all(held: Tensor, dtype: torch.dtype, biases: bool) -> None:
    """Two layers of all ranks, twice: weights of both shapes, and flags."""
    from phalanx.extras.replication.kernels import weights_triton

    device, shapes = held.device, (SHAPE, SHAPE[:1], SHAPE[::-1], SHAPE[1:])
    parts, flags = flags_of(device)
    waves = 2
    begins = torch.tensor(wave_begins(G, waves), dtype=torch.int32).to(device)
    given = [[torch.zeros(G, *s, dtype=dtype) for _ in range(R)] for s in shapes]
    there = [[m.to(device, copy=True) for m in ms] for ms in given]
    where = [addresses(ms).to(device) for ms in there]
    for call in (1, 2):
        for rank in range(R):
            own = [drawn(L, *s, seed=rank + call, dtype=dtype) for s in shapes]
            w1, b1, w2, b2 = (w.to(device) for w in own)
            layers = [(w1, b1, *where[:2]), (w2, b2, *where[2:])]
            if not biases:
                layers = [(w, None, *at) for w, _, *at in layers]
            weights_triton.send_weights(layers, held, begins, flags[rank], sms=2)
            for w, replicas in list(zip(own, given, strict=True))[:: 1 if biases else 2]:
                send_weights(w, HELD, replicas, rank)
        for got, want in zip(there, given, strict=True):
            assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want, strict=True))
        raised = parts.cpu()
        assert not raised[..., R:].any() and not raised[:, waves:MAX_WAVES].any()
        for part in (*range(waves), weights_triton.SECOND):
            assert (raised[:, part, :R] == call).all()
        running = raised[:, weights_triton.RUNNING, :R]
        assert torch.equal(running, call * torch.eye(R, dtype=torch.int32))
        for state in (f.state.cpu() for f in flags):
            assert state[EPOCH] == call and not state[FINISHED_CTAS:].any()


def interpreted() -> None:
    compared("cpu")


def test_the_kernels_by_an_interpreter() -> None:
    interpret(__name__)


@pytest.mark.gpu
def test_the_kernels_on_a_gpu() -> None:
    compared("cuda")
