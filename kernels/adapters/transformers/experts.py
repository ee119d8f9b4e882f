"""The forward pass of a module of experts of transformers, and its preparation.

Legend: T tokens, K experts per token, D hidden.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from phalanx.adapters.transformers.gates import activation_of
from phalanx.kernels.api import Activation, ExpertOptions, grouped_experts, keep_converted

NAME = "phalanx"
"""Value of `experts_implementation`."""


def forward(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Weighted sum of each token's experts, as transformers' registry calls an implementation.

    Args:
        experts: a module whose class has transformers' decorator.
        hidden_states: [T, D] fp32 or bf16.
        top_k_index: [T, K] experts of each token; ids outside of the module's count as none.
        top_k_weights: [T, K] their weights.

    Returns:
        [T, D] in the dtype of the input.

    Raises:
        ValueError: the experts are of a kind that the kernels do not compute.
    """
    weights, x = weights_of(experts), hidden_states
    if not torch.is_autocast_enabled(x.device.type):
        x = x.to(weights[0].dtype)
    out = grouped_experts(x, top_k_index, top_k_weights, *weights, **options_of(experts))
    return out.to(hidden_states.dtype)


def weights_of(experts: Any) -> list[Any]:
    """w1, w2, b1 and b2 of a module, in its present layout."""
    return [name and getattr(experts, name) for name in _names(experts)]


def options_of(experts: Any) -> ExpertOptions:
    """Activation and present layout of a module.

    Raises:
        ValueError: the experts are of a kind that the kernels do not compute.
    """
    activation, layout = _facts(experts)
    return {"activation": activation, "layout": layout}


def prepare(model: nn.Module) -> None:
    """Check the experts of a model, and convert weights that are in another layout, once.

    It is called for models that transformers loads or makes from a config. For one that is made
    otherwise call it before parameters are sharded or given to an optimizer or to
    DistributedDataParallel: weights in another layout are rearranged in every forward pass if it
    was not, or if they are sharded already.

    Args:
        model: a model, of which modules of experts with this implementation are prepared.

    Raises:
        ValueError: experts of a kind that the kernels do not compute.
    """
    module: Any
    for module in model.modules():
        if hasattr(module, "is_transposed") and module.config._experts_implementation == NAME:
            activation, layout = _facts(module)
            if layout != "halves" and not isinstance(module.down_proj, DTensor):
                keep_converted(module, layout, _names(module))
                module._apply_gate = _refuse  # other implementations call it
                module._phalanx = activation, "halves"


def _facts(experts: Any) -> tuple[Activation, str]:
    """The activation and the present layout of the weights."""
    facts: tuple[Activation, str] | None = experts.__dict__.get("_phalanx")
    return _recognised(experts) if facts is None else facts


@torch.compiler.disable
def _recognised(experts: Any) -> tuple[Activation, str]:
    if experts.has_post_expert_norm:
        raise ValueError(
            f"{type(experts).__name__}: phalanx does not compute a norm behind each expert: use "
            "experts_implementation='grouped_mm'"
        )
    facts = activation_of(experts), _layout(experts)
    experts._phalanx = facts
    return facts


def _layout(experts: Any) -> str:
    """A key of the kernels' `LAYOUTS`."""
    interleaved = experts.has_gate and not experts.is_concatenated
    words = ["transposed"] * experts.is_transposed + ["interleaved"] * interleaved
    return "_".join(words) or "halves"


def _names(experts: Any) -> tuple[str, str, str | None, str | None]:
    """The parameters that are w1, w2, b1 and b2."""
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    if not experts.has_bias:
        return first, "down_proj", None, None
    return first, "down_proj", f"{first}_bias", "down_proj_bias"


def _refuse(gate_up: Tensor) -> Tensor:
    raise ValueError(
        f"the weights of these experts are in the layout of experts_implementation={NAME!r}: load "
        "the model again with the other implementation"
    )
