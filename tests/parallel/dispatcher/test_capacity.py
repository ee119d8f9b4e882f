"""The budget of expert rows: sizes, what overflows, and that a grown budget fits."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.parallel.dispatcher.base import BudgetPlanner, TokenChoices
from phalanx.parallel.dispatcher.capacity import Budget, Growth, block_factor
from tests.parallel.dispatcher.budgets import overflowed
from tests.support.distributed import run_distributed

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("factor", "tokens", "top_k", "ranks", "local", "rows"),
    [
        (1.0, 512, 4, 8, 4, 2048),
        (1.5, 512, 4, 8, 4, 3072),
        (1.01, 512, 4, 8, 4, 2176),  # 2068.5 in tiles of 128
        (8.0, 512, 4, 2, 4, 4096),  # worst case: 2 x 512 tokens, 4 experts each
        (8.0, 512, 4, 8, 1, 4096),  # worst case: one local expert takes a token once
        (1.5, 100, 3, 1, 8, 300),  # one rank: exactly its pairs
    ],
)
def test_rows(factor: float, tokens: int, top_k: int, ranks: int, local: int, rows: int) -> None:
    assert Budget(factor, CPU).rows(tokens, top_k, ranks, local) == rows


@pytest.mark.parametrize("factor", [0.99, 0.0, -1.0, math.nan, math.inf])
def test_a_factor_below_balance_names_the_override(factor: float) -> None:
    with pytest.raises(ValueError, match="parallel.capacity_factor"):
        Budget(factor, CPU)


def test_the_worst_layer_of_a_step_counts() -> None:
    budget = Budget(1.0, CPU)
    for needed in (10, 129, 128):
        budget.experts.observe(torch.tensor(needed, dtype=torch.int32), 128)
    assert overflowed(budget)
    assert budget.experts.peak == 129 / 128
    assert not overflowed(budget), "a read starts the next record"


def test_exactly_full_is_not_overflow_and_one_row_more_is() -> None:
    rows = 2**24  # a ratio in fp32 could not tell the two apart
    budget = Budget(1.0, CPU)
    budget.experts.observe(torch.tensor(rows, dtype=torch.int32), rows)
    assert not overflowed(budget)
    budget.experts.observe(torch.tensor(rows + 1, dtype=torch.int32), rows)
    assert overflowed(budget)


@pytest.mark.parametrize(
    ("tokens", "top_k", "ranks", "local"), [(30, 1, 8, 4), (100, 2, 4, 4), (4096, 8, 8, 32)]
)
@pytest.mark.parametrize("share", [0.02, 0.5, 1.0])
def test_a_grown_budget_fits_the_rerun(
    tokens: int, top_k: int, ranks: int, local: int, share: float
) -> None:
    """`share` places the need between the rows of a balanced budget and the worst case."""
    budget = Budget(1.0, CPU)
    worst = ranks * tokens * min(top_k, local)
    rows = budget.rows(tokens, top_k, ranks, local)
    needed = rows + max(1, math.floor(share * (worst - rows)))
    budget.experts.observe(torch.tensor(needed), rows)
    assert overflowed(budget)
    budget.grow()
    assert budget.reruns == 1
    assert needed <= budget.rows(tokens, top_k, ranks, local) <= worst


def test_grow_without_overflow_is_an_error() -> None:
    budget = Budget(1.5, CPU)
    budget.experts.observe(torch.tensor(64), 128)
    assert not overflowed(budget)
    with pytest.raises(RuntimeError, match="fitted"):
        budget.grow()
    assert budget.capacity_factor == 1.5 and budget.reruns == 0


def test_reset_forgets() -> None:
    budget = Budget(1.0, CPU)
    budget.experts.observe(torch.tensor(500), 128)
    budget.reset()
    assert not overflowed(budget)


def overflow_on_one_rank(rank: int) -> tuple[bool, int]:
    budget = Budget(1.0, CPU)
    rows = budget.rows(256, 2, dist.get_world_size(), 2)
    budget.experts.observe(torch.tensor(rows + 300 if dist.get_rank() == rank else 1), rows)
    found = overflowed(budget, dist.group.WORLD)
    if found:
        budget.grow()
    return found, budget.rows(256, 2, dist.get_world_size(), 2)


@pytest.mark.dist
@pytest.mark.parametrize("rank", [0, 1])
def test_overflow_of_one_rank_is_seen_and_sized_by_all(rank: int) -> None:
    results = run_distributed(overflow_on_one_rank, 2, rank)
    assert results[0] == results[1]
    assert results[0][0] and results[0][1] >= 512 + 300


@pytest.mark.parametrize(
    ("factor", "tokens", "share", "rows"),
    [
        (1.0, 64, 0.5, 32),
        (1.5, 64, 0.5, 40),  # 39.68 rounded up: 0.48 of the excess of expert rows
        (1.5, 10, 0.5, 7),  # 6.2 rounded up
        (1.5, 64, 0.9, 64),  # a token has one row at most
        (8.0, 0, 0.5, 0),
    ],
)
def test_rows_of_blocks(factor: float, tokens: int, share: float, rows: int) -> None:
    assert Budget(factor, CPU).block_rows(tokens, share) == rows


@pytest.mark.parametrize("experts", [False, True])
def test_blocks_and_experts_grow_each_by_its_need(experts: bool) -> None:
    budget = Budget(1.0, CPU)
    C, S = budget.block_rows(64, 0.5), budget.rows(64, 2, 8, 1)
    budget.blocks.observe(torch.tensor(48), C)
    budget.experts.observe(torch.tensor(S + S * experts), S)
    assert overflowed(budget)
    grown = budget.grow()
    assert [growth.between_nodes for growth in grown] == [False] * experts + [True]
    assert grown[-1] == Growth(pytest.approx(1.5), pytest.approx(1.65), True)
    assert budget.reruns == 1 and budget.block_rows(64, 0.5) == 53
    assert budget.capacity_factor == (2.2 if experts else 1.0)
    budget.blocks.observe(torch.tensor(53), 53)
    assert not overflowed(budget)


def test_the_event_of_a_rerun_names_what_avoids_it() -> None:
    assert Growth(1.5, 1.65, True).event("step 3") == (
        "blocks between nodes needed 1.50 x the balanced rows: step 3 was run again with 1.65 x "
        "(parallel.capacity_factor=2.35 avoids it)"
    )
    assert Growth(1.5, 1.65, False).event("step 3") == (
        "experts needed 1.50 x the balanced rows: step 3 was run again with capacity_factor 1.65"
    )
    assert block_factor(2.35) == pytest.approx(1.65, abs=0.005)


def test_rows_of_a_recomputation_are_not_counted_again() -> None:
    """It may run beside the forward pass of another micro-batch, whose record has begun."""
    budget = Budget(1.0, CPU)
    planner = BudgetPlanner(TokenChoices(2, 2), budget, "torch", ranks=2, first=0, local=4)
    idx_NK = torch.zeros(512, 2, dtype=torch.int32)
    idx_NK[:, 1] = 1
    prob_NK = torch.ones(512, 2)

    def grad(g: Tensor) -> Tensor:
        planner(idx_NK, prob_NK)
        return g

    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(grad)
    y.backward()
    assert budget.record()[0] == 0
    planner(idx_NK, prob_NK)
    assert budget.record()[0] == 2
