"""Replica memory: its layout, and accesses by address between ranks in one process."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.extras.replication import memory as replica_memory
from phalanx.extras.replication.kernels.rows import ReturnPlan
from phalanx.extras.replication.memory import (
    ReplicaLayout,
    ReplicaMemory,
    UnreducedMemory,
)
from phalanx.kernels.expert_mlp.mlp_spec import LAYERS, MLPWeights
from phalanx.kernels.sm90.exchange.peer_buffers import MAX_RANKS, MAX_WAVES, SEEN
from phalanx.parallel.dispatcher.exchange import SymmOptions
from tests.kernels.interpreter import interpret

R, L, G = 2, 3, 2
HELD = torch.tensor([[4, -1], [2, 0]], dtype=torch.int32)
"""Experts in slots: one of rank 1 on rank 0, and two of rank 0 on rank 1."""


@pytest.mark.parametrize("sizes", [(96, 40, 0, 0), (96, 40, 12, 8), (1, 1, 1, 1)])
@pytest.mark.parametrize("width", [2, 4])
def test_replicas_and_grads_lie_one_after_the_other(sizes: tuple[int, ...], width: int) -> None:
    layout = ReplicaLayout.of(sizes, width)
    begins = (*layout.weights, *layout.grads)
    lengths = [*(width * n for n in sizes), *(4 * n for n in sizes)]
    ends = [begin + length for begin, length in zip(begins, lengths, strict=True)]
    assert all(begin % 256 == 0 for begin in begins)
    assert all(end <= begin for end, begin in zip(ends[:-1], begins[1:], strict=True))
    assert ends[-1] <= layout.total


def weights(rank: int) -> MLPWeights:
    g = torch.Generator().manual_seed(rank)
    shapes = ((L, 24, 8), (L, 8, 16), (L, 24))
    return MLPWeights(*(torch.randn(s, generator=g).bfloat16() for s in shapes))


def on_one_process(make: Any) -> list[Any]:
    """Objects of every rank of a group from `make`, with all memory in this process."""
    memory: list[Tensor] = []

    def peers(group: Any, size: int) -> Any:
        if not memory:
            memory.extend(torch.zeros(size, dtype=torch.uint8) for _ in range(R))
        return SimpleNamespace(
            memory=memory[group.rank()], addresses=[m.data_ptr() for m in memory]
        )

    with (
        mock.patch.object(replica_memory, "PeerMemory", peers),
        mock.patch.object(dist, "barrier", return_value=None),
    ):
        return [make(SimpleNamespace(rank=lambda r=r: r, size=lambda: R)) for r in range(R)]


@pytest.mark.parametrize("slots", [1, 2, 8, 20])
def test_kernels_know_which_waves_they_wait_for(slots: int) -> None:
    pytest.importorskip("cutlass")
    own = weights(0)
    memory, other = on_one_process(lambda group: ReplicaMemory(group, slots, own, SymmOptions()))
    assert memory.ready is not None
    flags, epoch, report, _, ranks, experts = memory.ready.tolist()
    assert (
        flags == memory._weight_flags.flags_R[0]
        and other.ready[0] == memory._weight_flags.flags_R[1]
    )
    assert (
        epoch == memory._weight_flags.state[SEEN:].data_ptr()
        and report == memory._weight_flags.report.data_ptr()
    )
    assert (ranks & 0xFFFF, ranks >> 16) == (R, MAX_RANKS)
    waves = len(memory._begins_W) - 1
    assert (experts & 0xFFFF, experts >> 16) == (slots, waves) and 1 <= waves <= MAX_WAVES
    assert memory._begins_W[0] == 0 and memory._begins_W[-1] == slots


def test_exchanges_get_the_addresses_of_unreduced_rows() -> None:
    pytest.importorskip("cutlass")
    memories = on_one_process(lambda group: UnreducedMemory(group, 4, 8, 2))
    return_plan = ReturnPlan(*(torch.zeros(1, dtype=torch.int32) for _ in range(4)))
    sent = memories[1].sent(return_plan)
    assert sent.memory_R.tolist() == [m.rows_KTD.data_ptr() for m in memories]
    assert sent.pairs_S is return_plan.pairs_S and sent.inverse_NK is return_plan.inverse_NK


def replicas_and_grads() -> None:
    own = [weights(rank) for rank in range(R)]
    memories = on_one_process(
        lambda group: ReplicaMemory(group, G, own[group.rank()], SymmOptions(comm_sms=1))
    )
    for rank, memory in enumerate(memories):
        memory.send_weights(own[rank], HELD, LAYERS[rank % 2])
    for rank, memory in enumerate(memories):
        assert memory.weights.b2 is None and memory.grads.b2 is None
        for slot, expert in enumerate(HELD[rank].tolist()):
            for name in ("w1", "w2", "b1"):
                got, sent = getattr(memory.weights, name)[slot], getattr(own[expert // L], name)
                assert torch.equal(got, sent[expert % L] if expert >= 0 else torch.zeros_like(got))
                getattr(memory.grads, name)[slot].fill_(10 * rank + slot + 1)
    for layer in LAYERS:
        for memory in memories:
            memory.send_grads(layer)
    device = SimpleNamespace(multi_processor_count=2)
    with mock.patch.object(torch.cuda, "get_device_properties", return_value=device):
        grads = [torch.ones(w.shape) for w in own[0][:3]]
        # Slots 0 and 1 of rank 1: experts 2 and 0.
        memories[0].reduce_grads("fc1", grads[::2], HELD, overlapped=True)
        memories[0].reduce_grads("fc2", [grads[1], None], HELD, overlapped=False)
        for grad in grads:
            assert torch.equal(grad.flatten(1)[:, 0], torch.tensor([13.0, 1.0, 12.0]))
        grads = [torch.ones(w.shape) for w in own[1][:3]]
        memories[1].reduce_grads("fc1", grads[::2], HELD, overlapped=True)
        memories[1].reduce_grads("fc2", [None, None], HELD, overlapped=False)
        assert [float(g[1].mean()) for g in grads] == [2.0, 1.0, 2.0]
    assert memories[0].missing() == ""
    late = torch.tensor([2, 5, 4, 0])  # as a kernel that gives up reports
    with mock.patch.object(dist, "get_global_rank", lambda group, rank: 10 + rank):
        memories[0]._weight_flags.report.copy_(late)
        message = "rank 11 has not sent the weights of its experts for the 5th time, only the 4th"
        assert memories[0].missing() == message
        memories[1]._grad_flags.report.copy_(late)
        message = (
            "rank 11 has not sent the gradients of its replicas for the 5th time, only the 4th"
        )
        assert memories[1].missing() == message
    for memory in memories:
        memory.release()


def interpreted() -> None:
    replicas_and_grads()


def test_ranks_of_one_process_by_an_interpreter() -> None:
    interpret(__name__)
