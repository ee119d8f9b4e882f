"""The recipes of `precision.recipe`: one entry each, from which rules, estimates and models derive.

An entry names the function that builds its kernel recipe by import path, so that reading it does
not import torch. `configs.formats` answers questions about a configuration.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class RecipeFacts:
    """Facts of a recipe."""

    meaning: str  # short description, in Markdown, for the documentation
    bf16: bool = True  # bf16 weights with fp32 masters; else all is fp32
    build: str = ""
    """`module:function` from `configs.schema.PrecisionConfig` to `kernels.quantize.recipe.Recipe`;
    empty: none."""
    emulation: str = ""
    """Path of `(exact: Backend, recipe: Recipe) -> Backend`: the recipe over a backend without it.
    """
    switches: tuple[str, ...] = ()  # knobs of `precision` that the recipe has
    fp8_blocks: bool = False  # operands of FP8 in blocks of 128, also of tokens in transit
    microscaling: bool = False  # blocks along the contraction, scales by Blackwell


_MICROSCALING = "phalanx.extras.microscaling"
_SWITCHES = ("wgrad", "dense", "bf16_first_layers", "bf16_last_layers")

RECIPES: dict[str, RecipeFacts] = {
    "bf16": RecipeFacts("bf16 with an fp32 router and fp32 masters"),
    "fp32": RecipeFacts("fp32 throughout, for checks", bf16=False),
    "fp8_block": RecipeFacts(
        "e4m3, whose scales are powers of two, for 128 channels of a token and for 128 x 128 of "
        "weights (DeepSeek-V3, arXiv 2412.19437)",
        build="phalanx.kernels.quantize.recipe:fp8_block",
        emulation="phalanx.kernels.expert_mlp.fp8:EmulatedFP8",
        switches=(*_SWITCHES, "grad_format", "hidden", "dispatch", "weights"),
        fp8_blocks=True,
    ),
    "mxfp8": RecipeFacts(
        "e4m3 in blocks of 32",
        build=f"{_MICROSCALING}.recipe:build",
        emulation=f"{_MICROSCALING}.emulated:EmulatedMicroscaling",
        switches=_SWITCHES,
        microscaling=True,
    ),
    "nvfp4": RecipeFacts(
        "e2m1 in blocks of 16 (arXiv 2509.25149)",
        build=f"{_MICROSCALING}.recipe:build",
        emulation=f"{_MICROSCALING}.emulated:EmulatedMicroscaling",
        switches=(*_SWITCHES, "stochastic_rounding"),
        microscaling=True,
    ),
}
"""Recipes keyed by the value of `precision.recipe`."""
