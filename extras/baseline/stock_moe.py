"""The baseline: Megatron-Core's stock MoELayer under the same trainer (kernels.backend=megatron).

It has the all-to-all dispatcher, with Transformer Engine's grouped GEMM, fused permutation and
fused router where that is installed, else sequential experts. The changes are those without which a
comparison would be unfair, wrong or impossible: counts, forced routing, optimizer layout, expert
biases, splits without CUDA.
"""

import copy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from phalanx.configs.schema import RouterConfig
from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.limits import Refusal
from phalanx.kernels.routing.balance import KeepsPrecision, z_loss
from phalanx.moe.layer import MoEOptions
from phalanx.moe.model.megatron_config import QUICK_GELU_SLOPE
from phalanx.moe.router.balance import Statistics
from phalanx.moe.router.forced import Replay
from phalanx.moe.router.fused_topk import forces_choice
from phalanx.moe.router.router import forced_choice
from phalanx.moe.shared_experts import MEGATRON

_MODULES = {"moe_act": "moe_act", "moe": "moe", "mlp": "shared_experts"}
"""Modules that it recomputes, by the names of `run.recompute`."""
_LOSS_NAMES = {
    "load_balancing_loss": "aux_loss",
    "seq_load_balancing_loss": "seq_aux_loss",
    "global_load_balancing_loss": "global_aux_loss",
}


def inexpressible(options: MoEOptions) -> Refusal:
    """Options that the stock layer cannot express, each with the override that it needs."""
    moe, r, instead = options.moe, options.moe.router, "or kernels.backend=torch"
    reasons = []
    if r.score == "sigmoid" and not r.normalize and moe.top_k > 1:
        reasons.append(
            "kernels.backend=megatron always normalises sigmoid scores: "
            f"set model.moe.router.normalize=true {instead}"
        )
    if r.group_topk < r.groups:
        if moe.top_k < r.group_topk:
            reasons.append(
                "kernels.backend=megatron cannot rank groups by less than one expert each: "
                f"set model.moe.router.group_topk={moe.top_k} {instead}"
            )
        post_softmax = r.score == "softmax" and r.softmax_over == "all" and r.normalize
        if post_softmax and moe.top_k // r.group_topk > 1:
            reasons.append(
                "kernels.backend=megatron ranks groups by logits if it normalises probabilities: "
                "set model.moe.router.softmax_over=topk or model.moe.router.normalize=false "
                f"{instead}"
            )
    a = options.spec.activation
    if a.kind == "quick_geglu" and a.alpha != QUICK_GELU_SLOPE:
        reasons.append(
            f"kernels.backend=megatron has no quick_geglu of slope {a.alpha}: "
            f"set model.moe.activation_alpha={QUICK_GELU_SLOPE} {instead}"
        )
    if a.limit and not a.gated:
        reasons.append(
            f"kernels.backend=megatron does not clamp {a.kind}: "
            f"set model.moe.activation_limit=0 {instead}"
        )
    return "; ".join(reasons) or None


