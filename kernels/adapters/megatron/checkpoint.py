"""Stacked experts in distributed checkpoints, under the keys of Megatron-Core's own.

There a linear layer of experts also has a state of Transformer Engine for each expert, which is
empty in bf16. It is written and read here as well, or Megatron-Core would miss it.
"""

from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict, ShardedTensor
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn

_LAYERS = ("linear_fc1", "linear_fc2")
_EXTRA = "_extra_state"


def sharded(
    parameters: dict[str, nn.Parameter],
    groups: ProcessGroupCollection,
    prefix: str,
    offsets: tuple[tuple[int, int, int], ...],
) -> ShardedStateDict:
    """Parameters [L, ...] as shards of [E, ...], and the states of E experts.

    Args:
        parameters: by their names, which are those of the checkpoint.
        groups: with `ep` and `expt_dp`.
        prefix: of the module.
        offsets: of the shards in axes before that of the experts.
    """
    axis, local = len(offsets), len(parameters["linear_fc1.weight"])
    rank, size = groups.ep.rank(), groups.ep.size()
    replica = (0, 0, groups.expt_dp.rank())
    state: ShardedStateDict = {}
    for name, parameter in parameters.items():
        state[f"{prefix}{name}"] = ShardedTensor.from_rank_offsets(
            f"{prefix}experts.{name}",
            parameter,  # itself: the optimizer's state is matched to parameters by identity
            *offsets,
            (axis, rank, size),
            replica_id=replica,
            prepend_axis_num=axis,
        )
    experts = [*(size for _, _, size in offsets), local * size]
    before = [offset for _, offset, _ in offsets]
    for layer in _LAYERS:
        for e in range(local):
            state[f"{prefix}{layer}.{_EXTRA}{e}"] = ShardedObject(
                f"{prefix}experts.{layer}.{_EXTRA}",
                torch.empty(0, dtype=torch.uint8),
                tuple(experts),
                (*before, rank * local + e),
                replica,
            )
    return state


def without_extra_states(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Remove the states of Transformer Engine from a state dict that is loaded."""
    for key in list(state):
        if key.startswith(prefix) and _EXTRA in key:
            del state[key]
