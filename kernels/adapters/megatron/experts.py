"""Experts of one rank in Megatron-Core's MoE layer, in place of its grouped or sequential MLP.

Distributed checkpoints have them under the keys of Megatron-Core's own. There a linear layer of
experts also has a state of Transformer Engine for each expert, which is empty in bf16. It is
written and read here as well, or Megatron-Core would miss it.

Legend: L local experts, D hidden, F expert width, S rows sorted by expert.
"""

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import activations
from megatron.core.activations import squared_relu
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict, ShardedTensor
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from phalanx.kernels import api
from phalanx.kernels.api import Activation, ExpertOptions, SortedRows, resolve_backend

_LAYERS = ("linear_fc1", "linear_fc2")
_EXTRA = "_extra_state"


def sharded(
    parameters: dict[str, nn.Parameter],
    groups: ProcessGroupCollection,
    prefix: str,
    offsets: tuple[tuple[int, int, int], ...],
) -> ShardedStateDict:
    """Parameters [L, ...], by the checkpoint's names, as shards of [E, ...], and E experts' states.

    `offsets`: of the shards in axes before that of the experts.
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
    """Remove Transformer Engine's states from a state dict that is loaded."""
    for key in list(state):
        if key.startswith(prefix) and _EXTRA in key:
            del state[key]


_KINDS = {
    (True, F.silu): "swiglu",
    (True, F.gelu): "geglu",
    (True, quick_gelu): "quick_geglu",
    (True, activations.quick_gelu): "quick_geglu",  # Megatron-Core has two
    (False, squared_relu): "squared_relu",
}
"""Kinds by `gated_linear_unit` and `activation_func`."""
_REFUSED = {
    "moe_latent_size": "experts in a latent space",
    "moe_apply_probs_on_input": "probabilities that scale the input",
    "moe_mlp_glu_interleave_size": "interleaved gates",
    "fp8": "FP8 of Transformer Engine",
    "fp4": "FP4 of Transformer Engine",
    "delay_wgrad_compute": "delayed weight gradients",
    "overlap_moe_expert_parallel_comm": "delayed weight gradients",
    "overlap_dispatch_backward_with_experts_wgrad": "delayed weight gradients",
    "activation_func_fp8_input_store": "activations that are stored in FP8",
    "moe_paged_stash": "paged activations",
}
"""Fields of Megatron-Core's config that the experts do not implement."""
_OFFLOADED = {"expert_fc1", "moe_act", "fused_group_mlp"}  # parts that `offload_modules` may name


def activation_of(config: TransformerConfig) -> Activation:
    """The activation of a model; ValueError for one that the kernels do not compute."""
    gated = config.gated_linear_unit
    kind = _KINDS.get((gated, config.activation_func))
    if kind is None:
        name = getattr(config.activation_func, "__name__", config.activation_func)
        raise ValueError(
            f"activation_func={name} with gated_linear_unit={gated}: phalanx computes silu, gelu "
            "and quick_gelu with a gate, and squared_relu without"
        )
    limit = config.activation_func_clamp_value or 0.0
    offset = config.glu_linear_offset
    return Activation(kind, limit=limit, offset=offset) if gated else Activation(kind)


def check(config: TransformerConfig, pg_collection: ProcessGroupCollection) -> None:
    """Raise ValueError, with the name of the option, for what the experts do not implement."""
    for name, what in _REFUSED.items():
        if getattr(config, name, None):
            raise ValueError(f"{name}: phalanx's experts do not support {what}: leave it out")
    if config.fine_grained_activation_offloading:
        for name in sorted(_OFFLOADED.intersection(config.offload_modules or ())):
            raise ValueError(
                f"offload_modules={name}: phalanx's experts offload no activations: leave it out"
            )
    if pg_collection.expt_tp.size() > 1:
        raise ValueError(
            "expert_tensor_parallel_size: phalanx's experts are whole on each rank: set it to 1"
        )


