"""Model chunks as sharded state for a checkpoint, and back.

Keys are of the model, not of the layout: layers may move between pipeline stages.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from phalanx.configs.knobs import pluralize
from phalanx.parallel.checkpoint.saved_knobs import CheckpointMismatch
from phalanx.parallel.object_store import Place


def modules_of(model: Sequence[torch.nn.Module]) -> dict[str, Any]:
    """Bare model chunks under their names in a checkpoint: `model`, or `model0`, `model1`, ..."""
    modules = unwrap_model(list(model))
    if len(modules) == 1:
        return {"model": modules[0]}
    return {f"model{i}": module for i, module in enumerate(modules)}


def sharded_state(model: Sequence[torch.nn.Module], dp_cp_group: Any) -> dict[str, Any]:
    """Parameters and buffers of all chunks of this rank; the tensors are the model's own."""
    metadata = {"dp_cp_group": dp_cp_group, "non_homogeneous_layers": True}
    state = {
        name: module.sharded_state_dict(metadata=metadata)
        for name, module in modules_of(model).items()
    }
    return without_extra_states(state)


def without_extra_states(state: dict[str, Any]) -> dict[str, Any]:
    """A sharded state dict less the extra states, which only Transformer Engine fills.

    They hold scales of FP8 from past steps, which `fp8_block` does not use, and would be unpickled
    without restraint.
    """

    def extra(value: Any) -> bool:
        return isinstance(value, ShardedObject) and value.key.endswith("_extra_state")

    return extract_matching_values(state, lambda value: not extra(value))[0]


@contextmanager
def parameters_gathered(model: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Inside, parameters are those of the last step, also if their gathering is overlapped."""
    overlapped: list[Any] = [
        c for c in model if getattr(c, "remove_forward_pre_hook_handles", None)
    ]
    for chunk in overlapped:
        chunk.disable_forward_pre_hook()
    try:
        with parameters_whole(model):
            yield
    finally:
        for chunk in overlapped:
            chunk.enable_forward_pre_hook()


@contextmanager
def parameters_whole(model: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Inside, sharded parameters are whole; the shards keep what they have become. Collective."""
    with ExitStack() as stack:
        for chunk in model:
            stack.enter_context(getattr(chunk, "whole_parameters", nullcontext)())
        yield


def check_fit(state: dict[str, Any], metadata: Metadata, path: Place) -> None:
    """Raise CheckpointMismatch if the checkpoint lacks a tensor, or has one of another shape."""
    wrong: dict[str, str] = {}
    for shard in _shards(state):
        found = metadata.state_dict_metadata.get(shard.key)
        if not isinstance(found, TensorStorageMetadata):
            wrong[shard.key] = "is missing"
        elif tuple(found.size) != tuple(shard.global_shape):
            wrong[shard.key] = f"has shape {list(found.size)}, not {list(shard.global_shape)}"
    if wrong:
        examples = "; ".join(f"{key} {what}" for key, what in list(wrong.items())[:3])
        raise CheckpointMismatch(
            f"{path} is of another model, in {pluralize(len(wrong), 'tensor')}: {examples}"
        )


def restore(model: Sequence[torch.nn.Module], loaded: dict[str, Any]) -> None:
    """Copy what dist_checkpointing loaded into the chunks."""
    for name, module in modules_of(model).items():
        missing, unexpected = module.load_state_dict(loaded.get(name, {}), strict=False)
        missing = [key for key in missing if not key.endswith("_extra_state")]
        assert not missing and not unexpected, (missing[:3], unexpected[:3])


def _shards(state: dict[str, Any]) -> Iterator[ShardedTensor]:
    for value in nested_values(state):
        parts = nested_values(value.build()) if isinstance(value, ShardedTensorFactory) else [value]
        yield from (part for part in parts if isinstance(part, ShardedTensor))
