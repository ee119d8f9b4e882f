"""Specifications of Megatron-Core's models whose MoE layers have the experts of this project."""

from dataclasses import replace
from functools import partial
from typing import Any

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

from phalanx.adapters.megatron.experts import Experts
from phalanx.adapters.megatron.layer import SymmMoELayer
from phalanx.configs import programs


def block_spec(
    config: TransformerConfig, vp_stage: int | None = None, *, layer: type[MoELayer] = MoELayer
) -> TransformerBlockSubmodules:
    """Megatron-Core's specification of the layers of a pipeline stage, with these experts.

    Args:
        config: of the model, which says which layers have experts.
        vp_stage: virtual pipeline stage.
        layer: `MoELayer`, or `SymmMoELayer` to replace the dispatcher too.
    """
    block = get_gpt_decoder_block_spec(config, _uses_te(config), vp_stage=vp_stage)
    return replace(block, layer_specs=[_with_experts(s, layer) for s in block.layer_specs])


class SpecifiedLayer(TransformerLayer):
    """A layer of Megatron-Core that chooses its parts by the config: dense, or with experts.

    A specification that is imported by name has no config to choose by.

    Args:
        config: of the model.
        layer_number: 1-based number in the pipeline stage.
        pg_collection: process groups.
        vp_stage: virtual pipeline stage.
        moe: class of MoE layers.
        options: further arguments of Megatron-Core's layer.
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

    Raises:
        ValueError: they are to be, and it is not installed: Megatron-Core would call None.
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


spec = ModuleSpec(module=SpecifiedLayer)
"""Layers with these experts, and Megatron-Core's dispatcher."""
symm_spec = ModuleSpec(module=SpecifiedLayer, params={"moe": SymmMoELayer})
"""Layers with these experts and their exchange."""
