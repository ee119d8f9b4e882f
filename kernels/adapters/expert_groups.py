"""Exchanges of tokens that layers of a process share, one for each process group with experts."""

from typing import Any

import torch
import torch.distributed as dist

from phalanx.parallel.expert_parallel import ExpertParallelGroup

_groups: dict[Any, ExpertParallelGroup] = {}


def group_of(
    ranks: dist.ProcessGroup, dtype: torch.dtype, capacity_factor: float | None = None
) -> ExpertParallelGroup:
    """The exchange between these ranks: `symm`, or with gloo `alltoall`.

    The first call creates it, collectively over all ranks of the job. `dtype`: of tokens.
    ValueError, on all ranks, if it cannot run between them or has another capacity.
    """
    if ranks in _groups:
        wanted = float(ranks.size()) if capacity_factor is None else capacity_factor
        if (present := _groups[ranks].capacity_factor) != wanted:
            raise ValueError(
                f"capacity_factor={wanted:g}: the exchange of these ranks has {present:g}: give "
                "all layers the same, or call release() before"
            )
    else:
        transport = "symm" if "nccl" in dist.get_backend(ranks) else "alltoall"
        _groups[ranks] = ExpertParallelGroup(
            ranks, transport=transport, capacity_factor=capacity_factor, dtype=dtype
        )
    return _groups[ranks]


def groups() -> list[ExpertParallelGroup]:
    """All exchanges of this process: to ask for overflows, and to begin the capture of a graph."""
    return list(_groups.values())


def release() -> None:
    """Free the memory that ranks share, before process groups are destroyed; collective."""
    for group in groups():
        group.release()
    _groups.clear()
