"""Optimizer state as pieces of the parameters it belongs to: a form that every layout can read.

A data parallel rank of Megatron-Core's distributed optimizer owns flat ranges of parameters. A
range is cut into boxes of the parameter's global tensor, so a rank writes and reads just what it
owns. Keys and shapes are those of Megatron-Core's `fully_reshardable` format, but nothing is
gathered. The pieces are views of the state: loading into them restores the optimizer in place.

Master copies are `param` in fp32, or `remainder` where the weights hold their upper half, so that
nothing is copied for a save. A checkpoint of either kind can be loaded into the other.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from phalanx.configs.tables.optimizers import OPTIMIZERS
from phalanx.kernels.elementwise.adam import merged, split_
from phalanx.parallel.checkpoint.saved_knobs import CheckpointMismatch
from phalanx.parallel.checkpoint.start import start_over_override
from phalanx.parallel.megatron.updated import AVERAGE, begin_averages, has_averages, parts, updated
from phalanx.parallel.object_store import Place


def rectangles(
    shape: Sequence[int], start: int, stop: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut elements [start, stop) of a row-major tensor into boxes (offset, size), in order.

    Each is contiguous in the tensor; there are at most 2 * len(shape) - 1 of them.
    """
    if start >= stop:
        return []
    if not shape:
        return [((), ())]
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last and stop - start < row:
        inner = rectangles(shape[1:], start - first * row, stop - first * row)
        return [((first, *offset), (1, *size)) for offset, size in inner]
    whole = range(-(-start // row), stop // row)
    boxes = rectangles(shape, start, whole.start * row)
    if whole:
        boxes.append(((whole.start, *[0] * (len(shape) - 1)), (len(whole), *shape[1:])))
    return boxes + rectangles(shape, whole.stop * row, stop)


@dataclass(frozen=True)
class _Owned:
    """State of one parameter on this rank: elements [start, stop) of it, flattened."""

    parameter: torch.Tensor
    start: int
    stop: int
    tensors: dict[str, torch.Tensor]
    optimizer: Any


class OptimizerState:
    """Master parameters and moments that this rank holds, as `shards` for dist_checkpointing.

    Args:
        optimizer: chained or not, with `step` in the group (parallel.megatron.adam). Missing state
            is allocated.
        model_state: `sharded_state_dict` of all chunks that it updates, before preprocessing.
        stored: names in the checkpoint that is to be loaded. Master copies that it holds in the
            other form get host memory to be loaded to, 4 or 2 bytes an element of this rank.

    Raises:
        ValueError: an updated parameter has no entry in `model_state`.
    """

    def __init__(
        self, optimizer: Any, model_state: dict[str, Any], stored: Collection[str] = ()
    ) -> None:
        self._converted: list[tuple[_Owned, _Owned]] = []  # this run's state, the checkpoint's
        split = any(name.startswith("optimizer.state.remainder.") for name in stored)
        self._split_anew = [
            part
            for part in parts(optimizer)
            if stored and not split and part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        ]
        has_none = bool(stored) and not any(
            name.startswith(f"optimizer.state.{AVERAGE}.") for name in stored
        )
        self._begin_averages = optimizer if has_none and has_averages(optimizer) else None
        described = _by_address(model_state)
        self.shards: dict[str, ShardedTensor] = {}
        for owned in (owned for part in parts(optimizer) for owned in _owned(part)):
            shape, address = tuple(owned.parameter.shape), owned.parameter.data_ptr()
            if address not in described:
                raise ValueError(f"no checkpoint key for an updated parameter of shape {shape}")
            if self._begin_averages is not None:
                rest = {name: t for name, t in owned.tensors.items() if name != AVERAGE}
                owned = replace(owned, tensors=rest)
            in_bf16 = owned.parameter.dtype == torch.bfloat16  # others are never split
            if stored and in_bf16 and ("remainder" in owned.tensors) != split:
                own, owned = owned, _in_other_form(owned)
                self._converted.append((own, owned))
            for piece in _pieces(owned, described[address]):
                self.shards[f"{piece.key}@{piece.global_offset}"] = piece

    @torch.no_grad()
    def write_back(self) -> None:
        """Make master copies of the checkpoint's form, once the model and `shards` are loaded."""
        for own, loaded in self._converted:
            weight = own.parameter.detach().view(-1)[own.start : own.stop]
            if "remainder" in own.tensors:
                master = loaded.tensors["param"].to(weight.device)
                remainder = torch.empty_like(weight, dtype=torch.int16)
                split_(master, weight, remainder)
                own.tensors["remainder"].copy_(remainder.view_as(own.tensors["remainder"]))
            else:
                remainder = loaded.tensors["remainder"].to(weight.device)
                own.tensors["param"].view(-1).copy_(merged(weight, remainder))
        # Of a master between two weights `split_` may take the one that was not saved: each rank
        # has it for what it owns. One that owns nothing has to join.
        chunks = [chunk for part in self._split_anew for chunk in part.model_chunks]
        for chunk in dict.fromkeys(chunks):
            chunk.start_param_sync(force_sync=True)
        if self._begin_averages is not None:
            begin_averages(self._begin_averages)


def check_kind(optimizer: Any, stored: Collection[str], path: Place) -> None:
    """Raise CheckpointMismatch if the checkpoint at `path` has other kinds of state.

    No momentum could be made of the moments of AdamW, or the other way round.
    """
    states = {facts.own_state: kind for kind, facts in reversed(OPTIMIZERS.items())}
    used = {getattr(part.optimizer, "own_state", "") for part in parts(optimizer)} - {""}
    held = {
        state
        for state in states
        if state and any(name.startswith(f"optimizer.state.{state}.") for name in stored)
    }
    if held != used:
        kind = states[next(iter(held), "")]
        raise CheckpointMismatch(
            f"{path} has an optimizer of another kind: go on with optim.kind={kind}, or start "
            f"anew with run.resume=never and another run.name or {start_over_override()}"
        )


@torch.no_grad()
def begin_anew(optimizer: Any) -> None:
    """Bring all state to that of a new run, once weights are loaded alone.

    In place, as captured updates hold its addresses: master copies and averages are made of the
    weights, all else is 0.
    """
    optimizer.reload_model_params()
    for owned in (owned for part in parts(optimizer) for owned in _owned(part)):
        for name, tensor in owned.tensors.items():
            if name != "param":
                tensor.zero_()
    set_step_count(optimizer, 0)
    if has_averages(optimizer):
        begin_averages(optimizer)


def step_count(optimizer: Any) -> int:
    """Updates made so far, 0 before the first."""
    return max((int(g.get("step", 0)) for g in _groups(optimizer)), default=0)


def set_step_count(optimizer: Any, step: int) -> None:
    """Set the updates made so far, the same in every parameter group of the model."""
    for group in _groups(optimizer):
        group["step"] = step


def _groups(optimizer: Any) -> Iterator[dict[str, Any]]:
    for part in parts(optimizer):
        yield from part.optimizer.param_groups


def _owned(part: Any) -> Iterator[_Owned]:
    # That of Megatron-Core would allocate fp32, whatever the optimizer keeps.
    part.optimizer.init_state(p for g in part.optimizer.param_groups for p in g["params"])
    for parameter, start, stop, main in updated(part):
        yield _Owned(parameter, start, stop, _tensors(part, main), part)


def _tensors(part: Any, main: torch.Tensor) -> dict[str, torch.Tensor]:
    state = part.optimizer.state[main]
    return state if "remainder" in state else {"param": main, **state}


def _in_other_form(owned: _Owned) -> _Owned:
    """With room in host memory for the other form of master copy, in place of this run's."""
    tensors = dict(owned.tensors)
    if tensors.pop("remainder", None) is None:
        del tensors["param"]
        other, dtype = "remainder", torch.int16
    else:
        other, dtype = "param", torch.float32
    tensors[other] = torch.empty(owned.stop - owned.start, dtype=dtype, device="cpu")
    return replace(owned, tensors=tensors)


def _by_address(model_state: dict[str, Any]) -> dict[int, list[ShardedTensor]]:
    """Address of a parameter -> the global tensors that it is a part of, several for a factory."""
    described: dict[int, list[ShardedTensor]] = {}
    for value in nested_values(model_state):
        if isinstance(value, ShardedTensorFactory):
            parts = [v for v in nested_values(value.build()) if isinstance(v, ShardedTensor)]
            described.setdefault(value.data.data_ptr(), parts)
        elif isinstance(value, ShardedTensor) and value.data is not None and value.data.numel():
            described.setdefault(value.data.data_ptr(), [value])
    return described


def _pieces(owned: _Owned, shards: list[ShardedTensor]) -> Iterator[ShardedTensor]:
    base, width = owned.parameter.data_ptr(), owned.parameter.element_size()
    for shard in shards:
        assert shard.data.is_contiguous()
        begin = (shard.data.data_ptr() - base) // width  # of this shard, in the flattened parameter
        start, stop = max(owned.start, begin), min(owned.stop, begin + shard.data.numel())
        for offset, size in rectangles(shard.local_shape, start - begin, stop - begin):
            count = math.prod(size)
            here = slice(start - owned.start, start - owned.start + count)
            for name, tensor in owned.tensors.items():
                yield _piece(owned, shard, offset, size, name, tensor.detach().view(-1)[here])
            start += count


def _piece(
    owned: _Owned,
    shard: ShardedTensor,
    offset: tuple[int, ...],
    size: tuple[int, ...],
    name: str,
    data: torch.Tensor,
) -> ShardedTensor:
    if data.device.type == "cpu":  # a view would be cloned: this has a storage of its own size
        data = torch.from_numpy(data.view(torch.uint8).numpy()).view(data.dtype)
    axes = shard.prepend_axis_num
    size = (1,) * axes + size
    inner = (0,) * axes + offset
    # Ranges of a sharded optimizer are disjoint over data parallel ranks, so those are no replicas.
    sharded = isinstance(owned.optimizer, DistributedOptimizer)
    replica = (*shard.replica_id[:-1], 0) if sharded else shard.replica_id
    return ShardedTensor(
        key=f"optimizer.state.{name}.{shard.key}",
        data=data.view(size),
        dtype=data.dtype,
        local_shape=size,
        global_shape=tuple(shard.global_shape),
        global_offset=tuple(a + b for a, b in zip(shard.global_offset, inner, strict=True)),
        axis_fragmentations=None,  # the boxes are no grid
        replica_id=replica,
    )
