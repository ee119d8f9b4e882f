"""Rows over the network and memory of `hier`, in estimates."""

import pytest

from phalanx.moe.plan.cost.activations import Activations
from phalanx.moe.plan.cost.stages import exchange_bytes
from phalanx.moe.plan.cost.traffic import least_traffic, traffic
from phalanx.parallel.dispatcher.costs import Links
from tests.extras.planner.pages import PUBLISHED_V3
from tests.moe.plan.cost.test_stages import known
from tests.moe.plan.cost.test_traffic import NODE, by_node, check_least, spread, tokens

BLOCK = 1152
"""Rows between two nodes of DeepSeek-V3 over eight: 1.24 x 0.4536 of the 2,048 tokens of a rank."""


def test_rows_in_fp8_that_came_over_a_rail_are_sent_again_inside_a_node() -> None:
    """Under exchanges that overlap the experts and under others."""
    base = [*PUBLISHED_V3, "run.recompute=none"]
    fp8, bf16 = 7168 + 4 * 56, 2 * 7168
    for experts, overlap in (("torch", 0), ("fused", 0), ("fused", 16)):
        saved = {}
        for name, given in (("bf16", []), ("fp8", ["precision=fp8_block", "precision.dense=bf16"])):
            cfg = known([*base, f"kernels={experts}", *given], 1024)
            cfg.precision.dispatch, cfg.parallel.comm_sms = name, overlap
            saved[name] = Activations(cfg, 1024).moe_layer().saved
        assert cfg.parallel.dispatch == "hier"
        assert saved["fp8"] - saved["bf16"] == 8 * (fp8 - bf16) * BLOCK


def test_tokens_of_other_nodes_are_kept_once_a_node() -> None:
    """`hier` sends them again inside a node, where what is received may be kept as well."""
    base = [*PUBLISHED_V3, "run.recompute=none"]
    saved = {}
    for name in ("hier", "symm", "alltoall"):
        cfg = known(base, 1024)
        assert cfg.parallel.dispatch == "hier"
        cfg.parallel.dispatch = name
        saved[name] = Activations(cfg, 1024).moe_layer().saved
    row = 2 * 7168
    assert saved["hier"] - saved["symm"] == 8 * BLOCK * row
    assert saved["alltoall"] - saved["symm"] == 64 * 2048 * row
    keep = known([*base, "parallel.save_x=keep"], 1024)
    assert Activations(keep, 1024).moe_layer().saved - saved["symm"] == (64 + 8) * BLOCK * row
    assert exchange_bytes(keep, 1024) >= 3 * 64 * BLOCK * row


@pytest.mark.parametrize(
    ("groups", "ranks", "most"), [(8, 64, 4), (8, 32, 4), (8, 128, 8), (1, 64, 8), (1, 32, 4)]
)
def test_groups_that_are_whole_nodes_limit_the_nodes_of_a_token(
    groups: int, ranks: int, most: int
) -> None:
    cfg = spread("model=deepseek_v3", ranks=ranks, dispatch="hier")
    cfg.model.moe.router.groups, cfg.model.moe.router.group_topk = groups, min(4, groups)
    hosts = (len({rank // NODE for rank in hit}) for _, hit in tokens(cfg, ranks, 4000))
    assert traffic(cfg, ranks).most_nodes == most == max(hosts)


@pytest.mark.parametrize(("factor", "groups", "rows"), [(1.0, 8, 3.18), (1.0, 1, 4.63), (9, 1, 7)])
def test_blocks_cross_the_network_full_or_not(factor: float, groups: int, rows: float) -> None:
    """At the balanced load they are as many rows as tokens have other nodes; at most all tokens."""
    cfg = spread("model=deepseek_v3", ranks=64, dispatch="hier")
    cfg.model.moe.router.groups, cfg.model.moe.router.group_topk = groups, min(4, groups)
    cfg.parallel.capacity_factor = factor
    far = traffic(cfg, 64).dispatch.far
    assert far == pytest.approx(rows, abs=0.01)
    if factor == 1:
        assert far == pytest.approx(least_traffic(cfg, 64).dispatch.far, rel=2e-3)


@pytest.mark.parametrize(("precision", "wide"), [("bf16", 2), ("fp32", 4)])
def test_a_token_goes_once_to_each_node_and_from_there_to_its_ranks(
    precision: str, wide: int
) -> None:
    """DeepSeek-V3 over eight nodes of eight, counted copy by copy where pushes carry them on. A
    block for each node has room for 1.24 x the tokens that go there."""
    cfg = spread("model=deepseek_v3", f"precision={precision}", ranks=64, dispatch="hier")
    t = traffic(cfg, 64)
    drawn = tokens(cfg, 64, 2000)
    block = 1.24 * sum(len({rank // NODE for rank in hit}) for _, hit in drawn) / 8 / 2000
    inside = sum(by_node(*token).near for token in drawn) / 2000
    inside = inside if precision == "bf16" else 8 * 7 * block
    near, far = pytest.approx(inside, rel=0.02), pytest.approx(7 * block, rel=0.02)
    assert t.dispatch == t.combine == Links(near, far)
    row = wide * 7168
    assert t.forward.far == t.backward.far == 2 * t.dispatch.far * row
    again = t.dispatch.near if precision == "bf16" else 0
    assert t.backward.near == pytest.approx((2 * t.dispatch.near + again) * row)


@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("recompute", ["none", "moe"])
def test_no_less_is_sent_than_the_least(ranks: int, recompute: str) -> None:
    check_least("hier", ranks, recompute)
