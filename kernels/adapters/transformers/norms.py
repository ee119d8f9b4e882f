"""RMSNorms of a model of transformers in torch's fused kernel, forward and backward.

transformers computes them in some ten passes over fp32 copies, which take a quarter of a training
step of Qwen3-30B-A3B's layers. Values differ by one rounding: the fused kernel multiplies by the
weight before it rounds to bf16.

Legend: N channels.
"""

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

_ROWS = 5  # on which a class is compared with torch's function


def fuse_norms(model: nn.Module) -> int:
    """Have RMSNorms computed by `torch.nn.functional.rms_norm`; return the number of modules.

    Modules are found by the end of their class's name and compared with the function by values; of
    another kind, as with a weight that counts from 1, they stay as they are. Parameters, state
    dicts and copies are those of transformers. Norms are floating point, on one device each.
    """
    fused = 0
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and _is_plain(module):
            module.forward = partial(_forward, module)  # a bound method could not be unpickled
            fused += 1
    return fused


def _forward(norm: Any, hidden_states: Tensor) -> Tensor:
    """RMSNorm of the last axis, [..., N] in the dtype of the input."""
    weight = norm.weight
    if hidden_states.dtype != weight.dtype:  # as transformers promotes them
        out: Tensor = type(norm).forward(norm, hidden_states)
        return out
    return rms_norm(hidden_states, weight.shape, weight, _epsilon(norm))


def _epsilon(norm: Any) -> float:
    epsilon: float | None = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if epsilon is None:
        raise AttributeError
    return epsilon


@torch.no_grad()
def _is_plain(norm: Any) -> bool:
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 1:
        return False
    if weight.is_meta:  # weights that are loaded later
        norm = copy.deepcopy(norm).to_empty(device="cpu")
        weight = nn.init.uniform_(norm.weight, 0.5, 2.0)
    x = torch.linspace(-3, 4, _ROWS * len(weight), device=weight.device)
    x = (x.view(_ROWS, -1) * torch.logspace(-3, 1, _ROWS, device=x.device)[:, None]).to(weight)
    try:
        want, got = norm(x), rms_norm(x, weight.shape, weight, _epsilon(norm))
    except (AttributeError, TypeError):  # other arguments or names
        return False
    return want.dtype == got.dtype and torch.allclose(want, got, rtol=0.02, atol=1e-6)
