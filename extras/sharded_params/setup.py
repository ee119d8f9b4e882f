"""The parts of the engine that differ where parameters are sharded.

Layers are marked, Megatron-Core's wrapper is built with buffers that are shards, and the optimizer
is told of them. Embedding, output layer, norms and other vectors stay as with the distributed
optimizer: whole on every rank, in Megatron-Core's own buffers.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    distributed_data_parallel,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.param_layout import FullParamLayout
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from phalanx.configs.schema import OptimConfig
from phalanx.configs.validate import ConfigError
from phalanx.extras.sharded_params import layers
from phalanx.extras.sharded_params.buffer import ShardedBuffer, one_bucket_each
from phalanx.extras.sharded_params.gather import ShardedGather
from phalanx.extras.sharded_params.peers import Peers, reachable
from phalanx.extras.sharded_params.ring import Ring, Unit
from phalanx.extras.sharded_params.whole import whole_parameters
from phalanx.kernels.expert_mlp import main_grad
from phalanx.kernels.expert_mlp.main_grad import facts_of
from phalanx.parallel.dispatcher.nodes import join, names_here, refuse
from phalanx.parallel.fault.agreement import gather
from phalanx.parallel.megatron import adam
from phalanx.parallel.megatron.param_gather import ParamGather
from phalanx.parallel.megatron.updated import parts

_TAG = "is_managed_by_layer_wise_optimizer"
"""Megatron-Core's mark of parameters that have a buffer of their own; it goes once that exists."""


class ShardedSetup(adam.Setup):
    """AdamW of sharded parameters."""

    def __init__(self, optim: OptimConfig, config: TransformerConfig) -> None:
        super().__init__(optim, config)
        groups = (
            ps.get_data_parallel_group(with_context_parallel=True),
            ps.get_expert_data_parallel_group(),
        )
        self._rings = [self._make(group) for group in groups]  # of experts, the second
        self._unit_of: dict[Tensor, Unit] = {}
        self._buffers: list[ShardedBuffer] = []  # of the chunk that is being wrapped
        self._layers: list[tuple[nn.Module, list[Unit]]] = []

    def _make(self, group: Any) -> Ring:
        return Ring(group, peers=Peers(group) if reachable(group) else None)

    def mark(self, chunk: nn.Module) -> None:
        for layer in chunk.modules():
            if isinstance(layer, TransformerLayer):
                self._mark(layer)

    def _mark(self, layer: nn.Module) -> None:
        units = list[Unit]()
        for ring in self._rings:
            if owned := [p for p in layer.parameters() if self._ring(p) is ring]:
                units.append(ring.add(owned))
                self._unit_of |= dict.fromkeys(owned, units[-1])
        self._layers.append((layer, units))

    def _ring(self, p: Tensor) -> Ring | None:
        """The ring of a parameter of a layer; None if it stays whole."""
        ring = self._rings[not getattr(p, "allreduce", True)]
        # Megatron-Core sums gradients of what sequence parallel ranks share after the step.
        shared = getattr(p, "sequence_parallel", False)
        sharded = p.requires_grad and p.dim() > 1 and ring.ranks > 1 and not shared
        return ring if sharded else None

    def layout(
        self, chunk: nn.Module, ddp: DistributedDataParallelConfig, *, one_bucket: bool
    ) -> FullParamLayout:
        groups = ProcessGroupCollection.setup_process_groups_for_ddp(None, self.config, ddp)
        # The wrapper's own choice, which it makes with the layout that it would compute.
        size = ddp.bucket_size or max(40_000_000, 1_000_000 * groups["dp_group"].size())
        parameters = [p for p in chunk.parameters() if p.requires_grad]
        for p in parameters:
            setattr(p, _TAG, p in self._unit_of)
        full: FullParamLayout = DistributedOptimizer.compute_full_param_layout(
            parameters,
            None if one_bucket or groups["pp_group"].rank() > 0 else size,
            groups["intra_dp_cp_group"].size(),
            ddp,
            expert_data_parallel_world_size=groups["intra_expt_dp_group"].size(),
        )
        for key, default in full.layouts.items():
            if key.is_managed_by_layer_wise_optimizer:
                held = default.param_index_map
                units = dict.fromkeys(self._unit_of[p] for p in parameters if p in held)
                full.layouts[key] = one_bucket_each(list(units), default)
        self._original = distributed_data_parallel._ParamAndGradBuffer
        distributed_data_parallel._ParamAndGradBuffer = self._buffer
        return full

    def _buffer(self, *args: Any, **named: Any) -> Any:
        (first, _), *_ = args[3]
        if first not in self._unit_of:
            return self._original(*args, **named)
        self._buffers.append(ShardedBuffer(self._unit_of, *args, **named))
        return self._buffers[-1]

    def wrapped(self, chunk: nn.Module) -> None:
        distributed_data_parallel._ParamAndGradBuffer = self._original
        while self._buffers:
            self._buffers.pop().give_to_optimizer()
        for p in chunk.parameters():
            if hasattr(p, _TAG):
                delattr(p, _TAG)

    def built(self, optimizer: Any) -> None:
        for part in parts(optimizer):
            for p, shard, main in _updated(part):
                if (unit := self._unit_of.get(p)) is not None:
                    shard.data = unit.weights[unit.place(p, unit.updated)[1]]
                    if main is not shard:
                        main.data.copy_(shard.data)
            part._copy_model_grads_to_main_grads = partial(self._give_grads, part)
            part._copy_main_params_to_model_params = partial(_take_weights, part)

    def _give_grads(self, part: Any) -> None:
        """Megatron-Core's, which takes all gradients from `main_grad`."""
        decoupled = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        for p, _, main in _updated(part):
            if (unit := self._unit_of.get(p)) is not None:
                assert not unit.fresh, "a layer has had no backward pass in this step"
                grad = unit.grads[unit.place(p, unit.updated)[1]]
            else:
                own = part._get_model_param_range_map(p)["param"]
                grad = p.main_grad.view(-1)[own.start : own.end]
            if decoupled:
                main.decoupled_grad = grad
            else:
                main.grad = grad.float()

    def gather(self, chunks: Sequence[DistributedDataParallel]) -> ParamGather:
        for chunk in chunks:
            for groups in (chunk.bucket_groups, chunk.expert_parallel_bucket_groups):
                for group in groups:
                    self._leave_to_rings(group)
                groups[:] = [group for group in groups if group.buckets]
                for group in groups:
                    if dist.get_backend(group.intra_distributed_optimizer_instance_group) == "gloo":
                        group.start_grad_sync = partial(_sum_now, group, group.start_grad_sync)
            for p in self._unit_of:
                chunk.param_to_bucket_group.pop(p, None)
            buffers = (*chunk.buffers, *chunk.expert_parallel_buffers)
            own = [buffer for buffer in buffers if isinstance(buffer, ShardedBuffer)]
            for buffer in own:
                buffer.reset = buffer.begin
            units = [unit for buffer in own for unit in buffer.units]
            chunk.whole_parameters = partial(whole_parameters, units)
            chunk.no_sync = partial(_not_the_last, chunk.no_sync, units)
        for ring in self._rings:
            for unit in ring.units:
                adds = all(facts_of(p).adds_to_main_grad for p in unit.parameters)
                unit.replaces = adds and all(main_grad.takes(p) for p in unit.parameters)
        for layer, units in self._layers:
            layers.install(layer, units)
        return ShardedGather(chunks, [ring for ring in self._rings if ring.units])

    def _leave_to_rings(self, group: Any) -> None:
        """Take out of a group of buckets those that are gathered and summed by rings."""
        group.buckets[:] = [b for b in group.buckets if b.params_list[0] not in self._unit_of]
        group.params -= self._unit_of.keys()


