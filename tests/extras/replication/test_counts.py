"""Counts of replicas in the statistics of routers, of groups and of single nodes."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from phalanx.extras.replication.kernels.replication_plan import (
    ReplicationPlan,
    ReplicationSize,
    reference_replication_plan,
)
from phalanx.extras.replication.options import ReplicaCounts
from tests.moe.cases import build_router, install, model, transformer
from tests.moe.router.test_balance import collected
from tests.support.distributed import run_distributed

COUNTS = ReplicaCounts()


def _with_replication() -> Any:
    """Two micro-batches of a layer over two ranks, one of them with a copy; one more is undone."""
    install()
    from phalanx.moe.router import balance
    from phalanx.parallel.groups import create

    groups = create(expert=2)
    r = build_router({}, pg=groups.pg, expert=2)
    r.set_layer_number(1)
    r.statistics.extend(COUNTS)

    def add(rows: list[int]) -> None:
        count = torch.tensor(rows, dtype=torch.int32)
        r.statistics.add_counts(count)
        r.statistics.note(reference_replication_plan(count, ReplicationSize(2, 2, 10)))

    uneven, chunk = [600, 0, 0, 0, 0, 0, 0, 200], torch.nn.ModuleList([r])
    add(uneven)
    add([100] * 8)
    record = collected([chunk], r.config, groups.pg, COUNTS)
    saved = balance.snapshot([chunk])
    add(uneven)
    assert collected([chunk], r.config, groups.pg, COUNTS) != record
    balance.restore([chunk], saved)
    assert collected([chunk], r.config, groups.pg, COUNTS) == record
    balance.reset([chunk])
    r.statistics.add_counts(torch.tensor([700, 100, 0, 0, 0, 0, 0, 800]))
    return record, collected([chunk], r.config, groups.pg, COUNTS)


@pytest.mark.dist
def test_copies_of_experts_are_counted() -> None:
    """600 rows beside 200 become 512 + 10 beside 298, and 400 beside 400 stay."""
    for record, without in run_distributed(_with_replication, 2):
        assert record.counted["replicas"] == 0.5
        assert record.rank_load == pytest.approx(1000 / 800), "of the step, as without replication"
        assert record.counted["rank_load_without_replicas"] == pytest.approx((600 + 400) / 800)
        assert record.counted["rank_load_with_replicas"] == pytest.approx((522 + 400) / 800)
        assert (without.counted, without.rank_load) == ({}, 1)


ROWS = {
    1: ([600, 0, 0, 0, 0, 0, 0, 200], [0, 0, 100, 100, 700, 0, 0, 0]),
    2: ([100] * 8, [0, 900, 0, 0, 800, 0, 0, 0]),
}
"""Rows of experts, by layer and micro-batch: either node has the busiest rank once."""


def _plans_of_nodes() -> Any:
    """Logged values of two layers over two nodes of two ranks, and the number of collectives.

    From the plans of a rank's node, and from those of the group; collectives of the first table.
    """
    install()
    from phalanx.parallel.groups import create

    groups, m = create(expert=4), model({})
    m.layers = len(ROWS)
    config = transformer(m)

    def planned(rows: list[int], whole: bool) -> ReplicationPlan:
        nodes = torch.tensor(rows, dtype=torch.int32).chunk(2)
        plans = [reference_replication_plan(count, ReplicationSize(2, 2, 10)) for count in nodes]
        if not whole:
            return plans[dist.get_rank() // 2]
        expert, *_ = (torch.cat(of) for of in zip(*(p[:1] for p in plans), strict=True))
        return plans[0]._replace(
            expert_RN=expert, load_2R=torch.cat([p.load_2R for p in plans], dim=1)
        )

    def logged(whole: bool) -> tuple[Any, int]:
        chunk = torch.nn.ModuleList()
        for layer, micro_batches in ROWS.items():
            r = build_router({}, pg=groups.pg, expert=4)
            r.set_layer_number(layer)
            r.statistics.extend(COUNTS)
            for rows in micro_batches:
                r.statistics.add_counts(torch.tensor(rows))
                r.statistics.note(planned(rows, whole))
            chunk.append(r)
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduced:
            record = collected([chunk], config, groups.pg, COUNTS)
        return record, reduced.call_count - 1  # the sum of all tables

    return logged(whole=False), logged(whole=True)


@pytest.mark.dist
def test_replicas_of_nodes_are_counted_once_a_step() -> None:
    """The busiest rank of a micro-batch is that of all nodes."""
    for (of_nodes, asked), (of_group, alone) in run_distributed(_plans_of_nodes, 4):
        assert of_nodes == of_group
        assert (asked, alone) == (1, 0)
        first, second = (600 + 700) / (800 + 900), (200 + 900) / (800 + 1700)
        copies, without, with_copies = of_nodes.counted.values()
        assert without == pytest.approx(4 * (first + second) / 2)
        assert copies > 0 and with_copies < without