class StackedLinear(nn.Module):
    """Parameters of one linear layer of all L local experts: weight [L, O, I], bias [L, O] or None.

    A module of its own, because Megatron-Core exempts parameters from weight decay that are vectors
    or whose names end with `.bias`.
    """

    def __init__(self, config: TransformerConfig, experts: int, width: int, depth: int) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        where: dict[str, Any] = dict(dtype=config.params_dtype, device=device)
        self.weight = nn.Parameter(torch.empty(experts, width, depth, **where))
        biased = config.add_bias_linear
        self.bias = nn.Parameter(torch.zeros(experts, width, **where)) if biased else None
        for parameter in self.parameters():
            # Gradients are reduced over expert-data parallelism.
            parameter.allreduce = False  # type: ignore[attr-defined]


class Experts(MegatronModule):
    """The L experts of a rank, with the constructor and the call of Megatron-Core's experts.

    Parameters in `config.params_dtype`: linear_fc1.weight [L, 2F, D] as [gate; up], or [L, F, D]
    without a gate; linear_fc2.weight [L, D, F]; with `config.add_bias_linear` linear_fc1.bias [L,
    2F or F] and linear_fc2.bias [L, D]. Checkpoints have the keys and shapes of TEGroupedMLP and
    SequentialMLP.

    Args:
        pg_collection: process groups with `ep`, `expt_tp` and `expt_dp`.
        name: not used.

    Raises:
        ValueError: an option of the config that the experts do not implement, by its name.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        name: str | None = None,
    ) -> None:
        super().__init__(config=config)
        check(config, pg_collection)
        self.options = ExpertOptions(
            activation=activation_of(config), accumulate=config.gradient_accumulation_fusion
        )
        self.groups = pg_collection
        L, D, width = num_local_experts, config.hidden_size, config.moe_ffn_hidden_size
        wide = 2 * width if config.gated_linear_unit else width
        self.linear_fc1 = StackedLinear(config, L, wide, D)
        self.linear_fc2 = StackedLinear(config, L, D, width)
        if config.perform_initialization:
            self._initialize()
        self.register_load_state_dict_pre_hook(without_extra_states)

    @torch.no_grad()
    def _initialize(self) -> None:
        fc1, fc2 = self.linear_fc1.weight, self.linear_fc2.weight
        tracker, name = get_cuda_rng_tracker(), get_expert_parallel_rng_tracker_name()
        with tracker.fork(name) if fc1.is_cuda else nullcontext():
            for e in range(len(fc1)):
                self.config.init_method(fc1[e])
                self.config.output_layer_init_method(fc2[e])

    @property
    def weights(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        fc1, fc2 = self.linear_fc1, self.linear_fc2
        return fc1.weight, fc2.weight, fc1.bias, fc2.bias

    @property
    def resolved_backend(self) -> str:
        w1, w2, *_ = self.weights
        return resolve_backend(w1, w1, w2, **self.options).backend

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
    ) -> tuple[Tensor, None]:
        """Outputs of sorted rows [S, D] by their probabilities [S], and no bias.

        `tokens_per_expert`: [L] rows of each expert, on the device or on the host.
        """
        rows_SD = permuted_local_hidden_states
        routing = SortedRows(torch.as_tensor(tokens_per_expert), permuted_probs.reshape(-1))
        return api.experts(rows_SD, routing, self.weights, self.options), None

    def backward_dw(self) -> None:
        """Nothing: weight gradients are computed in the backward pass."""

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """The parameters under the keys of TEGroupedMLP, split over experts.

        Raises ValueError for `singleton_local_shards`, one tensor per expert.
        """
        if (metadata or {}).get("singleton_local_shards"):
            raise ValueError(
                "stacked experts have no singleton_local_shards: leave it out of metadata"
            )
        return sharded(dict(self.named_parameters()), self.groups, prefix, sharded_offsets)
