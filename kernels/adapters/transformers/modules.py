"""Modules of experts of transformers: which they are, their kind, and the check of it."""

from typing import Any

import torch
from torch import nn

from phalanx.adapters.transformers.gates import activation_of
from phalanx.kernels.api import Activation

NAME = "phalanx"
"""Value of `experts_implementation`."""


def prepare(model: nn.Module) -> None:
    """Check the experts of a model. Parameters stay as they are.

    It is called for models that transformers loads or makes from a config; experts of others are
    checked in their first forward pass.

    Args:
        model: a model, of which modules of experts with this implementation are checked.

    Raises:
        ValueError: experts of a kind that the kernels do not compute.
    """
    for experts in experts_of(model):
        facts_of(experts)


def experts_of(model: nn.Module) -> list[Any]:
    """The modules of experts of a model that have this implementation."""
    dispatched: list[Any] = [module for module in model.modules() if is_dispatched(module)]
    return [m for m in dispatched if m.config._experts_implementation == NAME]


def is_dispatched(module: Any) -> bool:
    """True for experts of a class with transformers' decorator, of any implementation."""
    return "is_transposed" in vars(module)


def facts_of(experts: Any) -> tuple[Activation, str]:
    """The activation and the present layout of the weights.

    Raises:
        ValueError: the experts are of a kind that the kernels do not compute.
    """
    facts: tuple[Activation, str] | None = experts.__dict__.get("_phalanx")
    return _recognised(experts) if facts is None else facts


@torch.compiler.disable
def _recognised(experts: Any) -> tuple[Activation, str]:
    if experts.has_post_expert_norm:
        raise ValueError(
            f"{type(experts).__name__}: phalanx does not compute a norm behind each expert: use "
            "experts_implementation='grouped_mm'"
        )
    if experts.down_proj.dtype.itemsize < 2:
        raise ValueError(
            f"{type(experts).__name__}: phalanx does not read quantized weights: load the model "
            "in bf16"
        )
    facts = activation_of(experts), _layout(experts)
    experts._phalanx = facts
    return facts


def _layout(experts: Any) -> str:
    """A key of the kernels' `LAYOUTS`."""
    interleaved = experts.has_gate and not experts.is_concatenated
    words = ["transposed"] * experts.is_transposed + ["interleaved"] * interleaved
    return "_".join(words) or "halves"


def names_of(experts: Any) -> tuple[str, str, str | None, str | None]:
    """The parameters that are w1, w2, b1 and b2."""
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    if not experts.has_bias:
        return first, "down_proj", None, None
    return first, "down_proj", f"{first}_bias", "down_proj_bias"
