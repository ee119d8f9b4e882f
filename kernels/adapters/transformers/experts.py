"""The forward pass of a module of experts of transformers, and the conversion of its weights.

Parameters stay as transformers has them, so that adapters, optimizers and saved states are those of
its own experts: weights in another layout, as GPT-OSS's, are copied in each pass. Converted they
are read as they are, but then what is made from parameters has the layout of the kernels: adapters
are refused, and an optimizer's state is not that of transformers' own experts.

Legend: T tokens, K experts per token, D hidden.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from phalanx.adapters.transformers.modules import FACTS, NAME, experts_of, facts_of, names_of
from phalanx.kernels import api
from phalanx.kernels.api import ExpertOptions, TopK, keep_converted


def forward(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Weighted sum of each token's experts, as transformers' registry calls an implementation.

    Args:
        experts: a module whose class has transformers' decorator.
        hidden_states: [T, D] fp32 or bf16, as the result is.
        top_k_index: [T, K] experts of each token; ids outside of the module's count as none.
        top_k_weights: [T, K] their weights.

    Raises:
        ValueError: the experts are of a kind that the kernels do not compute, or have an adapter on
            weights that `convert` has converted.
    """
    weights, x = weights_of(experts), hidden_states
    if not torch.is_autocast_enabled(x.device.type):
        x = x.to(weights[0].dtype)
    out = api.experts(x, TopK(top_k_index, top_k_weights), weights, options_of(experts))
    return out.to(hidden_states.dtype)


def weights_of(experts: Any) -> list[Any]:
    """w1, w2, b1 and b2 of a module, in its present layout."""
    check_unadapted(experts)
    return [name and getattr(experts, name) for name in names_of(experts)]


def options_of(experts: Any) -> ExpertOptions:
    """Activation and present layout; ValueError for experts that the kernels do not compute."""
    activation, layout = facts_of(experts)
    return {"activation": activation, "layout": layout}


_ADVICE = "use the model without phalanx.adapters.transformers.convert"


class Converted:
    """In place of a module's `is_transposed`, which adapters and others ask for."""

    def __bool__(self) -> bool:
        raise ValueError(
            f"the weights of these experts are in the layout of experts_implementation={NAME!r}, "
            f"which adapters and other implementations do not know: {_ADVICE}"
        )


def convert(model: nn.Module) -> int:
    """Convert experts' weights in another layout to the kernels', once; return how many modules.

    State dicts and saved models keep the layout of transformers. Parameters, their gradients and an
    optimizer's state do not: call it before an optimizer is created, and load states of optimizers
    of converted models alone.

    Raises:
        ValueError: experts of a kind that the kernels do not compute, or parameters that are
            sharded already, or that an adapter or an optimizer has.
    """
    others = [experts for experts in experts_of(model) if facts_of(experts)[1] != "halves"]
    adapted = {id(getattr(module, "base_layer", None)) for module in model.modules()}
    for experts in others:
        if id(experts) in adapted:
            raise ValueError(f"{type(experts).__name__}: these experts have an adapter: {_ADVICE}")
    for experts in others:
        activation, layout = facts_of(experts)
        keep_converted(experts, layout, names_of(experts))
        experts.is_transposed = Converted()
        experts._apply_gate = _refuse  # transformers' eager experts call it
        setattr(experts, FACTS, (activation, "halves"))
    return len(others)


def check_unadapted(experts: Any) -> None:
    """Raise ValueError for converted experts of which a parameter has a parametrization."""
    if isinstance(experts.is_transposed, Converted) and is_parametrized(experts):
        raise ValueError(f"{type(experts).__name__}: converted experts have an adapter: {_ADVICE}")


def _refuse(gate_up: Tensor) -> Tensor:
    raise ValueError(f"the weights of these experts are in the layout of {NAME!r}: {_ADVICE}")
