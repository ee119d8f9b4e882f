"""The choice of kernels by options and facts about tensors, and the warning where it is a slow one.

Legend: K experts per token, E experts, D hidden, F expert width.
"""

import functools
import re
import warnings
from typing import Any, NamedTuple

import torch

from phalanx.configs.tables.backends import EXPERT_BACKENDS
from phalanx.kernels.expert_mlp.backend import names
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec
from phalanx.kernels.functional.custom_ops import decoded, encode
from phalanx.kernels.functional.layouts import padded_layout
from phalanx.kernels.functional.options import activation_named, check_backend, recipe_named
from phalanx.kernels.quantize.recipe import Fp8Block, Recipe
from phalanx.kernels.registry import Facts, KernelUnavailable, resolve
from phalanx.kernels.tracing import constant_in_graphs

_CHANNELS = 64  # of a box of the kernels for Hopper


class Problem(NamedTuple):
    """Facts about tensors on which the choice of kernels depends. Sizes of 0 are unknown."""

    device: torch.device
    dtype: torch.dtype
    hidden: int
    ffn: int
    experts: int
    slots: int  # K
    sorted_rows: bool  # by expert, without rows between experts


class BackendChoice(NamedTuple):
    """The backend that runs a call of a function of experts, and why."""

    backend: str  # `fused`, `cudnn`, `torch` or `reference`
    reason: str  # and with `backend="auto"` why not the better ones
    reads_counts: bool  # on the host, which a CUDA graph cannot capture


@constant_in_graphs
def choose(options: tuple[Any, ...], problem: tuple[Any, ...], layout: str) -> tuple[str, str, int]:
    """Specification for custom ops, whose weights have a `layout`, backend, and H / F.

    `options` are `constants` of a `kernels.functional.options.Chosen`, `problem` are the fields of
    a `Problem`. ValueError for an unknown value of an option, or kernels that cannot run here.
    """
    return _chosen(options, Problem(*problem), layout)


@functools.cache
def _chosen(options: tuple[Any, ...], problem: Problem, layout: str) -> tuple[str, str, int]:
    problem, layout = fitted(options, problem, layout)
    spec = specification(options, problem)
    return encode(spec, layout), spec.backend, spec.activation.facts.halves


def fitted(
    options: tuple[Any, ...], problem: Problem, layout: str = "halves"
) -> tuple[Problem, str]:
    """Both with F padded as kernels for GPUs need it, if `auto` takes them for no other reason."""
    F = -(-problem.ffn // _CHANNELS) * _CHANNELS
    if not 0 < F - problem.ffn <= problem.ffn / 4:  # first: each call over ranks asks
        return problem, layout
    _, wanted, _, accumulate, _ = map(decoded, options)
    wider = problem._replace(ffn=F)
    if wanted != "auto" or accumulate or not EXPERT_BACKENDS[explain(options, wider).backend].cuda:
        return problem, layout
    return wider, padded_layout(layout, problem.ffn, F)


@functools.cache
def specification(options: tuple[Any, ...], problem: Problem) -> MLPSpec:
    """`choose` as a value; on a GPU, it warns once if `auto` takes no kernels for it."""
    activation, wanted, recipe, accumulate, margins = map(decoded, options)
    choice = explain(options, problem)
    on_gpu = problem.device.type == "cuda"
    if wanted == "auto" and on_gpu and not EXPERT_BACKENDS[choice.backend].cuda:
        _warn_once(choice)
    activation, recipe = activation_named(activation), recipe_named(recipe)
    return MLPSpec(activation, choice.backend, margins, accumulate, recipe)


def explain(options: tuple[Any, ...], problem: Problem) -> BackendChoice:
    """The backend of `choose`, and why it is that one."""
    activation, backend, recipe, *_ = map(decoded, options)
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
        choice = resolve("grouped_mlp", backend, facts)
    except KernelUnavailable as refusal:
        raise KernelUnavailable(_without_knobs(str(refusal))) from None
    passed_over = dict(choice.passed_over)
    if problem.sorted_rows and EXPERT_BACKENDS[choice.backend].pads_rows_to > 1:
        if backend != "auto":
            raise ValueError(f"backend={backend} pads the rows of each expert: use backend=torch")
        passed_over[choice.backend] = "pads the rows of each expert, which are sorted here"
        choice = resolve("grouped_mlp", "torch", facts)
    clauses = [f"not {name}: {why}" for name, why in passed_over.items() if name in names()]
    reason = _without_knobs("; ".join([f"backend={backend}", *clauses]))
    return BackendChoice(choice.backend, reason, EXPERT_BACKENDS[choice.backend].host_counts)


@functools.cache
def _warn_once(choice: BackendChoice) -> None:
    auto, *why = choice.reason.split("; ")
    how = ", which reads the rows of each expert on the host" if choice.reads_counts else ""
    warnings.warn(
        f"{auto} takes {choice.backend} on this GPU{how} ({'; '.join(why)}): set "
        f"backend={choice.backend} if it is meant",
        stacklevel=2,
    )


def _without_knobs(text: str) -> str:
    return re.sub(r"\b(?:kernels|model(?:\.moe)?|precision)\.(?=\w)", "", text)


def _name_of(recipe: Recipe | None) -> str:
    return "bf16" if recipe is None else recipe.format
