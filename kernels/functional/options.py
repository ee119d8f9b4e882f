"""Options that the functions and modules of experts share."""

import operator
from collections.abc import Callable, Mapping
from dataclasses import fields
from pkgutil import resolve_name
from typing import Any, TypedDict

from phalanx.configs.schema import PrecisionConfig
from phalanx.configs.tables.activations import ACTIVATIONS
from phalanx.configs.tables.recipes import RECIPES
from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.mlp_spec import Margins
from phalanx.kernels.expert_mlp.providers import names
from phalanx.kernels.functional.arguments import check_bool
from phalanx.kernels.functional.custom_ops import RECIPE_TYPES
from phalanx.kernels.functional.layouts import layout_named
from phalanx.kernels.quantize.recipe import Recipe


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
    each pass, and their gradients are copied back."""


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
        ValueError: an option of another type.
    """
    chosen = filled(options, _DEFAULTS, "experts")
    check_activation(chosen["activation"])
    if not isinstance(chosen["margins"], Margins):
        raise ValueError(f"margins must be a Margins, not {chosen['margins']!r}")
    check_backend(chosen["backend"])
    if not isinstance(chosen["layout"], str):
        layout_named(repr(chosen["layout"]))
    check_bool("accumulate", chosen["accumulate"])
    if chosen["recipe"] is not None and not isinstance(chosen["recipe"], (str, *RECIPE_TYPES)):
        raise ValueError(
            f"recipe={chosen['recipe']!r} is unknown: use one of {', '.join(_recipes())}, or None"
        )
    return chosen


def check_module_options(options: KernelOptions) -> None:
    """Check the options of a module that holds its parameters.

    Raises:
        TypeError: an option that does not exist.
        ValueError: an option of another type, or a layout, which is that of parameters elsewhere.
    """
    if "layout" in options:
        raise ValueError(
            "layout= is an option of functions, for weights that others store: a module's "
            "parameters are in the kernels' layout"
        )
    recipe_named(with_defaults(options)["recipe"])


def filled(options: Mapping[str, Any], defaults: dict[str, Any], owner: str) -> dict[str, Any]:
    """All options of the owner.

    Raises:
        TypeError: an option that does not exist.
    """
    for name in options:
        if name not in defaults:
            raise TypeError(f"{name} is no option of {owner}: use {', '.join(defaults)}")
    return defaults | dict(options)


def check_activation(activation: Any) -> None:
    """Raise ValueError unless it is a name or an `Activation`: a function has no gradient here."""
    if not isinstance(activation, (str, Activation)):
        name = getattr(activation, "__name__", type(activation).__name__)
        kind = _GATED.get(name.lower())
        hint = "" if kind is None else f"; {name} with a gate is {kind}"
        raise ValueError(
            f"activation must be an Activation or one of {', '.join(ACTIVATIONS)}, not {name}{hint}"
        )


_GATED = {"silu": "swiglu", "gelu": "geglu"}
"""Kinds of activations by the functions and modules of torch that gate with them."""


def activation_named(activation: str | Activation) -> Activation:
    """The activation, with the constants of its kind if only that is given.

    Raises:
        ValueError: unknown kind.
    """
    check_activation(activation)
    return Activation(activation) if isinstance(activation, str) else activation


def _recipes() -> list[str]:
    return [name for name, facts in RECIPES.items() if facts.build]


def recipe_named(recipe: str | Recipe | None) -> Recipe | None:
    """The recipe, with the switches of a run by default if only its name is given.

    Raises:
        ValueError: unknown name.
    """
    if not isinstance(recipe, str):
        return recipe
    if recipe not in _recipes():
        raise ValueError(
            f"recipe={recipe!r} is unknown: use one of {', '.join(_recipes())}, or None"
        )
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
