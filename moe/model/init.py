"""Initial weights that do not depend on the layout.

Every parameter is drawn as a full tensor from a generator seeded by (seed, its global checkpoint
key), and each rank keeps its slice: any layout and expert backend starts from the same model. The
walk is over `sharded_state_dict`, the one place that knows global names.
"""

import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

# Weights whose output is added to the residual stream: scaled down with depth (GPT-2, Megatron-LM).
_RESIDUAL = ("linear_proj.weight", "linear_fc2.weight", "out_proj.weight")
_ZERO = ("bias", "softmax_offset")
_ONE = ("dt_bias",)
_RATES = (1.0, 16.0)  # bounds of linear attention's decay A, which is uniform (arXiv 2405.21060)


@torch.no_grad()
def initialize(
    chunks: Sequence[torch.nn.Module], *, seed: int, std: float, layers: int, dp_cp_group: Any
) -> None:
    """Fill every parameter of a built model in place.

    Args:
        std: standard deviation of weights; divided by sqrt(2 * layers) for residual outputs.
        layers: number of transformer layers of the full model.
        dp_cp_group: data (and context) parallel group, which Megatron-Core's state dict needs.
    """
    for chunk in chunks:
        storages = {p.untyped_storage().data_ptr() for p in chunk.parameters()}
        state = cast(Any, chunk).sharded_state_dict(metadata={"dp_cp_group": dp_cp_group})
        for shard in _shards(nested_values(state)):
            if shard.data.untyped_storage().data_ptr() in storages:  # not a buffer
                _fill(shard, seed, std, layers)
    _normal.cache_clear()


def _shards(values: Iterable[Any]) -> Iterable[ShardedTensor]:
    for value in values:
        if isinstance(value, ShardedTensorFactory):
            yield from _shards(nested_values(value.build()))
        elif isinstance(value, ShardedTensor) and value.data is not None:
            yield value


def _fill(shard: ShardedTensor, seed: int, std: float, layers: int) -> None:
    data, key, axes = shard.data, shard.key, shard.prepend_axis_num
    # Prepended axes (layers, one-parameter experts) index tensors of their own; so does the first
    # axis of a parameter that stacks experts.
    index = tuple(shard.global_offset[:axes])
    rank = len(shard.global_shape) - axes
    if key.endswith(_ONE):
        data.fill_(1.0)
    elif key.endswith(_ZERO):
        data.zero_()
    elif key.endswith("A_log"):
        data.copy_(_random(data, shard, index, seed, lambda x, g: x.uniform_(*_RATES, generator=g)))
        data.log_()
    elif rank == 1:
        assert "norm" in key or "hyper" in key, key  # built with their initial weights
    elif ".conv1d." in key:  # torch's initialization of a convolution with that many taps
        std = 1 / math.sqrt(3 * data.size(-1))
        _draw(data, shard, index, seed, std)
    elif rank == 2:
        _draw(data, shard, index, seed, _scaled(std, key, layers))
    else:
        for i in range(data.size(0)):
            expert = (*index, shard.global_offset[axes] + i)
            _draw(data[i], shard, expert, seed, _scaled(std, key, layers))


def _scaled(std: float, key: str, layers: int) -> float:
    return std / math.sqrt(2 * layers) if key.endswith(_RESIDUAL) else std


def _draw(
    out: torch.Tensor, shard: ShardedTensor, index: tuple[int, ...], seed: int, std: float
) -> None:
    shape = tuple(shard.global_shape[-out.dim() :])
    full = _normal(shape, out.device, _seed(shard, index, seed), std)
    out.copy_(_slice(full, out, shard))


@functools.lru_cache(maxsize=1)  # pieces of one tensor follow one another
def _normal(shape: tuple[int, ...], device: torch.device, seed: int, std: float) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.empty(shape, dtype=torch.float32, device=device).normal_(
        0, std, generator=generator
    )


def _random(
    out: torch.Tensor,
    shard: ShardedTensor,
    index: tuple[int, ...],
    seed: int,
    draw: Callable[[torch.Tensor, torch.Generator], torch.Tensor],
) -> torch.Tensor:
    """The slice that belongs to `out` of a full tensor of random numbers, fp32."""
    shape = shard.global_shape[-out.dim() :]
    generator = torch.Generator(out.device).manual_seed(_seed(shard, index, seed))
    full = draw(torch.empty(shape, dtype=torch.float32, device=out.device), generator)
    return _slice(full, out, shard)


def _seed(shard: ShardedTensor, index: tuple[int, ...], seed: int) -> int:
    digest = hashlib.sha256(f"{seed}/{shard.key}/{index}".encode()).digest()
    return int.from_bytes(digest[:7], "little")


def _slice(full: torch.Tensor, out: torch.Tensor, shard: ShardedTensor) -> torch.Tensor:
    offset = shard.global_offset[-out.dim() :]
    return full[tuple(slice(o, o + n) for o, n in zip(offset, out.shape, strict=True))]
