"""The experts in the models of VeOmni, by its registry of kernels.

    import phalanx.adapters.veomni

and `fused_phalanx` as VeOmni's `moe_implementation`.

With expert parallelism tokens are exchanged within kernels, and every rank of a group has as many
of them as any other.

Legend: T tokens, K experts per token, D hidden.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from veomni.distributed.parallel_state import get_parallel_state
from veomni.ops.kernels import moe
from veomni.ops.kernels.moe import KERNEL_REGISTRY, HardwareRequirement, KernelSpec

from phalanx.adapters.expert_groups import group_of, groups, release
from phalanx.kernels import api
from phalanx.kernels.api import Activation, ExpertOptions, TopK

__all__ = ["NAME", "forward", "groups", "release"]

NAME = "phalanx"  # `moe_implementation` has the prefix `fused_`


def forward(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Weighted sum of each token's experts [T, D], as VeOmni's models call an implementation.

    `experts` has gate_up_proj [E, 2F, D] and down_proj [E, D, F] of this rank's experts;
    `top_k_index` [T, K] has ids of all experts. ValueError if the activation is not SiLU.
    """
    function = getattr(experts, "act_fn", torch.nn.functional.silu)
    if not _is_silu(function):
        raise ValueError(
            f"{type(experts).__name__}: moe_implementation=fused_{NAME} computes SiLU only: set "
            "eager"
        )
    weights = experts.gate_up_proj, experts.down_proj
    limit = getattr(experts, "limit", None) or 0.0
    options = ExpertOptions(activation=Activation("swiglu", limit=limit))
    x = hidden_states.to(weights[0].dtype)
    state = get_parallel_state()
    group = group_of(state.ep_group, x.dtype) if state.ep_enabled else None
    out = api.experts(x, TopK(top_k_index, top_k_weights), weights, options, group)
    return out.to(hidden_states.dtype)


@functools.cache
def _is_silu(function: Any) -> bool:
    grid = torch.linspace(-20, 20, 81, dtype=torch.float64, device="cpu")
    return torch.allclose(function(grid), torch.nn.functional.silu(grid))


def _bind(original: Any) -> Any:
    @functools.wraps(original)
    def apply(fused_moe_kernel: str = "triton") -> None:
        if fused_moe_kernel != NAME:
            original(fused_moe_kernel)

    return apply


KERNEL_REGISTRY.register(
    KernelSpec(
        name=NAME,
        op_name="moe_experts",
        variant="standard",
        factory=lambda: forward,
        hardware=HardwareRequirement("any"),
        description="Experts of phalanx",
    ),
    force=True,
)
moe.apply_veomni_fused_moe_patch = _bind(moe.apply_veomni_fused_moe_patch)
