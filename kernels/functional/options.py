"""Options and arguments of the public functions and modules of experts, and their checks.

An error is one line that names the argument.

Legend: T tokens, K experts per token, E experts, D hidden, F expert width.
"""

import functools
from collections.abc import Mapping, Sequence
from pkgutil import resolve_name
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from phalanx.configs.schema import PrecisionConfig
from phalanx.configs.tables.activations import ACTIVATIONS
from phalanx.configs.tables.recipes import RECIPES
from phalanx.kernels.availability import short
from phalanx.kernels.expert_mlp.activation import Activation, gated_hint
from phalanx.kernels.expert_mlp.backend import names
from phalanx.kernels.expert_mlp.mlp_spec import Margins, MLPWeights
from phalanx.kernels.functional.custom_ops import RECIPE_TYPES, constant
from phalanx.kernels.functional.layouts import layout_named
from phalanx.kernels.quantize.recipe import Recipe

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes of activations, weights, logits and probabilities."""
_NAMES = ("w1", "w2", "b1", "b2")


def check_tensor(name: str, value: Any) -> None:
    """Raise ValueError unless the value is a dense tensor."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must be a tensor, not {type(value).__name__}")
    if value.layout != torch.strided:
        raise ValueError(f"{name} must be a dense tensor, not {value.layout}")


def check_floats(name: str, value: Any, *, channels: bool = False) -> None:
    """Raise ValueError unless the value is a tensor of one of `FLOATS`, and may have `channels`."""
    check_tensor(name, value)
    check_float(name, value.dtype)
    if channels and not (value.ndim and value.shape[-1]):
        raise ValueError(f"{name} must have channels in its last axis, not {list(value.shape)}")


def check_float(name: str, dtype: torch.dtype | None) -> None:
    """Raise ValueError for a dtype that is none of `FLOATS`."""
    if dtype not in FLOATS:
        *most, last = map(short, FLOATS)
        found = dtype if dtype is None else short(dtype)
        raise ValueError(f"{name} must be {', '.join(most)} or {last}, not {found}")


def check_integers(name: str, value: Tensor, what: str) -> None:
    """Raise ValueError unless the dtype is an integer; `what` says what it holds."""
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise ValueError(f"{name} must hold integers, {what}, not {value.dtype}")


def check_parameters(
    sizes: dict[str, Any], bias: Any, device: Any, dtype: torch.dtype | None
) -> None:
    """Raise ValueError for arguments of which no module of experts can be made."""
    check_sizes(**sizes)
    check_bool("bias", bias)
    check_device(device)
    check_float("dtype", torch.get_default_dtype() if dtype is None else dtype)


def check_bool(name: str, value: Any) -> None:
    """Raise ValueError unless the value is a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, not {value!r}")


def check_device(device: Any) -> None:
    """Raise ValueError unless torch knows such a device; None is its default."""
    try:
        torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device={device!r} is unknown: use cuda, cpu or another one") from None


def check_sizes(**sizes: Any) -> None:
    """Raise ValueError for a value that is no whole number."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, (int, torch.SymInt)):
            raise ValueError(f"{name} must be a whole number, not {size!r}")


def check_devices(x: Tensor, **others: Tensor | None) -> None:
    """Raise ValueError for a tensor on another device than x."""
    for name, tensor in others.items():
        if tensor is not None and tensor.device != x.device:
            raise ValueError(
                f"{name} is on {tensor.device}, the input on {x.device}: move one of them"
            )


