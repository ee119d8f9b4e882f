"""Routing as it leaves a rank and as it arrives at the others."""

import pytest
import torch

from phalanx.kernels.routing.plan import pack_routing, unpack_routing

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def test_sums_come_from_each_rank_with_an_expert_of_the_token() -> None:
    idx = torch.tensor([[0, 5], [2, -1], [-1, -1], [4, 4]], dtype=torch.int32)
    _, rows = pack_routing(idx, torch.zeros(4, 2), ranks=3, local=2)
    assert rows.tolist() == [[0, -1, 8], [-1, 5, -1], [-1, -1, -1], [-1, -1, 11]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("ranks", "local", "T", "K"), [(1, 1, 1, 1), (2, 3, 5, 3), (3, 64, 130, 8)]
)
def test_what_leaves_all_ranks_arrives(device: str, ranks: int, local: int, T: int, K: int) -> None:
    g = torch.Generator().manual_seed(T)
    idx = torch.randint(-1, ranks * local, (ranks, T, K), generator=g, dtype=torch.int32)
    prob = torch.rand(ranks, T, K, generator=g)
    prob[0, 0, 0] = float("nan")
    sides = []
    for of_TK, prob_TK in zip(idx.to(device), prob.to(device), strict=True):
        side, rows_TR = pack_routing(of_TK, prob_TK, ranks=ranks, local=local)
        sides.append(side)
        for t in range(T):
            owners = {int(e) // local for e in of_TK[t] if e >= 0}
            wanted = [r * T + t if r in owners else -1 for r in range(ranks)]
            assert rows_TR[t].tolist() == wanted
    blocks = torch.cat(sides)
    assert blocks.shape[1] % 4 == 0
    idx_NK, prob_NK = unpack_routing(blocks, T, K)
    assert torch.equal(idx_NK.cpu(), idx.flatten(0, 1))
    assert torch.equal(prob_NK.cpu().view(torch.int32), prob.flatten(0, 1).view(torch.int32))
