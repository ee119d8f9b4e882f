"""The precision of a run as modules of its model take it: one dtype, and the recipe of a layer."""

from dataclasses import replace

import torch

from phalanx.configs.formats import MICROSCALING, in_bf16, quantized_layer
from phalanx.configs.schema import Config
from phalanx.kernels.quantize.recipe import Fp8Block, Microscaling, Recipe
from phalanx.moe.layer import MoEOptions


def compute_dtype(cfg: Config) -> torch.dtype:
    """Of activations, and of weights as they are multiplied or quantized."""
    return torch.bfloat16 if in_bf16(cfg) else torch.float32


def recipe(cfg: Config, layer: int) -> Recipe | None:
    """How operands of a layer's linear layers are quantized; None: they are not.

    Args:
        cfg: valid.
        layer: from 0, over all pipeline stages; those of multi-token prediction come after the
            last decoder layer.
    """
    if not quantized_layer(cfg, layer):
        return None
    p = cfg.precision
    if p.recipe in MICROSCALING:
        form, wgrad = p.recipe, p.wgrad
        return Microscaling(form, wgrad, p.stochastic_rounding)  # type: ignore[arg-type]
    return Fp8Block(
        grad_format=p.grad_format,  # type: ignore[arg-type]
        wgrad=p.wgrad,  # type: ignore[arg-type]
        wgrad_blocks=p.wgrad_blocks,  # type: ignore[arg-type]
        hidden=p.hidden,  # type: ignore[arg-type]
    )


def with_recipe(options: MoEOptions, by: Recipe | None, *, dense: bool) -> MoEOptions:
    """Options of a layer with this recipe.

    Args:
        options: without one.
        by: of the routed experts.
        dense: also of shared experts, dense MLPs and attention's projections.
    """
    return replace(options, spec=replace(options.spec, recipe=by), fp8_dense=dense)
