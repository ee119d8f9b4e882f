"""Which implementation of each op runs here, and why the better ones do not.

A run resolves `kernels.*` of its config against the facts of machine and model when it starts, and
prints `table`. A forced choice that cannot run is an error with its reason; `auto` takes the first
that can run, unless a later one is faster here, and reports what it passed over. Predicates depend
on `Facts` alone and import nothing.
"""

import importlib.util
import os
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pkgutil import resolve_name

import torch

from phalanx.configs.tables.backends import (
    ATTENTION_BACKENDS,
    EXPERT_BACKENDS,
    NORM_BACKENDS,
    Implementation,
    Package,
)
from phalanx.configs.tables.layers import MIXERS
from phalanx.kernels import compiled_libraries as libraries
from phalanx.kernels.limits import Refusal


def installed() -> frozenset[str]:
    """Optional packages that are installed here, by the names of `Facts.packages`."""
    names = ("transformer_engine", "triton", "nvidia_cutlass_dsl")
    found = {name for name in names if importlib.util.find_spec(name)}
    if libraries.installed():
        found.add("compiled_kernels")  # those of this package, not a package
    # Older flash-attn packages have the same top-level name, which find_spec would import.
    flash = importlib.util.find_spec("flash_attn")
    folders = (flash and flash.submodule_search_locations) or ()
    if any(os.path.exists(os.path.join(f, "cute", "interface.py")) for f in folders):
        found.add("flash_attn_4")
    if importlib.util.find_spec("quack"):
        found.add("quack")
    packages = (entry.package for op in _OPS.values() for entry in op.backends.values())
    found |= {package.name for package in packages if package and _is_installed(package)}
    return frozenset(found)


def _is_installed(package: Package) -> bool:
    spec = importlib.util.find_spec(package.module)
    folders = (spec and spec.submodule_search_locations) or ()
    return any(os.path.exists(os.path.join(f, package.folder)) for f in folders)


def compiles() -> bool:
    """Return whether torch.compile is switched on."""
    switches = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")
    return not any(os.environ.get(name) == "1" for name in switches)


@dataclass(frozen=True)
class Facts:
    """Machine and model, as far as predicates depend on them. Sizes of 0 are unknown and fit."""

    device: str  # `cpu` or `cuda`
    capability: tuple[int, int] | None  # CUDA compute capability; None on `cpu`
    dtype: torch.dtype  # dtype of activations and weights
    fp8: bool = False  # linear layers multiply FP8 (`precision=fp8_block`)
    wgrad: str = "fp8"  # operands of weight gradients under a recipe (`precision.wgrad`)
    recipe: str = "bf16"  # option of `precision=`
    hidden: int = 0  # D, channels of the residual stream
    ffn: int = 0  # F, width of one expert
    experts: int = 0  # L, experts of a rank
    slots: int = 0  # expert ids of a token: K, or with token rounding more
    activation: str = ""  # a key of `configs.tables.activations`; empty: unknown, fits
    activation_alpha: float = 1.702
    activation_limit: float = 0.0
    activation_offset: float = 0.0  # constants of the activation
    sinks: bool = False  # attention has learnable sinks
    window: int = 0  # sliding window of attention; 0 has none
    head_dim: int = 0  # channels of a query or key head
    v_dim: int = 0  # channels of a value head
    norms: tuple[int, ...] = ()  # channels that are normalised together, of each kind of norm
    documents: bool = False  # attention stops at ends of documents (`data.document_mask`)
    context: int = 1  # ranks that gather keys: above 1, attention sees fewer queries than keys
    shares_heads: bool = False  # ranks share out heads of sequences
    max_logits: bool = False  # `optim.qk_clip` or `optim.max_logit_every` need the largest logits
    packages: frozenset[str] = field(default_factory=installed)
    compiles: bool = field(default_factory=compiles)  # torch.compile is switched on


