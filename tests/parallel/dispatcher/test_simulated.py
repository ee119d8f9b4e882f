"""All ranks in one process against the dense statement of test_dispatch, and against `alltoall`."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.parallel.dispatcher.base import TokenChoices
from phalanx.parallel.dispatcher.capacity import Budget
from tests.parallel.dispatcher.simulated import Simulated
from tests.parallel.dispatcher.test_base import (
    CPU,
    EXPERTS,
    HIDDEN,
    SLOTS,
    TOKENS,
    TOP_K,
    Case,
    Result,
    assert_near,
    dispatcher_of,
    experts,
    make_case,
    run_layer,
)
from tests.support.distributed import run_distributed

RANKS = (1, 2, 4, 8)
KINDS = ("even", "all experts", "one rank", "empty experts", "empty slots", "unequal", "no tokens")


def made(ranks: int, top_k: int = TOP_K, **options: Any) -> Simulated:
    slots = TokenChoices(top_k, top_k)
    return Simulated(ranks, experts=EXPERTS, slots=slots, budget=Budget(64.0, CPU), **options)


def drawn(kind: str, ranks: int, seed: int, dtype: torch.dtype) -> tuple[Case, list[int]]:
    """Tokens of all ranks after each other, and how many each has."""
    g = torch.Generator().manual_seed(seed)
    counts = [6] * ranks
    if kind == "unequal":
        counts = torch.randint(1, 9, (ranks,), generator=g).tolist()
    if kind == "no tokens":
        counts[seed % ranks] = 0 if ranks > 1 else 1
    tokens, local = sum(counts), EXPERTS // ranks
    scores = torch.rand(tokens, EXPERTS, generator=g)
    top_k = EXPERTS if kind == "all experts" else TOP_K
    if kind == "one rank":
        top_k = min(TOP_K, local)
        scores[:, EXPERTS - local :] += 1
    if kind == "empty experts":
        scores[:, 1::2] -= 1
    idx = scores.topk(top_k, dim=1).indices.to(torch.int32)
    prob = torch.rand(tokens, top_k, generator=g)
    if kind == "empty slots":
        idx[torch.rand(tokens, top_k, generator=g) < 0.4] = -1
    x, dout = (torch.randn(tokens, HIDDEN, generator=g).to(dtype) for _ in range(2))
    w = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=g).to(dtype)
    return Case(x, idx, prob, w, dout), counts


def layer(case: Case, counts: list[int], canary: float = 0.0) -> Result:
    """Rows of all ranks; `canary` fills rows that no rank reads, on both ways."""
    ranks = len(counts)
    simulated = made(ranks, case.idx_TK.shape[1], canary=canary)
    x, prob, w = (t.clone().requires_grad_() for t in (case.x_TD, case.prob_TK, case.w_EDD))
    shards = (t.split(counts) for t in (x, case.idx_TK, prob))
    received = simulated.dispatch(*shards)
    sums = [experts(r, part) for r, part in zip(received, w.chunk(ranks), strict=True)]
    unread = [(r.plan.inverse_NK < 0).all(1, keepdim=True) for r in received]
    sums = [part.masked_fill(rows, canary) for part, rows in zip(sums, unread, strict=True)]
    outs = simulated.combine(sums, received)
    assert [len(out) for out in outs] == counts
    out = torch.cat(outs)
    out.backward(case.dout_TD)
    assert x.grad is not None and prob.grad is not None and w.grad is not None
    return Result(out.detach(), x.grad, prob.grad, w.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", RANKS)
def test_equals_the_dense_statement(ranks: int, kind: str, dtype: torch.dtype) -> None:
    for seed in range(3):
        case, counts = drawn(kind, ranks, seed, dtype)
        assert_near(layer(case, counts), case, f"seed {seed}")


@pytest.mark.parametrize("kind", ["unequal", "empty slots", "no tokens"])
@pytest.mark.parametrize("ranks", [2, 8])
def test_rows_that_nobody_sent_do_not_matter(ranks: int, kind: str) -> None:
    case, counts = drawn(kind, ranks, 1, torch.bfloat16)
    results = [layer(case, counts, canary) for canary in (0.0, 0.0, 1e4)]
    for again in results[1:]:
        assert all(map(torch.equal, results[0], again))


@pytest.mark.parametrize("ranks", RANKS)
def test_a_token_comes_once_to_each_rank_that_wants_it(ranks: int) -> None:
    case, counts = drawn("unequal", ranks, 2, torch.float32)
    T, owner = max(counts), case.idx_TK // (EXPERTS // ranks)
    shards = (t.split(counts) for t in (case.x_TD, case.idx_TK, case.prob_TK))
    for rank, received in enumerate(made(ranks, canary=7.0).dispatch(*shards)):
        expected = torch.full((ranks, T, HIDDEN), 7.0)
        blocks = zip(case.x_TD.split(counts), (owner == rank).any(1).split(counts), strict=True)
        for r, (x, here) in enumerate(blocks):
            expected[r, : len(x)][here] = x[here]
        assert torch.equal(received.rows_ND, expected.flatten(0, 1))


@pytest.mark.parametrize(
    ("dtype", "values", "total"),
    [
        (torch.float32, [1e8, 1.0, -1e8, 1.0], 1.0),  # from the other end, or in pairs, 0
        (torch.bfloat16, [1e8, 1.0, -1e8, 1.0], 1.0),
        (torch.bfloat16, [256.0, 1.0, 1.0, 1.0], 260.0),  # 259, rounded once; in bf16 it stays 256
    ],
)
def test_ranks_are_added_in_their_order_in_fp32(
    dtype: torch.dtype, values: list[float], total: float
) -> None:
    """On the way back, and in the gradient of a token that has gone to all ranks."""
    simulated = Simulated(4, experts=4, slots=TokenChoices(4, 4), budget=Budget(8.0, CPU))
    x = [torch.ones(1, 1, dtype=dtype, requires_grad=True) for _ in range(4)]
    idx, prob = [torch.arange(4, dtype=torch.int32)[None]] * 4, [torch.ones(1, 4)] * 4
    received = simulated.dispatch(x, idx, prob)
    outs = [torch.full((4, 1), value, dtype=dtype) for value in values]
    assert [out.item() for out in simulated.combine(outs, received)] == [total] * 4
    torch.autograd.backward([r.rows_ND for r in received], outs)
    assert [t.grad.item() for t in x if t.grad is not None] == [total] * 4


def rank_parts(cases: list[Case]) -> list[tuple[list[Tensor], Result]]:
    """Received plan and results of `alltoall` on this rank."""
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    given: dict[str, Any] = dict(experts=EXPERTS, slots=SLOTS, budget=Budget(64.0, CPU))
    dispatcher, parts = dispatcher_of("alltoall", group, **given), []
    for case in cases:
        shards = (t.chunk(ranks)[rank] for t in (case.x_TD, case.idx_TK, case.prob_TK))
        plan = dispatcher.dispatch(*shards).plan
        parts.append(([t for t in plan if t is not None], run_layer(dispatcher, case, rank, ranks)))
    return parts


@pytest.mark.dist
def test_plans_and_results_are_those_of_collectives_bit_for_bit() -> None:
    """Results of integers, and of any numbers: the sum of two ranks has but one order."""
    ranks, counts = 2, [TOKENS // 2] * 2
    cases = [
        make_case(kind, dtype, integer=integer)
        for kind in ("unequal", "all to one rank")
        for dtype, integer in (
            (torch.float32, True),
            (torch.bfloat16, True),
            (torch.bfloat16, False),
        )
    ]
    for case, *parts in zip(cases, *run_distributed(rank_parts, ranks, cases), strict=True):
        shards = (t.split(counts) for t in (case.x_TD, case.idx_TK, case.prob_TK))
        for received, (plan, _) in zip(made(ranks).dispatch(*shards), parts, strict=True):
            ours = [t for t in received.plan if t is not None]
            assert len(ours) == len(plan) and all(map(torch.equal, ours, plan))
        theirs = Result(*map(torch.cat, zip(*(result for _, result in parts), strict=True)))
        assert all(map(torch.equal, layer(case, counts), theirs))


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match="8 experts do not divide over 3 ranks"):
        made(3)
    x, idx, prob = [torch.ones(2, 4)], [torch.zeros(2, 3, dtype=torch.int32)], [torch.ones(2, 3)]
    with pytest.raises(ValueError, match="lists of 1, 1, 1 for 2 ranks"):
        made(2).dispatch(x, idx, prob)
    with pytest.raises(ValueError, match="top_k=2"):
        made(1, 2).dispatch(x, idx, prob)
