"""Quantization recipes: which operands of a linear layer are quantized, and in which blocks.

`Fp8Block` is the recipe of DeepSeek-V3 (arXiv 2412.19437, section 3.3) with scales that are powers
of two, as Transformer Engine's Float8BlockScaling has them by default: activations and gradients
have a scale for 128 channels of a row, weights one for 128 x 128, and operands of weight gradients,
whose contraction runs over tokens, one for 128 tokens x 128 channels. `kernels.quantize.blocks`
defines how a block becomes FP8. `Microscaling` has Blackwell's recipes, as Transformer Engine
defines them: `extras.microscaling.mxfp8` and `extras.microscaling.nvfp4`.
"""

from dataclasses import dataclass, fields
from typing import ClassVar, Literal, get_args

import torch

from phalanx.configs.schema import PrecisionConfig
from phalanx.configs.tables.recipes import RECIPES

GradFormat = Literal["e4m3", "e5m2"]

FORMATS: dict[str, torch.dtype] = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class Fp8Block:
    """Switches of the recipe `fp8_block`; ValueError for an unknown value of one."""

    grad_format: GradFormat = "e4m3"  # e5m2 reaches 14 powers of two further down, has a bit less
    wgrad: Literal["fp8", "bf16"] = "fp8"  # precision of the operands of weight gradients
    hidden: Literal["bf16", "fp8"] = "bf16"  # of the activation's input, saved for backward
    format: ClassVar[str] = "fp8_block"  # its entry in `configs.tables.recipes`

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True)
class Microscaling:
    """A recipe with blocks along the contraction of each product, such as MXFP8 and NVFP4.

    Both operands of all products are quantized from unquantized values, never from quantized ones.
    With NVFP4 weights have blocks of 16 x 16, both operands of weight gradients are rotated, and
    gradients are rounded stochastically. ValueError for an unknown format or value of a switch.
    """

    format: str  # its entry in `configs.tables.recipes`
    wgrad: Literal["fp8", "bf16"] = "fp8"  # operands of weight gradients
    stochastic: bool = True  # NVFP4 rounds gradients stochastically, without bias
    hidden: ClassVar[Literal["bf16"]] = "bf16"

    def __post_init__(self) -> None:
        known = [name for name, facts in RECIPES.items() if facts.microscaling]
        if self.format not in known:
            raise ValueError(f"format={self.format!r} is unknown: use {' or '.join(known)}")
        _check(self)


type Recipe = Fp8Block | Microscaling


def _check(recipe: Recipe) -> None:
    for field in fields(recipe):
        known, value = get_args(field.type), getattr(recipe, field.name)
        if known and value not in known:
            raise ValueError(f"{field.name}={value!r} is unknown: use {' or '.join(known)}")


def fp8_block(p: PrecisionConfig) -> Fp8Block:
    """The recipe `fp8_block` of a run."""
    return Fp8Block(
        grad_format=p.grad_format,  # type: ignore[arg-type]
        wgrad=p.wgrad,  # type: ignore[arg-type]
        hidden=p.hidden,  # type: ignore[arg-type]
    )
