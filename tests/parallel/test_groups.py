"""How long collectives of a layout's groups may take."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from phalanx.parallel.megatron import cpu
from tests.support.distributed import run_distributed

LAYOUTS = [{"tensor": 2}, {"context": 2}, {"pipeline": 2}, {"expert": 2}]


def _limits(layout: dict[str, int]) -> dict[str, timedelta]:
    """Of all groups that this rank is in, by name."""
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
        assert len(limits) > 8
        assert set(limits.values()) == {timedelta(seconds=119)}, limits
