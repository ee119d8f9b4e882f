"""Number formats."""

from dataclasses import dataclass

from phalanx.configs.fields import knob
from phalanx.configs.tables.recipes import RECIPES


@dataclass
class PrecisionConfig:
    """Number formats. All knobs but `recipe` are switches of recipes (docs/precision.md)."""

    recipe: str = knob(
        "bf16",
        choices=(RECIPES,),
        formerly="run.precision",
        group="precision",
    )
    """Recipe, an entry of configs/tables/recipes.py; set it as a group: `precision=fp8_block`.

    Recipes other than `bf16` and `fp32` are `bf16` whose linear layers multiply quantized operands
    with fp32 sums.
    """
    grad_format: str = knob("e4m3", choices=("e4m3", "e5m2"))
    """FP8 format of gradients: `e4m3`, or `e5m2`, which has one bit less.

    It reaches 14 powers of two further down, for gradients that become zero within their blocks.
    """
    wgrad: str = knob("fp8", choices=("fp8", "bf16"))
    """Operands of weight gradients: `fp8`, which is the recipe's format, or `bf16`.

    These sums run over tokens and enter the weights directly; `bf16` rules FP8 out as a cause. It
    is for comparison: only `kernels=torch` and `kernels=reference` have it, which emulate recipes.
    """
    hidden: str = knob("bf16", choices=("bf16", "fp8"))
    """Format in which the input of the experts' activation is saved for backward: `bf16` or `fp8`.

    It is most of what a layer saves. `fp8` rounds the input of gradients, not the output.
    """
    dispatch: str = knob("auto", choices=("auto", "bf16", "fp8"))
    """Format of tokens and gradients on their way to the experts: `bf16`, or `fp8` with its scales.

    `auto` is `fp8` with `fp8_block`, whose experts would round them anyway, so that no bit changes;
    with `precision.wgrad=bf16` some do, and it is `bf16`. Sums travel back in bf16.
    """
    dense: str = knob("fp8", choices=("fp8", "bf16"))
    """Attention projections, dense MLPs, shared experts: `fp8`, as the routed experts, or `bf16`.

    With `kernels=megatron` they are bf16 in any case, as those of linear attention always are.
    """
    bf16_first_layers: int = 0
    """Number of first decoder layers in bf16, as Nemotron-H has some (arXiv 2504.03624)."""
    bf16_last_layers: int = 0
    """Number of last decoder layers in bf16; layers of multi-token prediction do not count."""
    stochastic_rounding: bool = True
    """Round gradients of `nvfp4` up or down at random, so that they are right in the mean."""
    weights: int | str = knob("auto", choices=("auto", "scratch", "resident"))
    """Number of layers that keep FP8 copies of weights, `resident` for all, `scratch` for none.

    They are spread evenly over the model, make the copies once a step and need 2 bytes a parameter,
    as GEMMs read them in two layouts; other layers make them for each use, in memory that they
    share. `auto` has as many as fit.
    """
