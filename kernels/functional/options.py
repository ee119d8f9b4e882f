"""Options that the functions and modules of experts share, and the choice of kernels by them."""

import functools
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from pkgutil import resolve_name
from typing import Any, NamedTuple, TypedDict

import torch

from phalanx.configs.schema import PrecisionConfig
from phalanx.configs.tables.backends import EXPERT_BACKENDS
from phalanx.configs.tables.recipes import RECIPES
from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.custom_ops import RECIPE_TYPES, encode
from phalanx.kernels.expert_mlp.mlp_spec import Margins, MLPSpec
from phalanx.kernels.expert_mlp.providers import names
from phalanx.kernels.quantize.recipe import Fp8Block, Recipe
from phalanx.kernels.registry import Facts, KernelUnavailable, resolve


class KernelOptions(TypedDict, total=False):
    """Keyword arguments of functions and modules of experts, about their kernels."""

    recipe: str | Recipe | None
    """`fp8_block`, `mxfp8` or `nvfp4`: products of quantized operands; None: none are."""
    accumulate: bool
    """Gradients of parameters with a `main_grad` are added to that, and
    `grad_added_to_main_grad` is set, as Megatron-Core expects."""
    margins: Margins
    """SMs that the kernels of each pass leave free."""


class ExpertOptions(KernelOptions, total=False):
    """Keyword arguments of the functions of experts."""

    activation: str | Activation
    """A key of `ACTIVATIONS`, or an `Activation` with constants; `swiglu` by default."""
    backend: str
    """`fused`, `cudnn`, `torch`, `reference`, or `auto`: the best for the device and the sizes."""
    layout: str
    """A key of `LAYOUTS`: the order of the weights in memory; others than `halves` are copied in
    each call."""


_DEFAULTS: dict[str, Any] = dict(
    activation="swiglu",
    backend="auto",
    recipe=None,
    layout="halves",
    accumulate=False,
    margins=Margins(),
)


def with_defaults(options: KernelOptions) -> dict[str, Any]:
    """All options of experts.

    Raises:
        TypeError: an option that does not exist.
    """
    return filled(options, _DEFAULTS, "experts")


def filled(options: Mapping[str, Any], defaults: dict[str, Any], owner: str) -> dict[str, Any]:
    """All options of the owner.

    Raises:
        TypeError: an option that does not exist.
    """
    for name in options:
        if name not in defaults:
            raise TypeError(f"{name} is no option of {owner}: use {', '.join(defaults)}")
    return defaults | dict(options)


def activation_named(activation: str | Activation) -> Activation:
    """The activation, with the constants of its kind if only that is given.

    Raises:
        ValueError: unknown kind.
    """
    return Activation(activation) if isinstance(activation, str) else activation


def recipe_named(recipe: str | Recipe | None) -> Recipe | None:
    """The recipe, with the switches of a run by default if only its name is given.

    Raises:
        ValueError: unknown name.
    """
    if not isinstance(recipe, str):
        return recipe
    known = [name for name, facts in RECIPES.items() if facts.build]
    if recipe not in known:
        raise ValueError(f"recipe={recipe!r} is unknown: use one of {', '.join(known)}, or None")
    made: Recipe = resolve_name(RECIPES[recipe].build)(PrecisionConfig(recipe=recipe))
    return made


def check_backend(backend: str) -> None:
    """Raise ValueError for a backend that does not exist."""
    if backend not in (*names(), "auto"):
        raise ValueError(f"backend={backend} is unknown: use {', '.join(names())} or auto")


# Types that torch.compile cannot pass to `choose` as constants.
_FIELDS = {t: tuple(f.name for f in fields(t)) for t in (Activation, Margins, *RECIPE_TYPES)}
_BUILD: dict[str, Callable[..., Any]] = {"float": float.fromhex}
_BUILD |= {t.__name__: t for t in _FIELDS}


def constant(value: Any) -> Any:
    """An option or a size as a constant, also under torch.compile with dynamic shapes."""
    if isinstance(value, float):
        return "float", value.hex()
    if isinstance(value, int) and not isinstance(value, bool):
        return operator.index(value)
    names = _FIELDS.get(type(value))
    if names is None:
        return value
    return (type(value).__name__, *[constant(getattr(value, name)) for name in names])


def decoded(constant: Any) -> Any:
    """The inverse of `constant`."""
    if not isinstance(constant, tuple):
        return constant
    kind, *values = constant
    return _BUILD[kind](*map(decoded, values))


_CHOICES = ("activation", "backend", "recipe", "accumulate", "margins")


def constants(options: dict[str, Any]) -> tuple[Any, ...]:
    """The options on which the specification depends, as constants."""
    return tuple([constant(options[name]) for name in _CHOICES])


class Problem(NamedTuple):
    """Facts about tensors on which the choice of kernels depends. Sizes of 0 are unknown."""

    device: torch.device
    dtype: torch.dtype
    hidden: int
    ffn: int
    experts: int
    slots: int
    """K."""
    sorted_rows: bool
    """Rows are sorted by expert, without rows between experts."""


@torch.compiler.assume_constant_result
def choose(options: tuple[Any, ...], problem: tuple[Any, ...]) -> tuple[str, str, int]:
    """Specification for custom ops, backend, and H / F.

    Args:
        options: result of `constants`.
        problem: fields of a `Problem`.

    Raises:
        ValueError: an unknown value of an option, or kernels that cannot run here.
    """
    return _chosen(options, Problem(*problem))


@functools.cache
def _chosen(options: tuple[Any, ...], problem: Problem) -> tuple[str, str, int]:
    spec = specification(options, problem)
    return encode(spec), spec.backend, spec.activation.facts.halves


@functools.cache
def specification(options: tuple[Any, ...], problem: Problem) -> MLPSpec:
    """`choose` as a value."""
    activation, backend, recipe, accumulate, margins = map(decoded, options)
    activation, recipe = activation_named(activation), recipe_named(recipe)
    check_backend(backend)
    device = problem.device
    facts = Facts(
        device=device.type,
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        dtype=problem.dtype,
        fp8=isinstance(recipe, Fp8Block),
        recipe=_name_of(recipe),
        wgrad="fp8" if recipe is None else recipe.wgrad,
        hidden=problem.hidden,
        ffn=problem.ffn,
        experts=problem.experts,
        slots=problem.slots,
        activation=activation.kind,
        activation_alpha=activation.alpha,
        activation_limit=activation.limit,
        activation_offset=activation.offset,
    )
    try:
        chosen = resolve("grouped_mlp", backend, facts).backend
    except KernelUnavailable as refusal:
        raise KernelUnavailable(_without_knobs(str(refusal))) from None
    if problem.sorted_rows and EXPERT_BACKENDS[chosen].pads_rows_to > 1:
        if backend != "auto":
            raise ValueError(f"backend={backend} pads the rows of each expert: use backend=torch")
        chosen = resolve("grouped_mlp", "torch", facts).backend
    return MLPSpec(activation, chosen, margins, accumulate, recipe)


def _without_knobs(text: str) -> str:
    """A reason in which knobs of a run are called as arguments are."""
    return re.sub(r"\b(?:kernels|model(?:\.moe)?|precision)\.(?=\w)", "", text)


def _name_of(recipe: Recipe | None) -> str:
    """The key of a recipe in `configs.tables.recipes.RECIPES`."""
    if recipe is None:
        return "bf16"
    return "fp8_block" if isinstance(recipe, Fp8Block) else recipe.format
