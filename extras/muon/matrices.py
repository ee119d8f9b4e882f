"""Which parameters Muon updates, the matrices they consist of, and where they lie.

Megatron-Core 0.19.2 takes every parameter of two axes for one matrix, but those of the embedding
and the output layer. That leaves out stacked experts, which have three axes; takes in the router
and the biases of stacked experts; and makes one matrix of a gate and an up projection, which share
a parameter. Here a parameter is a stack of matrices, by its name.

Its layer-wise layout of buffers (`LayerWiseDistributedOptimizer`), by which one data parallel rank
owns the whole of a parameter, is used as it is; its layer-wise optimizer is not: it cannot keep
AdamW's share of expert parameters (biases) sharded, has no fp32 runs, and writes checkpoints that
one number of ranks can read. With that layout the distributed optimizer of AdamW does all this.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.param_layout import FullParamLayout
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from phalanx.kernels.expert_mlp.main_grad import facts_of

_OF_ADAMW = ("word_embeddings", "position_embeddings", "output_layer", "router")
"""Modules whose matrices AdamW updates."""
_TAG = "is_managed_by_layer_wise_optimizer"


@dataclass(frozen=True)
class Matrices:
    """The matrices of a parameter of `batch` x `groups` x sum(`rows`) rows.

    Rows of one part of all groups are a matrix: a fused query, key and value projection has a group
    for each key-value head and three parts.
    """

    batch: int
    groups: int
    rows: tuple[int, ...]
    columns: int
    split: int | None = None  # axis of the matrix that tensor parallel ranks share, if they do


class Range(NamedTuple):
    """Elements [start, stop) of a parameter, flattened."""

    tensor: Tensor
    start: int
    stop: int


def of(p: Tensor) -> Matrices | None:
    """The matrices of a parameter, or of what its optimizer updates in place of it."""
    matrices: Matrices | None = facts_of(p).matrices
    return matrices


def mark(module: torch.nn.Module, config: TransformerConfig) -> None:
    """Note on each parameter of a bare model chunk which matrices it is, if Muon updates it."""
    for name, p in module.named_parameters():
        if (found := _matrices(name, p, config)) is not None:
            facts_of(p).matrices = found


def hand_on(pairs: Iterator[tuple[Tensor, Tensor]]) -> None:
    """Note on what optimizers update which matrices it is: of (parameter, updated tensor)."""
    for parameter, updated in pairs:
        if (found := of(parameter)) is not None:
            facts_of(updated).matrices = found


def layout(
    module: torch.nn.Module,
    config: TransformerConfig,
    ddp: DistributedDataParallelConfig,
    *,
    one_bucket: bool,
) -> FullParamLayout:
    """Places in the buffers of data parallelism, with each Muon parameter whole on one rank.

    The data parallel wrapper reads a tag on the parameters when it is built with this; `untag`
    takes it off, since Megatron-Core would then leave their gathering to its own layer-wise
    optimizer. `module` is a marked chunk, in the dtypes that it trains in; with `one_bucket` the
    wrapper gets `disable_bucketing`.
    """
    groups = ProcessGroupCollection.setup_process_groups_for_ddp(None, config, ddp)
    # The wrapper's own choice, which it makes with the layout that it would compute.
    size = ddp.bucket_size or max(40_000_000, 1_000_000 * groups["dp_group"].size())
    if one_bucket or not ddp.overlap_grad_reduce or groups["pp_group"].rank() > 0:
        size = None
    parameters = [p for p in module.parameters() if p.requires_grad]
    for p in parameters:
        setattr(p, _TAG, of(p) is not None)
    return LayerWiseDistributedOptimizer.compute_full_param_layout(
        parameters,
        size,
        groups["intra_dp_cp_group"].size(),
        ddp,
        expert_data_parallel_world_size=groups["intra_expt_dp_group"].size(),
    )


def untag(module: torch.nn.Module) -> None:
    """See `layout`."""
    for p in module.parameters():
        if hasattr(p, _TAG):
            delattr(p, _TAG)


def _matrices(name: str, p: Tensor, config: TransformerConfig) -> Matrices | None:
    path = name.split(".")
    if path[-1] in ("w1", "w2") and p.dim() == 3:  # moe.experts
        batch, rows, columns = p.shape
        gated = path[-1] == "w1" and config.gated_linear_unit
        if run := facts_of(p).gated_run:
            return Matrices(batch, rows // (2 * run), (run, run), columns)
        return Matrices(batch, 1, _halves(rows) if gated else (rows,), columns)
    if p.dim() != 2 or not path[-1].startswith("weight") or set(path) & set(_OF_ADAMW):
        return None
    rows, columns = p.shape
    groups = 1
    parts: tuple[int, ...] = (rows,)
    if path[-2] == "linear_fc1" and config.gated_linear_unit:
        parts = _halves(rows)
    elif path[-2] == "in_proj":  # linear attention: queries, keys, values, gates, beta, alpha
        whole = _linear_parts(config)
        parts = tuple(n * rows // sum(whole) for n in whole)
    elif path[-2] == "linear_qkv":
        of_group = config.num_attention_heads // config.num_query_groups
        queries = (of_group, of_group) if config.attention_output_gate else (of_group,)
        parts = tuple(n * config.kv_channels for n in (*queries, 1, 1))
        groups = rows // sum(parts)
    assert groups * sum(parts) == rows, f"{name} is not made of {parts} rows"
    shared = getattr(p, "tensor_model_parallel", False)
    expert = not getattr(p, "allreduce", True)  # experts are whole on every tensor rank
    split = getattr(p, "partition_dim", None) if shared and not expert else None
    return Matrices(1, groups, parts, columns, split)


def _linear_parts(config: TransformerConfig) -> tuple[int, ...]:
    """Rows of the parts of linear attention's input projection, of all tensor ranks."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    return keys, keys, values, values, *[config.linear_num_value_heads] * 2


def _halves(rows: int) -> tuple[int, int]:
    return rows // 2, rows // 2


def pieces(update: Tensor, matrices: Matrices) -> list[Tensor]:
    """Views of one stack [batch, rows, columns] as stacks of matrices, [n, rows, columns] each.

    Parts of one group and of the same height are one stack; of several groups they are copies.
    """
    batch, height = update.size(0), matrices.rows
    if matrices.groups == 1 and len(set(height)) == 1:
        return [update.reshape(batch * len(height), height[0], matrices.columns)]
    grouped = update.view(batch, matrices.groups, sum(height), matrices.columns)
    return [part.reshape(batch, -1, matrices.columns) for part in grouped.split(height, dim=2)]


def joined(parts: Sequence[Tensor], matrices: Matrices) -> Tensor:
    """[batch, rows, columns] of what `pieces` gave."""
    if len(parts) == 1:
        return parts[0].reshape(-1, matrices.groups * sum(matrices.rows), matrices.columns)
    shape = (-1, matrices.groups)
    grouped = [
        part.reshape(*shape, n, matrices.columns)
        for part, n in zip(parts, matrices.rows, strict=True)
    ]
    return torch.cat(grouped, dim=2).flatten(1, 2)
