"""Precision of a run for the modules of its model: one dtype, and the recipe of each layer."""

from dataclasses import replace
from pkgutil import resolve_name

import torch

from phalanx.configs.formats import in_bf16, quantized_layer, recipe_facts
from phalanx.configs.schema import Config
from phalanx.kernels.quantize.recipe import Recipe
from phalanx.moe.layer import MoEOptions


def compute_dtype(cfg: Config) -> torch.dtype:
    """Dtype of activations, and of weights before they are multiplied or quantized."""
    return torch.bfloat16 if in_bf16(cfg) else torch.float32


def recipe(cfg: Config, layer: int) -> Recipe | None:
    """Quantization recipe of a layer's linear layers; None for layers that are not quantized.

    Args:
        cfg: valid config.
        layer: number of the layer from 0, over all pipeline stages; prediction layers come after
            the last decoder layer.
    """
    if not quantized_layer(cfg, layer):
        return None
    built: Recipe = resolve_name(recipe_facts(cfg).build)(cfg.precision)
    return built


def with_recipe(options: MoEOptions, recipe: Recipe | None, *, dense: bool) -> MoEOptions:
    """Options of a layer with a recipe.

    Args:
        options: options without a recipe.
        recipe: recipe of the routed experts.
        dense: use it for shared experts, dense MLPs and attention's projections too.
    """
    return replace(options, spec=replace(options.spec, recipe=recipe), fp8_dense=dense)