@dataclass(frozen=True)
class Choice:
    """One line of the table."""

    op: str
    backend: str
    reason: str
    passed_over: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Reasons why `auto` took none of the implementations before, by their names."""


class KernelUnavailable(ValueError):
    """A forced backend cannot run here; the message has the reason and an override that works."""


@dataclass(frozen=True)
class _Op:
    knob: str
    backends: Mapping[str, Implementation]  # best first


_OPS = {
    "grouped_mlp": _Op("kernels.backend", EXPERT_BACKENDS),
    "attention": _Op("kernels.attention", ATTENTION_BACKENDS),
    **{
        name: _Op("kernels.attention", mixer.backends)
        for name, mixer in MIXERS.items()
        if mixer.backends
    },
    "norm": _Op("kernels.norm", NORM_BACKENDS),
}


def resolve(op: str, wanted: str, facts: Facts) -> Choice:
    """Pick the implementation of an op: of `grouped_mlp`, `attention`, `norm` or a mixer.

    Raises:
        KernelUnavailable: the backend `wanted` cannot run here; `auto` always can.
        ValueError: unknown op or backend.
    """
    if op not in _OPS:
        raise ValueError(f"unknown op {op!r}: use one of {', '.join(_OPS)}")
    spec = _OPS[op]
    if wanted == "auto":
        return _best(op, facts)
    if wanted not in spec.backends:
        names = ", ".join(spec.backends)
        raise ValueError(f"{spec.knob}={wanted} is unknown: use one of {names} or auto")
    reason = _unavailable(spec.backends[wanted], facts)
    if reason is not None:
        hint = f"use {spec.knob}={_best(op, facts).backend} or {spec.knob}=auto"
        raise KernelUnavailable(f"{spec.knob}={wanted} cannot run here: {reason}; {hint}")
    return Choice(op, wanted, f"{spec.knob}={wanted}")


def order(op: str) -> list[str]:
    """Backends of an operation, best first."""
    return list(_OPS[op].backends)


_NO_CUDA = re.compile("not (.+): needs CUDA")


def table(choices: Sequence[Choice], width: int = 96) -> str:
    """The choices as aligned text, at most `width` columns; each clause of a reason is a line.

    What needs CUDA, where there is none, shares the last line.
    """
    heads = ("op", "backend", "reason")
    op, backend = (
        max([len(head), *(len(getattr(choice, head)) for choice in choices)]) for head in heads[:2]
    )
    indent = op + backend + 4
    lines = [f"{heads[0]:{op}}  {heads[1]:{backend}}  {heads[2]}"]
    without: dict[str, None] = {}
    for choice in choices:
        first, *clauses = choice.reason.split("; ")
        told = [first, *(clause for clause in clauses if not _NO_CUDA.fullmatch(clause))]
        without |= dict.fromkeys(m[1] for c in clauses if (m := _NO_CUDA.fullmatch(c)))
        reason = [
            line
            for clause in told
            for line in textwrap.wrap(clause, width - indent, subsequent_indent="  ")
        ]
        lines.append(f"{choice.op:{op}}  {choice.backend:{backend}}  {reason[0]}")
        lines += [" " * indent + line for line in reason[1:]]
    if without:
        text = f"Kernels need CUDA, of which there is none here; left out: {', '.join(without)}"
        lines += textwrap.wrap(text, width, subsequent_indent="  ")
    return "\n".join(lines)


def _best(op: str, facts: Facts) -> Choice:
    passed_over: dict[str, str] = {}
    for name, backend in _OPS[op].backends.items():
        if not backend.auto:
            continue
        reason = _unavailable(backend, facts)
        if reason is None and backend.slower:
            reason = _reason(backend.slower, facts)
        if reason is None:
            clauses = [f"not {other}: {why}" for other, why in passed_over.items()]
            return Choice(op, name, "; ".join(["auto", *clauses]), passed_over)
        passed_over[name] = reason
    raise AssertionError(f"op {op} has no backend that runs everywhere")


def _unavailable(backend: Implementation, facts: Facts) -> Refusal:
    reason = _reason(backend.unavailable, facts)
    return _reason(backend.limits, facts) if reason is None and backend.limits else reason


def _reason(path: str, facts: Facts) -> Refusal:
    predicate: Callable[[Facts], Refusal] = resolve_name(path)
    return predicate(facts)
