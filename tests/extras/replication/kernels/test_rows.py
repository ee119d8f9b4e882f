"""Rows that travel by themselves: what they add up to, and the kernels against the definitions."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from phalanx.extras.replication.kernels.replication_plan import ReplicationSize, route_to_replicas
from phalanx.extras.replication.kernels.rows import (
    ExpertOwner,
    ReturnPlan,
    send_unreduced_rows,
    split_returns,
    sum_unreduced_rows,
)
from phalanx.kernels.routing.plan import make_plan
from tests.kernels.interpreter import interpret

T, D, E, K = 48, 24, 8, 3
KINDS = ("one hot expert", "one rank with all", "even", "nothing")


def routed(kind: str, ranks: int) -> Tensor:
    """int32 [R * T, K] of all ranks."""
    if kind == "even":
        return (torch.arange(ranks * T)[:, None] + torch.arange(K)).remainder(E).int()
    g = torch.Generator().manual_seed(ranks)
    scores = torch.rand(ranks * T, E, generator=g)
    scores[:, 5] += 0.8 * (kind == "one hot expert")
    scores[:, : E // 2] += 1.0 * (kind == "one rank with all")
    idx = scores.topk(K, dim=1).indices.int()
    none = torch.rand(idx.shape, generator=g) < (1.0 if kind == "nothing" else 0.1)
    return idx.masked_fill(none, -1)


class Ranks(NamedTuple):
    """A micro-batch on its way back from all ranks."""

    idx_NK: Tensor
    slot_NK: Tensor
    y_RSD: list[Tensor]
    """Expert rows of each rank."""
    partings: list[ReturnPlan]
    owners: list[ExpertOwner]
    y_NKD: Tensor
    """The same rows by pair, 0 of none."""


def made(kind: str, ranks: int, device: str = "cpu") -> Ranks:
    """With two replica slots a rank."""
    slots, local = 2, E // ranks
    local_slots, S = local + slots, ranks * T * K
    idx_NK = routed(kind, ranks).to(device)
    plan, slot_NK = route_to_replicas(idx_NK, E, ReplicationSize(ranks, slots, 1, 16))
    assert bool((plan.expert_RN >= 0).any()) == (kind not in ("even", "nothing"))
    g = torch.Generator().manual_seed(1)
    y_NKD = torch.randn(ranks * T, K, D, generator=g).bfloat16().to(device)
    y_NKD[idx_NK < 0] = 0
    y_RSD, partings, owners = [], [], []
    for rank in range(ranks):
        prob = torch.ones(slot_NK.shape, device=device)
        how = dict(first_expert=rank * local_slots, local_experts=local_slots, rows=S)
        inverse = make_plan(slot_NK, prob, **how).inverse_NK
        assert inverse is not None
        y_SD = torch.full((S + 1, D), float("nan"), dtype=torch.bfloat16, device=device)
        y_SD[torch.where(inverse >= 0, inverse, S).flatten().long()] = y_NKD.flatten(0, 1)
        owners.append(ExpertOwner(rank, local, local_slots))
        partings.append(split_returns(idx_NK, slot_NK, inverse, S, owners[-1]))
        y_RSD.append(y_SD[:S].contiguous())
    return Ranks(idx_NK, slot_NK, y_RSD, partings, owners, y_NKD)


def summed(y_NKD: Tensor, of_NK: Tensor) -> Tensor:
    """[N, D]: rows of a rank in the order of slots, rounded once."""
    total = torch.zeros_like(y_NKD[:, 0], dtype=torch.float32)
    for k in range(K):
        total += torch.where(of_NK[:, k, None], y_NKD[:, k].float(), 0.0)
    return total.bfloat16()


def pairs_of(return_plan: ReturnPlan) -> list[int]:
    return sorted(return_plan.pairs_S[: int(return_plan.count)].tolist())


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_every_token_gets_the_sums_of_home_ranks(kind: str, ranks: int) -> None:
    m = made(kind, ranks)
    memory = [torch.full((K, T, D), float("nan"), dtype=torch.bfloat16) for _ in range(ranks)]
    arrived = [torch.full((ranks * T, D), float("nan")).bfloat16() for _ in range(ranks)]
    for rank, (y_SD, return_plan) in enumerate(zip(m.y_RSD, m.partings, strict=True)):
        send_unreduced_rows(y_SD, return_plan, memory)
        rows_NKD = y_SD[return_plan.sums_NK.clamp(min=0).long()]
        sums_ND = summed(rows_NKD, return_plan.sums_NK >= 0)
        for n in (return_plan.sums_NK >= 0).any(1).nonzero().flatten().tolist():
            arrived[n // T][rank * T + n % T] = sums_ND[n]
    home_NK = torch.where(m.idx_NK >= 0, m.idx_NK // (E // ranks), -1)
    for rank, (got, home) in enumerate(zip(arrived, m.owners, strict=True)):
        here = slice(rank * T, (rank + 1) * T)
        sum_unreduced_rows(memory[rank], m.idx_NK[here], m.slot_NK[here], got, home)
        for h in range(ranks):
            of_TK = home_NK[here] == h
            want = summed(m.y_NKD[here], of_TK)[of_TK.any(1)]
            assert torch.equal(got[h * T : (h + 1) * T][of_TK.any(1)], want)


def test_without_replicas_nothing_travels_by_itself() -> None:
    for return_plan in made("even", 4).partings:
        assert int(return_plan.count) == 0
        assert torch.equal(return_plan.sums_NK, return_plan.inverse_NK)


def compared(device: str) -> None:
    """The kernels, and the definitions on the CPU."""
    from phalanx.extras.replication.kernels import rows_triton

    for ranks, kind in ((2, "one hot expert"), (4, "one rank with all"), (2, "even")):
        want, got = made(kind, ranks), made(kind, ranks, device)
        assert torch.equal(got.slot_NK.cpu(), want.slot_NK)
        memory = [torch.zeros(K, T, D, dtype=torch.bfloat16) for _ in range(ranks)]
        for rank, home in enumerate(got.owners):
            given = got.idx_NK, got.slot_NK, got.partings[rank].inverse_NK
            size = len(got.y_RSD[rank])
            return_plan = ReturnPlan(*rows_triton.split_returns(*given, size, home))
            assert torch.equal(return_plan.sums_NK.cpu(), want.partings[rank].sums_NK)
            assert pairs_of(return_plan) == pairs_of(want.partings[rank])
            send_unreduced_rows(want.y_RSD[rank], want.partings[rank], memory)
        sums = torch.randn(ranks * T, D).bfloat16()
        summed_there = sums.to(device, copy=True)
        rank, here = ranks - 1, slice((ranks - 1) * T, None)
        given = got.idx_NK[here].contiguous(), got.slot_NK[here].contiguous()
        rows_triton.sum_unreduced_rows(
            memory[rank].to(device), *given, summed_there, got.owners[rank]
        )
        of_rank = want.idx_NK[here], want.slot_NK[here]
        sum_unreduced_rows(memory[rank], *of_rank, sums, want.owners[rank])
        assert torch.equal(summed_there.cpu(), sums)


def interpreted() -> None:
    compared("cpu")


def test_the_kernels_by_an_interpreter() -> None:
    interpret(__name__)


@pytest.mark.gpu
def test_the_kernels_on_a_gpu() -> None:
    compared("cuda")
