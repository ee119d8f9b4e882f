"""Ranks -> process groups, through Megatron-Core's parallel state with parallel folding.

Attention and dense layers see tensor x context x data x pipeline; expert layers see expert x
expert-data x pipeline over the same ranks, with expert tensor parallelism fixed at 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.process_groups_config import ProcessGroupCollection

from phalanx.configs.knobs import pluralize
from phalanx.parallel.dispatcher.nodes import time_limit
from phalanx.parallel.megatron import cpu
from phalanx.parallel.megatron.patches import one_group_of_each_rank


@dataclass(frozen=True)
class Groups:
    """Sizes of the layout and Megatron-Core's collection of process groups."""

    tensor: int
    context: int
    pipeline: int
    virtual_pipeline: int
    expert: int
    data: int
    pg: ProcessGroupCollection

    @property
    def data_rank(self) -> int:
        return int(ps.get_data_parallel_rank())

    def table(self) -> str:
        """The layout in words, for the start page: group, size, this rank's members."""
        rows = [
            ("tensor", self.pg.tp),
            ("context", self.pg.cp),
            ("data", self.pg.dp),
            ("pipeline", self.pg.pp),
            ("expert", self.pg.ep),
            ("expert-data", self.pg.expt_dp),
        ]
        lines = [f"{'group':<12} {'size':>5}  ranks with rank {dist.get_rank()}"]
        for name, group in rows:
            ranks = dist.get_process_group_ranks(group)
            shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
            lines.append(f"{name:<12} {len(ranks):>5}  {shown}")
        return "\n".join(lines)


def create(
    *,
    tensor: int = 1,
    context: int = 1,
    pipeline: int = 1,
    virtual_pipeline: int = 1,
    expert: int = 1,
    embedding_stages: Sequence[int] | None = None,
) -> Groups:
    """Build the process groups over the initialised world; replaces an earlier layout.

    Their collectives have the world's time limit, after the watchdog's.

    Args:
        tensor, context, pipeline, virtual_pipeline, expert: sizes.
        embedding_stages: all pipeline stages that hold a copy of the word embedding and no other,
            or copies drift apart or training hangs. First and last by default.

    Raises:
        ValueError: the sizes do not divide the world (configs.validate names the override).
    """
    world = dist.get_world_size()
    stage = tensor * context
    if world % (stage * pipeline) or (world // pipeline) % expert:
        raise ValueError(
            f"tensor {tensor} x context {context} x pipeline {pipeline}, expert {expert} "
            f"do not divide {pluralize(world, 'rank')}"
        )
    stages = sorted({0, pipeline - 1} if embedding_stages is None else embedding_stages)
    limit = time_limit()
    if ps.model_parallel_is_initialized():
        ps.destroy_model_parallel()
    with one_group_of_each_rank():
        ps.initialize_model_parallel(
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            virtual_pipeline_model_parallel_size=virtual_pipeline if virtual_pipeline > 1 else None,
            context_parallel_size=context,
            expert_model_parallel_size=expert,
            expert_tensor_parallel_size=1,
            get_embedding_ranks=lambda ranks: [ranks[stage] for stage in stages],
            create_gloo_process_groups=False,
            distributed_timeout_minutes=limit / timedelta(minutes=1),
        )
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    # Megatron-Core forks the generator wherever sequence-parallel ranks might draw, and a generator
    # that is seeded on the host cannot be forked inside a CUDA graph. The states of an earlier
    # layout go: the tracker keeps the kind that it was first made with.
    model_parallel_cuda_manual_seed(
        1, use_cudagraphable_rng=not cpu.install(), force_reset_rng=True
    )
    data = world // (stage * pipeline)
    pg = ProcessGroupCollection.use_mpu_process_groups()
    return Groups(tensor, context, pipeline, virtual_pipeline, expert, data, pg)