class StockRouter(KeepsPrecision, TopKRouter):
    """Megatron-Core's router with exact counts, our statistics and our forced balance."""

    local_tokens_per_expert: Tensor
    num_experts: int
    topk: int
    is_mtp_layer: bool
    tp_cp_group: dist.ProcessGroup
    tp_dp_cp_group: dist.ProcessGroup

    def __init__(
        self,
        *,
        config: TransformerConfig,
        options: RouterConfig,
        pg_collection: ProcessGroupCollection,
        is_mtp_layer: bool = False,
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection, is_mtp_layer=is_mtp_layer)
        self.options = options
        self.statistics = Statistics(self.num_experts)
        if self.enable_expert_bias:  # fp32 there, which stops counting at 2**24
            self.local_tokens_per_expert = self.local_tokens_per_expert.long()
        chosen = forced_choice(options, experts=self.num_experts, top_k=self.topk)
        if chosen is not None:
            self.router_replay = _ForcedReplay(chosen, pg_collection.ep)

    def set_layer_number(self, layer_number: int) -> None:
        """1-based number of the layer, within its kind (decoder or prediction)."""
        super().set_layer_number(layer_number)
        choice = getattr(self.router_replay, "choice", None)
        if isinstance(choice, Replay):
            choice.load_layer(layer_number, self.is_mtp_layer)

    def get_aux_loss_coeff(self, aux_loss_type: str) -> float:
        """Coefficient of a loss; Megatron-Core divides the global one by the replicas twice."""
        coefficient = super().get_aux_loss_coeff(aux_loss_type)
        if aux_loss_type == "global_aux_loss":
            return coefficient * (self.tp_dp_cp_group.size() // self.tp_cp_group.size())
        return coefficient

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        if self.training and torch.is_grad_enabled():
            with torch.no_grad():
                count_E = routing_map.sum(0)
                self.statistics.add_counts(count_E)
                if self.enable_expert_bias:
                    self.local_tokens_per_expert += count_E

    def attach_and_log_load_balancing_loss(
        self,
        activation: Tensor,
        aux_loss_coeff: float,
        aux_loss: Tensor,
        aux_loss_name: str,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        name = _LOSS_NAMES[aux_loss_name]
        self.statistics.add_loss(name, aux_loss / getattr(self.options, name))
        return super().attach_and_log_load_balancing_loss(
            activation, aux_loss_coeff, aux_loss, aux_loss_name, *args, **kwargs
        )

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        if self.options.z_loss and self.training and torch.is_grad_enabled():
            share = z_loss(logits.detach()) / self.tp_cp_group.size()
            self.statistics.add_loss("z_loss", share)
        return super().apply_z_loss(logits, padding_mask)


class _ForcedReplay(torch.nn.Module):
    """Forced choices, by the hook through which Megatron-Core's router replays recorded ones."""

    def __init__(self, choice: torch.nn.Module, group: Any) -> None:
        super().__init__()
        self.choice, self.group, self.layer_number = choice, group, None

    def get_replay_topk(self, scores: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        tokens = scores.size(0)
        idx_TK = self.choice(tokens, self.group.rank() * tokens)
        return scores.gather(1, idx_TK), idx_TK


class _AlltoAll(MoEAlltoAllTokenDispatcher):
    """The stock dispatcher, whose splits are host integers on every device.

    Megatron-Core converts them when it copies them from a GPU; gloo rejects the tensors that remain
    on a host without one.
    """

    def _maybe_dtoh_and_synchronize(
        self, point: str, tokens_per_expert: Tensor | None = None
    ) -> Tensor | None:
        tokens_per_expert = super()._maybe_dtoh_and_synchronize(point, tokens_per_expert)
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            splits = getattr(self, name)
            if isinstance(splits, Tensor) and splits.device.type == "cpu":
                setattr(self, name, splits.numpy())
        return tokens_per_expert


class StockMoE(MoELayer):
    """Megatron-Core's MoELayer, built from the same options as `moe.layer.MoE`.

    Raises:
        ValueError: options that the stock layer cannot express.
    """

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        is_mtp_layer: bool = False,
        name: str | None = None,
        *,
        options: MoEOptions,
    ) -> None:
        if reason := inexpressible(options):
            raise ValueError(reason)
        if "moe_act" in options.recompute and not HAVE_TE:
            raise ValueError("run.recompute=moe_act needs Transformer Engine; set moe instead")
        config = _tuned(config, options)
        provider = TESpecProvider() if HAVE_TE else LocalSpecProvider()
        super().__init__(
            config,
            MoESubmodules(
                experts=provider.grouped_mlp_modules(HAVE_TE),
                shared_experts=MEGATRON,
                router=partial(StockRouter, options=options.moe.router),
            ),
            pg_collection=pg_collection,
            is_mtp_layer=is_mtp_layer,
            name=name,
        )
        self.token_dispatcher = _AlltoAll(
            self.num_local_experts,
            self.local_expert_indices,
            config=config,
            pg_collection=pg_collection,
        )
        for parameter in self.experts.parameters():
            parameter.allreduce = False  # as in moe.experts
            # Megatron-Core marks biases for a sum over tensor ranks, which hold other experts.
            parameter.sequence_parallel = False
        for module in self.experts.modules():
            # Experts are not tensor parallel. Without this their linear layers return the view of a
            # collective of one, to which SequentialMLP cannot add a bias in place.
            if hasattr(module, "explicit_expert_comm"):
                module.explicit_expert_comm = True


def _tuned(config: TransformerConfig, options: MoEOptions) -> TransformerConfig:
    config = copy.copy(config)
    config.moe_grouped_gemm = config.moe_permute_fusion = HAVE_TE
    # The fused router knows no choice but its own.
    config.moe_router_fusion = HAVE_TE and not forces_choice(options.moe.router)
    # Sequential experts return their gradients: one without tokens would multiply no rows.
    config.gradient_accumulation_fusion &= HAVE_TE
    if modules := [_MODULES[name] for name in _MODULES if name in options.recompute]:
        config.recompute_granularity, config.recompute_modules = "selective", modules
    config.bias_activation_fusion = HAVE_TE and _fusable(
        options.spec.activation, options.moe.shared_ffn
    )
    return config


def _fusable(activation: Activation, shared_ffn: int) -> bool:
    # The fused SwiGLU ignores clamp and offset; the fused quick-GeGLU needs probabilities, which
    # shared experts have not.
    if activation.kind == "swiglu":
        return not (activation.limit or activation.offset)
    return activation.kind == "quick_geglu" and not shared_ffn