def check_choices(x: Tensor, topk_idx: Tensor, topk_prob: Tensor) -> None:
    """Raise ValueError unless tokens [..., D] have ids and weights of K experts [..., K]."""
    check_floats("x", x, channels=True)
    check_tensor("topk_idx", topk_idx)
    check_integers("topk_idx", topk_idx, "expert ids")
    check_floats("topk_prob", topk_prob)
    fits = topk_idx.shape == topk_prob.shape and topk_idx.shape[:-1] == x.shape[:-1]
    if not (fits and x.ndim and topk_idx.ndim and topk_idx.shape[-1]):
        raise ValueError(
            f"expected x [..., D] and topk_idx, topk_prob [..., K], not {list(x.shape)}, "
            f"{list(topk_idx.shape)} and {list(topk_prob.shape)}"
        )
    check_devices(x, topk_idx=topk_idx, topk_prob=topk_prob)


def check_rows(rows: Tensor, row_prob: Tensor | None) -> None:
    """Raise ValueError unless rows are [S, D], and their weights [S] or None."""
    check_floats("rows", rows, channels=True)
    if row_prob is not None:
        check_floats("row_prob", row_prob)
    if rows.ndim != 2 or (row_prob is not None and row_prob.shape != rows.shape[:1]):
        prob = None if row_prob is None else list(row_prob.shape)
        raise ValueError(
            f"expected rows [S, D] and row_prob [S], not {list(rows.shape)} and {prob}"
        )
    check_devices(rows, row_prob=row_prob)


def check_weights(weights: Sequence[Any]) -> None:
    """Raise ValueError unless w1 and w2 are [E, ., .], and b1 and b2 [E, .] or None."""
    for name, value in zip(_NAMES, weights, strict=False):
        if value is not None or name in ("w1", "w2"):
            check_floats(name, value)
            shape = "[E, ., .]" if name in ("w1", "w2") else "[E, .]"
            if value.ndim != shape.count(".") + 1:
                raise ValueError(f"{name} must be {shape}, not {list(value.shape)}")
    w1 = weights[0]
    if not len(w1):
        raise ValueError(f"w1 must have at least one expert, not {list(w1.shape)}")
    for name, value in zip(_NAMES, weights, strict=False):
        if value is not None and len(value) != len(w1):
            raise ValueError(f"{name} has {len(value)} experts, w1 has {len(w1)}")


def check_channels(x_name: str, x: Tensor, weights: MLPWeights, halves: int, kind: str) -> None:
    """Raise ValueError unless input and weights in the kernels' layout fit together."""
    w1, w2, b1, b2 = weights
    for name, value in zip(_NAMES, weights, strict=True):
        if value is not None and value.dtype != x.dtype:
            raise ValueError(
                f"{name} is {short(value.dtype)}, {x_name} is {short(x.dtype)}: give them one dtype"
            )
    D, H, F = x.shape[-1], w1.shape[1], w2.shape[2]
    if w1.shape[2] == w2.shape[1] != D:
        raise ValueError(f"{x_name} has {D} channels, w1 and w2 have {w2.shape[1]}")
    if w1.shape[2] != D:
        raise ValueError(f"w1 reads {w1.shape[2]} channels, {x_name} has {D}")
    if w2.shape[1] != D:
        raise ValueError(f"w2 writes {w2.shape[1]} channels, {x_name} has {D}")
    if halves * F != H or not F:
        times = "" if halves == 1 else f"{halves} x "
        raise ValueError(
            f"w1 has {H} rows and w2 {F} columns of an expert: activation={kind} needs {times}as "
            "many rows as columns"
        )
    for name, bias, width in (("b1", b1, H), ("b2", b2, D)):
        if bias is not None and bias.shape[1] != width:
            raise ValueError(f"{name} has {bias.shape[1]} channels, w{name[1]} has {width}")


class KernelOptions(TypedDict, total=False):
    """Keyword arguments of functions and modules of experts, about their kernels."""

    recipe: str | Recipe | None
    """`fp8_block`, `mxfp8` or `nvfp4`: products of quantized operands; None: none are."""
    accumulate: bool
    """Gradients of parameters with a `main_grad` are added to that, and
    `grad_added_to_main_grad` is set, as Megatron-Core expects."""
    margins: Margins


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


