"""Rows and bytes that experts send, by link, against routing that is drawn at random."""

import itertools
import random
from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest

from phalanx.configs.load import load
from phalanx.configs.schema import Config
from phalanx.configs.tables.machines import MACHINES
from phalanx.configs.tables.transports import TRANSPORTS
from phalanx.moe.plan.cost.exchange import rows_traffic, shard_seconds
from phalanx.moe.plan.cost.step_time import network_seconds
from phalanx.moe.plan.cost.traffic import least_traffic, traffic
from phalanx.moe.plan.described import resolved
from phalanx.parallel.dispatcher.costs import Links
from tests.support.additions import COUNTING_TRANSPORTS

NODE = 8


def spread(*overrides: str, ranks: int, dispatch: str) -> Config:
    cfg = load([*overrides, "run.machine=h100"])
    cfg.parallel.expert, cfg.parallel.dispatch = ranks, dispatch
    return cfg


def tokens(cfg: Config, ranks: int, draws: int) -> list[tuple[int, set[int]]]:
    """Own rank and ranks of the experts of tokens."""
    e, r = cfg.model.moe, cfg.model.moe.router
    size, rng, drawn = e.experts // r.groups, random.Random(1), []
    for n in range(draws):
        groups = rng.sample(range(r.groups), r.group_topk)
        pool = list(itertools.chain(*(range(g * size, (g + 1) * size) for g in groups)))
        drawn.append((n % ranks, {x * ranks // e.experts for x in rng.sample(pool, e.top_k)}))
    return drawn


def by_node(own: int, ranks: set[int]) -> Links:
    """A token's rows if it goes once to each node, and from the same place there to the ranks."""
    hosts = {rank // NODE for rank in ranks}
    far = len(hosts - {own // NODE})
    near = sum(rank % NODE != own % NODE for rank in ranks)
    return Links(near, far)


MODELS = ["gpt_oss_20b", "qwen3_30b_a3b", "deepseek_v3"]
UNEVEN = ("model=deepseek_v3", "model.moe.experts=240", "model.moe.router.groups=6")
"""Ranks whose experts are parts of several groups."""


@mock.patch.dict(TRANSPORTS, COUNTING_TRANSPORTS)
@pytest.mark.parametrize(
    ("overrides", "ranks"),
    [
        (("model=gpt_oss_20b",), 8),
        (("model=qwen3_30b_a3b",), 4),
        *[(("model=deepseek_v3",), ranks) for ranks in (2, 8, 16, 64)],
        (UNEVEN, 16),
    ],
)
def test_ranks_and_nodes_of_a_token_are_those_of_random_routing(
    overrides: tuple[str, ...], ranks: int
) -> None:
    cfg = spread(*overrides, ranks=ranks, dispatch="broadcasts")
    t, drawn = traffic(cfg, ranks), tokens(cfg, ranks, 4000)
    rows = [by_node(own, hit) for own, hit in drawn]
    mean = sum(rows, Links(0, 0))
    assert t.ranks == pytest.approx(sum(len(hit) for _, hit in drawn) / 4000, rel=0.02)
    hosts = sum(len({rank // NODE for rank in hit}) for _, hit in drawn)
    assert t.nodes == pytest.approx(hosts / 4000, rel=0.02)
    assert t.dispatch == t.combine
    assert t.dispatch.far == pytest.approx(mean.far / 4000, rel=0.03)
    assert t.dispatch.near == pytest.approx(mean.near / 4000, rel=0.03)


@mock.patch.dict(TRANSPORTS, COUNTING_TRANSPORTS)
def test_published_layout_of_deepseek_v3_crosses_the_network_for_at_most_four_nodes() -> None:
    """Eight groups on eight nodes: four of them, less those that none of eight experts is in."""
    cfg = spread("model=deepseek_v3", ranks=64, dispatch="broadcasts")
    t = traffic(cfg, 64)
    assert 3.5 < t.nodes < 4 and t.dispatch.far == pytest.approx(t.nodes * 7 / 8)
    cfg.model.moe.router.groups = cfg.model.moe.router.group_topk = 1
    assert 5 < traffic(cfg, 64).nodes < 5.5


def test_exact_where_it_can_be_counted() -> None:
    """All choices of 2 of 6 experts from 2 of 3 groups, over ranks of two experts in two groups."""
    cfg = spread("model=tiny", ranks=3, dispatch="symm")
    e = cfg.model.moe
    e.experts, e.top_k, e.router.groups, e.router.group_topk = 6, 2, 3, 2
    cases: Counter[int] = Counter()
    for groups in itertools.combinations(range(3), 2):
        for chosen in itertools.combinations([2 * g + i for g in groups for i in (0, 1)], 2):
            cases[len({x // 2 for x in chosen})] += 1
    mean = sum(hit * n for hit, n in cases.items()) / cases.total()
    assert traffic(cfg, 3).ranks == pytest.approx(mean, rel=1e-12)
    e.router.groups, e.router.group_topk, cfg.parallel.expert = 2, 1, 3  # ranks 0 | 0, 1 | 1
    # Of experts 0, 1, 2 the pair 0, 1 is on one rank, and pairs with 2 are on two.
    assert traffic(cfg, 3).ranks == pytest.approx((1 + 2 + 2) / 3, rel=1e-12)


@pytest.mark.parametrize("model", MODELS)
def test_pushes_inside_a_node(model: str) -> None:
    cfg = spread(f"model={model}", ranks=8, dispatch="symm")
    t = traffic(cfg, 8)
    assert t.dispatch == Links(pytest.approx(t.ranks * 7 / 8), 0)
    row = 2 * cfg.model.hidden * t.dispatch.near
    assert (t.forward.total, t.backward.total) == pytest.approx((2 * row, 3 * row))
    cfg.parallel.save_x = "keep"
    assert traffic(cfg, 8).backward.total == pytest.approx(2 * row)


def test_published_bytes_of_a_token_without_groups() -> None:
    """66.4 kB a direction for DeepSeek-V3's shape over 8 ranks."""
    cfg = spread("model=deepseek_v3", ranks=8, dispatch="symm")
    cfg.model.moe.router.groups = cfg.model.moe.router.group_topk = 1
    assert traffic(cfg, 8).forward.total / 2 == pytest.approx(66.4e3, rel=2e-3)


def test_collectives_send_every_token_to_every_rank() -> None:
    """An all-gather, in which a row enters a node once, and an all-to-all on the way back."""
    cfg = spread("model=deepseek_v3", ranks=64, dispatch="alltoall")
    t = traffic(cfg, 64)
    assert (t.dispatch, t.combine) == (Links(64 - 8, 7), Links(7, 56))
    assert t.forward == t.backward == 2 * 7168 * Links(63, 63)
    cfg.parallel.expert = 8
    assert traffic(cfg, 8).dispatch == traffic(cfg, 8).combine == Links(7, 0)


@pytest.mark.parametrize(("hidden", "to"), [(7168, 7168 + 4 * 56), (2880, 2880 + 4 * 23 + 4)])
@pytest.mark.parametrize(("recompute", "again"), [("none", 0), ("moe", 1)])
def test_fp8_goes_to_the_experts_and_bf16_comes_back(
    recompute: str, again: int, hidden: int, to: int
) -> None:
    """Tokens and gradients there, tokens once more for the backward pass, sums back in bf16. Scales
    are filled up to 16 bytes."""
    cfg = spread("model=deepseek_v3", f"run.recompute={recompute}", ranks=8, dispatch="symm")
    cfg.precision.recipe, cfg.precision.dispatch = "fp8_block", "fp8"
    cfg.model.hidden = hidden
    t, fro = traffic(cfg, 8), 2 * hidden
    assert t.forward.near == pytest.approx((to + fro) * t.dispatch.near)
    assert t.backward.near == pytest.approx(
        t.forward.near + to * t.dispatch.near + again * t.forward.near
    )
    least = least_traffic(cfg, 8)
    assert least.forward == t.forward and least.backward.near <= t.backward.near


def test_the_baseline_sends_a_copy_for_each_expert() -> None:
    cfg = spread("model=deepseek_v3", "kernels=megatron", ranks=64, dispatch="alltoall")
    assert traffic(cfg, 64).dispatch == Links(pytest.approx(8 * 7 / 64), 7)


@mock.patch.dict(TRANSPORTS, COUNTING_TRANSPORTS)
@pytest.mark.parametrize("dispatch", ["symm", "alltoall", "broadcasts"])
@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("recompute", ["none", "moe"])
def test_no_transport_sends_less_than_the_least(dispatch: str, ranks: int, recompute: str) -> None:
    check_least(dispatch, ranks, recompute)


def check_least(dispatch: str, ranks: int, recompute: str) -> None:
    """Compare the rows of a transport with the fewest that any needs."""
    cfg = spread("model=deepseek_v3", f"run.recompute={recompute}", ranks=ranks, dispatch=dispatch)
    t, least = traffic(cfg, ranks), least_traffic(cfg, ranks)
    for sent, needed in ((t.forward, least.forward), (t.backward, least.backward)):
        assert sent.far >= needed.far * (1 - 1e-9) and sent.near >= needed.near * (1 - 1e-9)


@pytest.mark.parametrize(
    ("tensor", "node", "neighbours"), [(8, 8, 8), (32, 8, 8), (2, 3, 1), (4, 6, 2), (4, 7, 1)]
)
def test_tensor_ranks_of_several_hosts_exchange_over_the_network(
    tensor: int, node: int, neighbours: int
) -> None:
    """Groups lie one after the other, and all wait for the rank with fewest on its host."""
    groups = [range(first, first + tensor) for first in range(0, tensor * node, tensor)]
    hosts = [Counter(rank // node for rank in group) for group in groups]
    assert min(min(count.values()) for count in hosts) == neighbours
    cfg = load(["model=gpt_oss_20b", f"parallel.tensor={tensor}"])
    machine = replace(MACHINES["h100"], node_gpus=node)
    row = rows_traffic(load(["model=gpt_oss_20b", "parallel.tensor=2"]), MACHINES["h100"]).near
    sent = rows_traffic(cfg, machine)
    assert sent == Links(row * (neighbours - 1), row * (tensor - neighbours))
    seconds = sent.near / (machine.node_gbs * 1e9) + sent.far / (machine.network_gbs * 1e9)
    assert shard_seconds(cfg, machine).shared == pytest.approx(seconds)


def test_a_network_is_busy_with_rows_of_tensor_ranks() -> None:
    given = ["model=gpt_oss_20b", "parallel.tensor=8", "parallel.expert=8", "data.global_batch=64"]
    cfg, of_four = resolved(load(given), 64, 8), replace(MACHINES["h100"], node_gpus=4)
    near, far = (network_seconds(cfg, 64, machine) for machine in (MACHINES["h100"], of_four))
    tokens = 64 * cfg.data.sequence_length // 64 * cfg.model.layers  # of a rank, in all layers
    sent = tokens * rows_traffic(cfg, of_four).far
    assert far - near == pytest.approx(sent / (of_four.network_gbs * 1e9)) and near > 0
