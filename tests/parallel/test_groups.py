"""Process groups of layouts: which there are, and how long their collectives may take."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from phalanx.parallel.megatron import cpu
from tests.support.distributed import run_distributed

LAYOUTS = [{"tensor": 2}, {"context": 2}, {"pipeline": 2}, {"expert": 2}]


def _limits(layout: dict[str, int]) -> dict[str, timedelta]:
    """Ranks of all groups that this rank is in, by name."""
    cpu.install()
    from phalanx.parallel.groups import create

    create(**layout)
    groups = [g for g in dist.distributed_c10d._world.pg_map if g.size() > 0]
    device = torch.device("cpu")
    return {g.group_name: g._get_backend(device).options._timeout for g in groups}


@pytest.mark.dist
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: next(iter(layout)))
def test_all_groups_have_the_limit_of_the_world(layout: dict[str, int]) -> None:
    """To the second: Megatron-Core takes minutes, and the watchdog has to come first."""
    for limits in run_distributed(_limits, 2, layout, timeout=119):
        assert len(limits) > 5
        assert set(limits.values()) == {timedelta(seconds=119)}, limits


def _members(layout: dict[str, int]) -> tuple[list[list[int]], dict[str, list[int]]]:
    """Ranks of all groups that this rank is in, and those of the layout's."""
    cpu.install()
    from phalanx.parallel.groups import create

    before = set(dist.distributed_c10d._world.pg_map)
    pg = create(**layout).pg
    groups = [g for g in dist.distributed_c10d._world.pg_map if g.size() > 0 and g not in before]
    of_layout = {name: getattr(pg, name) for name in ("tp", "cp", "pp", "dp", "ep", "expt_dp")}
    for group in of_layout.values():
        dist.all_reduce(torch.ones(1), group=group)
    ranks = dist.get_process_group_ranks
    return [ranks(g) for g in groups], {name: ranks(g) for name, g in of_layout.items()}


TOGETHER = {
    "data": {"dp", "expt_dp"},
    "tensor": {"tp", "expt_dp"},
    "context": {"cp", "expt_dp"},
    "pipeline": {"pp"},
    "expert": {"dp", "ep"},
}
"""Groups of a layout that have both ranks."""


@pytest.mark.dist
@pytest.mark.parametrize("layout", [{}, *LAYOUTS], ids=lambda layout: next(iter(layout), "data"))
def test_a_rank_is_alone_in_one_group(layout: dict[str, int]) -> None:
    """NCCL would make a communicator of each."""
    both = TOGETHER[next(iter(layout), "data")]
    for rank, (groups, members) in enumerate(run_distributed(_members, 2, layout)):
        assert groups.count([rank]) == 1
        assert members == {name: [0, 1] if name in both else [rank] for name in members}