class NodeShardedSetup(ShardedSetup):
    """AdamW of parameters that are sharded over the ranks of a node."""

    def _make(self, group: Any) -> Ring:
        ranks = tuple(dist.get_process_group_ranks(group))
        facts = gather((ranks, names_here(dist.get_rank())[1]))
        groups = {of: [facts[rank][1] for rank in of] for of, _ in facts}
        if all(len(set(names)) == 1 for names in groups.values()):
            return super()._make(group)
        if reason := next(filter(None, map(refuse, groups.values())), None):
            raise ConfigError(
                f"parallel.distributed_optimizer=zero3_node: {reason}; "
                "set parallel.distributed_optimizer=zero3"
            )
        return Ring(group, join(groups))


def _sum_now(group: Any, start: Callable[..., None], **named: Any) -> None:
    """Sum the gradients of a bucket before this returns, and so before a ring gathers.

    gloo (PyTorch 2.11) takes no two at a time, as of `parallel.megatron.param_gather`.
    """
    start(**named)
    if group.grad_reduce_handle is not None:
        group.grad_reduce_handle.wait()


@contextmanager
def _not_the_last(original: Any, units: Sequence[Unit]) -> Iterator[None]:
    """Inside, as in `no_sync` of a chunk, micro-batches are not the last."""
    with original():
        for unit in units:
            unit.last = False
        try:
            yield
        finally:
            for unit in units:
                unit.last = True


def _updated(part: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Parameters of an optimizer, their own elements in buffers, and what it updates."""
    split = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    masters = part.shard_float16_groups if split else part.shard_fp32_from_float16_groups
    groups = chain(
        zip(part.model_float16_groups, part.shard_float16_groups, masters, strict=True),
        zip(part.model_fp32_groups, part.shard_fp32_groups, part.shard_fp32_groups, strict=True),
    )
    for parameters, shards, mains in groups:
        yield from zip(parameters, shards, mains, strict=True)


def _take_weights(part: Any) -> None:
    """Megatron-Core's, which puts all weights into buckets."""
    for _, shard, main in _updated(part):
        if main is not shard:
            shard.data.copy_(main)