class Chosen(NamedTuple):
    """All options of a call, checked."""

    constants: tuple[Any, ...]  # those on which the specification depends, as `constant` has them
    kind: str  # of the activation
    layout: str
    accumulate: bool


def with_defaults(options: Mapping[str, Any]) -> Chosen:
    """All options of experts; TypeError for an unknown one, ValueError for another type."""
    names, values = tuple(options), tuple(options.values())
    if torch.compiler.is_compiling():
        return _chosen(names, *values)
    try:
        return _known(names, *values)
    except TypeError:  # also for a value that has no hash
        return _chosen(names, *values)


def _chosen(names: tuple[str, ...], *values: Any) -> Chosen:
    chosen = filled(dict(zip(names, values, strict=True)), _DEFAULTS, "experts")
    check_activation(chosen["activation"])
    if not isinstance(chosen["margins"], Margins):
        raise ValueError(f"margins must be a Margins, not {chosen['margins']!r}")
    check_backend(chosen["backend"])
    if not isinstance(chosen["layout"], str):
        layout_named(repr(chosen["layout"]))
    check_bool("accumulate", chosen["accumulate"])
    if chosen["recipe"] is not None and not isinstance(chosen["recipe"], (str, *RECIPE_TYPES)):
        raise _unknown_recipe(chosen["recipe"])
    layout, activation = chosen.pop("layout"), chosen["activation"]
    kind = activation if isinstance(activation, str) else activation.kind
    constants = tuple([constant(value) for value in chosen.values()])
    return Chosen(constants, kind, layout, chosen["accumulate"])


_known = functools.lru_cache(maxsize=1024, typed=True)(_chosen)  # True is no 1


def check_module_options(options: KernelOptions) -> None:
    """Raise TypeError for an option that a module with parameters of its own does not have.

    ValueError for one of another type, or a layout, which is that of parameters elsewhere.
    """
    if "layout" in options:
        raise ValueError(
            "layout= is an option of functions, for weights that others store: a module's "
            "parameters are in the kernels' layout"
        )
    with_defaults(options)
    recipe_named(options.get("recipe"))


def filled(options: Mapping[str, Any], defaults: dict[str, Any], owner: str) -> dict[str, Any]:
    """All options of the owner; TypeError for one that does not exist."""
    for name in options:
        if name not in defaults:
            raise TypeError(f"{name} is no option of {owner}: use {', '.join(defaults)}")
    return defaults | dict(options)


def check_activation(activation: Any) -> None:
    """Raise ValueError unless it is a name or an `Activation`."""
    if not isinstance(activation, (str, Activation)):
        name = getattr(activation, "__name__", type(activation).__name__)
        hint = gated_hint(name)
        raise ValueError(
            f"activation must be an Activation or one of {', '.join(ACTIVATIONS)}, not {name}{hint}"
        )


def activation_named(activation: str | Activation) -> Activation:
    """The activation, with the default constants if only its kind is given."""
    check_activation(activation)
    return Activation(activation) if isinstance(activation, str) else activation


def _recipes() -> list[str]:
    return [name for name, facts in RECIPES.items() if facts.build]


def _unknown_recipe(recipe: Any) -> ValueError:
    return ValueError(f"recipe={recipe!r} is unknown: use one of {', '.join(_recipes())}, or None")


def recipe_named(recipe: str | Recipe | None) -> Recipe | None:
    """The recipe, with a run's default switches if only its name is given."""
    if not isinstance(recipe, str):
        return recipe
    if recipe not in _recipes():
        raise _unknown_recipe(recipe)
    made: Recipe = resolve_name(RECIPES[recipe].build)(PrecisionConfig(recipe=recipe))
    return made


def check_backend(backend: str) -> None:
    """Raise ValueError for a backend that does not exist."""
    if backend not in (*names(), "auto"):
        raise ValueError(f"backend={backend} is unknown: use {', '.join(names())} or auto")
