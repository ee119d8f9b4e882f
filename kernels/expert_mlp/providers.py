"""Expert backends by name, from `configs.tables.backends`.

`kernels.registry` decides which can run; this module does not check. A backend is imported at its
first use, as the compiler of the fused one takes seconds to import.
"""

import functools
from collections.abc import Callable
from pkgutil import resolve_name
from typing import NamedTuple

from phalanx.configs.tables.backends import EXPERT_BACKENDS
from phalanx.configs.tables.recipes import RECIPES
from phalanx.kernels.expert_mlp.backend import Backend
from phalanx.kernels.expert_mlp.mlp_spec import ChannelOrder
from phalanx.kernels.launch_options import DEFAULT, LaunchOptions
from phalanx.kernels.quantize.recipe import Recipe


class Options(NamedTuple):
    """Options of a backend of the expert MLP, the argument of a provider."""

    launch: LaunchOptions = DEFAULT  # options of the launches of its kernels
    recipe: Recipe | None = None  # quantization of its operands
    keep_fp8: bool = False  # FP8 copies of weights are kept until the weights change
    channel_order: ChannelOrder | None = None  # order in which fc1 is stored; None: [gate; up]


def names() -> tuple[str, ...]:
    """Names of the backends of the expert MLP."""
    return tuple(name for name, facts in EXPERT_BACKENDS.items() if facts.provider)


def rows_for(pairs: int, experts: int, name: str) -> int:
    """Number of expert rows that suffices for `pairs`, however they are spread over the experts."""
    multiple = EXPERT_BACKENDS[name].pads_rows_to
    return (pairs + experts * (multiple - 1)) // multiple * multiple


@functools.cache
def provider(
    name: str,
    launch: LaunchOptions = DEFAULT,
    recipe: Recipe | None = None,
    keep_fp8: bool = False,
    channel_order: ChannelOrder | None = None,
) -> Backend:
    """The backend called `name`, with the options of `Options`.

    A backend that emulates recipes is wrapped by the recipe's emulation.

    Raises:
        ValueError: unknown name, or a recipe that the backend does not support.
    """
    facts = EXPERT_BACKENDS.get(name)
    if facts is None or not facts.provider:
        known = " or kernels=".join(names())
        raise ValueError(f"kernels.backend={name} has no expert MLP here: use kernels={known}")
    build: Callable[[Options], Backend] = resolve_name(facts.provider)
    if recipe is not None and facts.emulates:
        emulation: Callable[[Backend, Recipe], Backend] = resolve_name(
            RECIPES[recipe.format].emulation
        )
        return emulation(provider(name), recipe)
    return build(Options(launch, recipe, keep_fp8, channel_order))
