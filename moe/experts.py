"""Experts of one rank: stacked weights and their place in checkpoints, over grouped-MLP kernels.

Third of the four steps of an MoE layer: it takes received rows and their plan, and returns for each
row the sum of its experts on this rank. In checkpoints the weights have Megatron-Core's expert keys
and global shapes, so that a checkpoint of any expert backend loads into any other on any
expert-parallel size.

Legend: L local experts, D hidden, F expert width, N received rows.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from megatron.core.dist_checkpointing.mapping import (
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from phalanx.kernels.expert_mlp.grouped_mlp import grouped_mlp
from phalanx.kernels.expert_mlp.main_grad import facts_of
from phalanx.kernels.expert_mlp.mlp_spec import ChannelOrder, MLPSpec, MLPWeights
from phalanx.parallel.dispatcher.transport_class import Received
from phalanx.parallel.memory.layer_context import INACTIVE, LayerContext

_CHECKPOINT_NAMES = {
    "w1": "linear_fc1.weight",
    "b1": "linear_fc1.bias",
    "w2": "linear_fc2.weight",
    "b2": "linear_fc2.bias",
}


class Experts(MegatronModule):
    """The L experts of this rank.

    Parameters in `config.params_dtype`: w1 [L, 2F, D] as [gate; up], or [L, F, D] without a gate;
    w2 [L, D, F]; with `config.add_bias_linear` b1 [L, 2F or F] and b2 [L, D]. With
    `spec.channel_order` channels of w1 and b1 lie in that order, and so do their gradients and
    optimizer states; checkpoints have [gate; up].

    Args:
        config: Megatron-Core's config of the model.
        spec: kernels, activation and recipe of the experts.
        pg_collection: process groups with `ep` and `expt_dp`.
    """

    def __init__(
        self,
        *,
        config: TransformerConfig,
        spec: MLPSpec,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config=config)
        self.spec = spec
        self.ep_group, self.expert_dp_group = pg_collection.ep, pg_collection.expt_dp
        local = config.num_moe_experts // self.ep_group.size()
        hidden, width = config.moe_latent_size or config.hidden_size, config.moe_ffn_hidden_size
        fc1 = spec.activation.width(width)
        biased = config.add_bias_linear

        self.w1 = self._parameter(local, fc1, hidden)
        self.w2 = self._parameter(local, hidden, width)
        self.b1 = self._parameter(local, fc1) if biased else None
        self.b2 = self._parameter(local, hidden) if biased else None
        if spec.channel_order is not None:
            facts_of(self.w1).gated_run = spec.channel_order.run  # for optimizers of whole matrices
        if config.perform_initialization:
            self._initialize()

    def _parameter(self, *shape: int) -> torch.nn.Parameter:
        device = torch.cuda.current_device()
        parameter: Any = torch.nn.Parameter(
            torch.empty(shape, dtype=self.config.params_dtype, device=device)
        )
        # Reduced over expert-data parallelism, not over all of data parallelism. Also with one
        # expert-parallel rank, so that the optimizer has the same layout for every size.
        parameter.allreduce = False
        # A stacked bias is a matrix; parallel.engine exempts vectors, and what has this mark.
        parameter.no_weight_decay = len(shape) == 2
        facts_of(parameter).adds_to_main_grad = self.spec.accumulate
        return cast(torch.nn.Parameter, parameter)

    @torch.no_grad()
    def _initialize(self) -> None:
        for bias in (self.b1, self.b2):
            if bias is not None:
                bias.zero_()
        if self.w1.is_meta:
            return
        with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
            for expert in self.w1:
                self.config.init_method(expert)
            for expert in self.w2:
                self.config.output_layer_init_method(expert)

    def forward(
        self,
        received: Received,
        addends: Sequence[Tensor] = (),
        memory: LayerContext = INACTIVE,
    ) -> Tensor:
        """Sum of the outputs of this rank's experts for each received row, by probability.

        Args:
            received: rows and plan.
            addends: up to two [N, D] to be added to the sums.
            memory: context of the layer.

        Returns:
            out_ND; without addends 0 for a row that none of these experts reads.
        """
        weights = MLPWeights(self.w1, self.w2, self.b1, self.b2)
        with received.saving():
            return grouped_mlp(
                received.rows_ND,
                weights,
                received.plan,
                self.spec,
                overlap=received.overlap,
                fp8_inputs=received.fp8_inputs,
                addends=addends,
                on_saved_h=partial(memory.offload, "expert_h")
                if memory.offloads("expert_h")
                else None,
                experts=received.experts,
                inputs_persist=received.inputs_persist,
            )

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Each parameter as one shard [.., L, ...] of a global [.., E, ...], split over experts.

        Raises:
            ValueError: the metadata asks for one tensor per expert.
        """
        if (metadata or {}).get("singleton_local_shards"):
            raise ValueError(
                "stacked experts have no singleton_local_shards: leave it out of metadata"
            )
        axis, order = len(sharded_offsets), self.spec.channel_order
        split = (axis, self.ep_group.rank(), self.ep_group.size())
        state: ShardedStateDict = {}
        for name, parameter in self.named_parameters():
            canonical = ShardedTensor.from_rank_offsets(
                f"{prefix}experts.{_CHECKPOINT_NAMES[name]}",
                parameter,  # itself: the optimizer's state is matched to parameters by identity
                *sharded_offsets,
                split,
                replica_id=(0, 0, self.expert_dp_group.rank()),
                prepend_axis_num=axis,
            )
            if order is not None and name in ("w1", "b1"):
                state[f"{prefix}{name}"] = _in_runs(canonical, parameter, order)
            else:
                state[f"{prefix}{name}"] = canonical
        return state


def _in_runs(
    canonical: ShardedTensor, parameter: Tensor, order: ChannelOrder
) -> ShardedTensorFactory:
    """A parameter in another order as pieces of the canonical tensor: views, each of one run."""

    def build(key: str, stored: Tensor, replica_id: Any, flattened_range: Any) -> list[Any]:
        assert flattened_range is None
        axis, pieces = canonical.prepend_axis_num, []
        for expert in range(len(stored)):
            for run in order.runs(stored.shape[1]):
                view = stored[expert : expert + 1, run.stored : run.stored + order.run]
                offset = list(canonical.global_offset)
                offset[axis] += expert
                offset[axis + 1] += run.canonical
                pieces.append(
                    replace(
                        canonical,
                        key=key,
                        data=view,
                        local_shape=tuple(view.shape),
                        global_offset=tuple(offset),
                        axis_fragmentations=None,
                        replica_id=replica_id,
                    )
                )
        return pieces

    def merge(loaded: list[Tensor]) -> Tensor:
        runs = [piece.reshape(-1, *parameter.shape[2:]) for piece in loaded]
        return torch.cat(runs).view(parameter.shape)

    return ShardedTensorFactory(canonical.key, parameter, build, merge, canonical.replica_id)
