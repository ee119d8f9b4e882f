"""The forward pass of a module of experts of transformers.

Parameters stay as transformers has them, so that adapters, optimizers and saved states are those of
its own experts: weights in another layout are copied in each pass.

Legend: T tokens, K experts per token, D hidden.
"""

from typing import Any

import torch
from torch import Tensor

from phalanx.adapters.transformers.conversion import check_unadapted
from phalanx.adapters.transformers.modules import facts_of, names_of
from phalanx.kernels.api import ExpertOptions, grouped_experts


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
        ValueError: the experts are of a kind that the kernels do not compute, or have an adapter
            on weights that `convert` has converted.
    """
    weights, x = weights_of(experts), hidden_states
    if not torch.is_autocast_enabled(x.device.type):
        x = x.to(weights[0].dtype)
    out = grouped_experts(x, top_k_index, top_k_weights, *weights, **options_of(experts))
    return out.to(hidden_states.dtype)


def weights_of(experts: Any) -> list[Any]:
    """w1, w2, b1 and b2 of a module, in its present layout."""
    check_unadapted(experts)
    return [name and getattr(experts, name) for name in names_of(experts)]


def options_of(experts: Any) -> ExpertOptions:
    """Activation and present layout of a module.

    Raises:
        ValueError: the experts are of a kind that the kernels do not compute.
    """
    activation, layout = facts_of(experts)
    return {"activation": activation, "layout": layout}
