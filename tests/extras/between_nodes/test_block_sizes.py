"""Sizes of blocks between eight nodes, by the code that plans them, against the documentation.

EP64 of DeepSeek-V3 on 8 nodes: the eight ranks of one rail, 8,192 tokens each. Popularities are
n ** -exponent in a random order of the experts, which all ranks share.
"""

import functools
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import group_limited_topk
from torch import Tensor

from phalanx.configs.schema import ParallelConfig
from phalanx.extras.between_nodes.rail_blocks import plan_blocks
from phalanx.parallel.dispatcher.capacity import Budget
from phalanx.parallel.dispatcher.costs import TopKSampling, most_owners, owner_probabilities

TABLE = Path(__file__).resolve().parents[3] / "docs/measured/kernels/rail_blocks.md"
TOKENS, HIDDEN, EXPERTS, TOP_K, NODES, LIMIT = 8192, 7168, 256, 8, 8, 4
NODE_EXPERTS = EXPERTS // NODES
WIRE = 50e9
CPU = torch.device("cpu")
EXPONENTS = (0.0, 0.3, 0.6, 1.0)


@functools.cache
def noise(source: int) -> Tensor:
    """Gumbel noise of the scores of a rank's tokens, fp32 [T, E]."""
    generator = torch.Generator().manual_seed(source)
    return -torch.log(-torch.log(torch.rand(TOKENS, EXPERTS, generator=generator)))


def chosen(exponent: float, limit: int, source: int) -> Tensor:
    """int32 [T, K] of a rank: experts by popularity, of the `limit` groups with the best two."""
    order = torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(0))
    scores = noise(source) - exponent * torch.log(order + 1.0)
    if limit == NODES:
        return scores.topk(TOP_K, dim=1).indices.int()
    positive = (0.1 * scores).exp()  # Megatron-Core puts zeros for experts of other groups
    _, idx_TK = group_limited_topk(positive, TOP_K, TOKENS, EXPERTS, NODES, limit)
    return idx_TK.int()


class Sizes(NamedTuple):
    """Rows of a token that cross to other nodes, on average over the ranks."""

    exact: float
    least: float
    """In blocks that are as large as the fullest."""
    run: list[float]
    """In blocks of a run: at first, and after a rerun if there is one."""


def sizes(exponent: float, limit: int) -> Sizes:
    probability = max(owner_probabilities(sampling(limit), [NODE_EXPERTS] * NODES))
    budget = Budget(ParallelConfig().capacity_factor, CPU)
    prob_TK = torch.ones(TOKENS, TOP_K)
    routings = [chosen(exponent, limit, source) for source in range(NODES)]
    planned = [
        plan_blocks(idx_TK, prob_TK, nodes=NODES, experts=NODE_EXPERTS, rows=TOKENS)
        for idx_TK in routings
    ]
    sent_MM = torch.stack([(blocks.row_TM >= 0).sum(0) for blocks in planned])
    exact = (sent_MM.sum() - sent_MM.diagonal().sum()).item() / (NODES * TOKENS)
    fullest, run = max(int(blocks.needed) for blocks in planned), []
    while not run or budget.exceeded(budget.record().tolist()):
        if run:
            budget.grow()
        rows = budget.block_rows(TOKENS, probability)
        run.append(rows)
        budget.blocks.observe(torch.tensor(fullest), rows)
    others = (NODES - 1) / TOKENS
    return Sizes(exact, others * fullest, [others * rows for rows in run])


def sampling(limit: int) -> TopKSampling:
    return (
        TopKSampling(EXPERTS, TOP_K, NODES, limit)
        if limit < NODES
        else TopKSampling(EXPERTS, TOP_K)
    )


@pytest.fixture(scope="module")
def computed() -> dict[tuple[int, float], Sizes]:
    return {(limit, e): sizes(e, limit) for limit in (NODES, LIMIT) for e in EXPONENTS}


def test_rows_over_the_network(computed: dict[tuple[int, float], Sizes]) -> None:
    """4.63 with uniform routing; 3.5 if all of four nodes are reached, of which few are not."""
    uniform = sum(owner_probabilities(sampling(NODES), [NODE_EXPERTS] * NODES)) * (1 - 1 / NODES)
    assert round(uniform, 2) == 4.63
    assert computed[NODES, 0.0].exact == pytest.approx(uniform, rel=0.003)
    assert most_owners(sampling(LIMIT), [NODE_EXPERTS] * NODES) == LIMIT
    bound = LIMIT * (1 - 1 / NODES)
    assert all(0.98 * bound < computed[LIMIT, e].exact <= 1.01 * bound for e in EXPONENTS)


def test_blocks_are_at_most_a_quarter_larger_than_their_rows(
    computed: dict[tuple[int, float], Sizes],
) -> None:
    """With Zipf's exponent at 0.6, static blocks and those of a run, which has no rerun."""
    skewed = computed[NODES, 0.6]
    (run,) = skewed.run
    assert skewed.least <= run <= 1.25 * skewed.exact
    assert run == pytest.approx(1.24 * computed[NODES, 0.0].exact, rel=0.003)
    assert all(max(s.run) <= NODES - 1 for s in computed.values())  # the rows of an all-gather


def line(limit: int, exponent: float, s: Sizes) -> str:
    """Row of the table."""
    name = f"Zipf {exponent:g}" if exponent else "uniform"
    nodes = "any" if limit == NODES else f"at most {limit}"
    ms = s.run[-1] * TOKENS * 2 * HIDDEN / WIRE * 1e3
    cells = (
        name,
        nodes,
        f"{s.exact:.2f}",
        f"{s.least:.2f}",
        f"{s.least / s.exact:.2f}",
        " then ".join(f"{rows:.2f}" for rows in s.run),
        f"{ms:.1f}",
    )
    return f"| {' | '.join(cells)} |"


def test_the_table_is_what_the_code_plans(computed: dict[tuple[int, float], Sizes]) -> None:
    lines = TABLE.read_text().splitlines()
    for (limit, exponent), found in computed.items():
        assert line(limit, exponent, found) in lines
