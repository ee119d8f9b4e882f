"""Specifications of Megatron-Core's models whose MoE layers have the experts of this project.

`SymmMoELayer` also has its exchange of tokens, beside Megatron-Core's router and shared experts.

Legend: T tokens of a rank, K experts per token, E experts of all ranks, D hidden.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    get_transformer_layer_offset,
)
from torch import Tensor

from phalanx.adapters.expert_groups import group_of
from phalanx.adapters.megatron.experts import Experts
from phalanx.configs import programs
from phalanx.kernels import api
from phalanx.kernels.api import TopK


class SymmMoELayer(MoELayer):
    """The stock layer with tokens exchanged within kernels over NVLink, on gloo by all-to-all.

    It takes the constructor arguments of Megatron-Core's layer. Nothing is read on the host. Every
    rank of the expert-parallel group has as many tokens as any other.

    Raises:
        ValueError: overlapped shared experts, or experts other than `Experts`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.shared_expert_overlap:
            raise ValueError("moe_shared_expert_overlap: symm_spec does not overlap: set it false")
        if not isinstance(self.experts, Experts):
            raise ValueError(
                "experts: SymmMoELayer is built with phalanx.adapters.megatron.Experts"
            )
        self._group = group_of(self.ep_group, self.config.params_dtype)
        self._idx_TK: Tensor | None = None

    def preprocess(
        self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Hidden states, and the [T, K] probabilities of each token's experts."""
        chosen_TE = routing_map.bool()
        ranked_TE = torch.where(chosen_TE, probs.detach(), -1.0)
        idx_TK = ranked_TE.topk(self.config.moe_router_topk, dim=-1, sorted=False).indices
        # A token that was dropped or is padding has fewer experts.
        self._idx_TK = torch.where(chosen_TE.gather(1, idx_TK), idx_TK, -1)
        return hidden_states, probs.gather(1, idx_TK)

    def dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Nothing: tokens are exchanged with the computation."""
        return hidden_states, probs

    def routed_experts_compute(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        idx_TK, self._idx_TK = self._idx_TK, None
        x_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
        experts = self.experts
        assert idx_TK is not None  # `preprocess` has noted it
        routing = TopK(idx_TK, probs)
        out_TD = api.experts(x_TD, routing, experts.weights, experts.options, self._group)
        return out_TD.view_as(hidden_states), None

    def combine(self, output: Tensor) -> Tensor:
        """Nothing: sums are back already."""
        return output

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        return output if shared_expert_output is None else output + shared_expert_output


def block_spec(
    config: TransformerConfig, vp_stage: int | None = None, *, layer: type[MoELayer] = MoELayer
) -> TransformerBlockSubmodules:
    """Megatron-Core's specification of the layers of a pipeline stage, with these experts.

    `layer`: `MoELayer`, or `SymmMoELayer` to replace the dispatcher too.
    """
    block = get_gpt_decoder_block_spec(config, _uses_te(config), vp_stage=vp_stage)
    return replace(block, layer_specs=[_with_experts(s, layer) for s in block.layer_specs])


class SpecifiedLayer(TransformerLayer):
    """A layer of Megatron-Core that chooses its parts by the config: dense, or with experts.

    A specification that is imported by name has no config to choose by. `moe`: class of MoE layers;
    `options`: further arguments of Megatron-Core's layer.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int = 1,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
        *,
        moe: type[MoELayer] = MoELayer,
        **options: Any,
    ) -> None:
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        before = get_transformer_layer_offset(config, vp_stage, groups.pp.rank())
        stock = get_gpt_decoder_layer_specs(config, _uses_te(config), config.normalization)
        super().__init__(
            config,
            _with_experts(stock[before + layer_number - 1], moe).submodules,
            layer_number,
            pg_collection=groups,
            vp_stage=vp_stage,
            **options,
        )


def _uses_te(config: TransformerConfig) -> bool:
    """True if the layers beside the experts are Transformer Engine's, as is Megatron's default.

    ValueError if it is not installed: Megatron-Core would call None.
    """
    uses = config.transformer_impl == "transformer_engine"
    if uses and not HAVE_TE:
        raise ValueError(
            "transformer_impl=transformer_engine needs Transformer Engine, which cannot be "
            "imported here: set --transformer-impl local, or "
            f"{programs.install('transformer-engine')}"
        )
    return uses


def _with_experts(layer_spec: ModuleSpec, layer: Any) -> ModuleSpec:
    parts: Any = layer_spec.submodules
    mlp = parts.mlp
    if getattr(mlp, "func", None) is not MoELayer:
        return layer_spec
    submodules = replace(mlp.keywords["submodules"], experts=Experts)
    built: Any = partial(layer, **mlp.keywords | {"submodules": submodules})
    return replace(layer_spec, submodules=replace(parts, mlp=built))


spec = ModuleSpec(module=SpecifiedLayer)  # Megatron-Core's dispatcher
symm_spec = ModuleSpec(module=SpecifiedLayer, params={"moe": SymmMoELayer})
