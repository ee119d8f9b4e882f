"""Gated DeltaNet by the chunked kernels of flash-linear-attention, in Triton, with its autograd.

https://github.com/fla-org/flash-linear-attention, version 0.6.0, of which `fla-core` has all that
is used. Three things are done differently here:

- Its kernels are autotuned at their first launch. The chosen configuration depends on timing, and
  with it the order of sums: two ranks, or a run and its resume, would differ in bits. Here each
  kernel has one configuration, chosen by a rule from the library's list.
- One gradient kernel is replaced (`extras.linear_attention.gradients_triton` says why).
- Documents inside a sequence are separated by a decay that clears the state, not by bounds: the
  library builds tables of bounds on the host, which a CUDA graph cannot capture.

It saves per token and value head, in addition to inputs and output, a row of 64 of its solved
systems.

Shape legend: B sequences, S positions, C channels, W taps, K key heads, V value heads, d channels
of a head.
"""

import functools
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from phalanx.kernels.availability import dotted, short
from phalanx.kernels.limits import Refusal
from phalanx.kernels.registry import Facts


def fla(facts: Facts) -> Refusal:
    """Reason why flash-linear-attention cannot run, or None."""
    if facts.device != "cuda":
        return "needs CUDA"
    if facts.capability is None or facts.capability < (8, 0):
        return f"needs CUDA capability 8.0 or more, not {dotted(facts.capability)}"
    if facts.dtype != torch.bfloat16:
        return f"needs bf16, not {short(facts.dtype)}"
    if not {"flash_linear_attention", "triton"} <= facts.packages:
        return f"needs flash-linear-attention: pip install {FLASH_LINEAR_ATTENTION}"
    return None


FLASH_LINEAR_ATTENTION = "fla-core==0.6.0"  # requirement of this module, as pip knows it


FORGET = -100.0
"""Logarithm of a decay: e to this power is 0 in fp32. In a chunk of 64 documents the logarithms sum
to -6400, where fp32 is exact to 2.4e-4, a sixteenth of a rounding to bf16."""


def causal_conv(x_BSC: Tensor, weight_CW: Tensor, position_BS: None = None) -> Tensor:
    """`gated_delta.causal_conv` for sequences of one document."""
    out_BSC: Tensor = _library().conv(x_BSC, weight_CW, activation="silu")[0]
    return out_BSC


def gated_delta_rule(
    q_BSKd: Tensor,
    k_BSKd: Tensor,
    v_BSVd: Tensor,
    log_decay_BSV: Tensor,
    beta_BSV: Tensor,
    position_BS: Tensor | None,
) -> Tensor:
    """`gated_delta.gated_delta_rule` by the library."""
    if position_BS is not None:
        log_decay_BSV = log_decay_BSV.masked_fill((position_BS == 0)[..., None], FORGET)
    out_BSVd: Tensor = _library().rule(
        q_BSKd, k_BSKd, v_BSVd, log_decay_BSV, beta_BSV, use_qk_l2norm_in_kernel=True
    )[0]
    return out_BSVd


def gated_delta_rule_and_state(*inputs: Tensor) -> tuple[Tensor, Tensor]:
    """`gated_delta.gated_delta_rule_and_state` by the library."""
    out_BSVd, state_BVdd = _library().rule(
        *inputs, use_qk_l2norm_in_kernel=True, output_final_state=True
    )
    return out_BSVd, state_BVdd


def gated_rms_norm(x_BSVd: Tensor, gate_BSVd: Tensor, weight_d: Tensor, eps: float) -> Tensor:
    """`gated_delta.gated_rms_norm` by the library."""
    out_BSVd: Tensor = _library().norm(x_BSVd, gate_BSVd, weight_d, None, eps=eps)
    return out_BSVd


@functools.cache
def _library() -> SimpleNamespace:
    """The library's functions, with their kernels changed as this file's docstring says."""
    from fla.modules import causal_conv1d
    from fla.modules.norm import fused_norm_gate, l2norm
    from fla.ops.common import chunk_delta_h, chunk_o
    from fla.ops.gated_delta_rule import chunk_fwd, chunk_gated_delta_rule, wy_fast
    from fla.ops.utils import cumsum

    from phalanx.extras.linear_attention import gradients_triton

    gradients_triton.register()
    modules = (causal_conv1d.ops, fused_norm_gate, l2norm, chunk_delta_h, chunk_o, chunk_fwd)
    for module in (*modules, wy_fast, cumsum):
        for kernel in vars(module).values():
            fix(kernel)
    return SimpleNamespace(
        conv=causal_conv1d.causal_conv1d,
        rule=chunk_gated_delta_rule,
        norm=fused_norm_gate.rms_norm_gated,
    )


def fix(kernel: Any) -> None:
    """Reduce the configurations of an autotuned Triton kernel to one; leave others unchanged."""
    while kernel is not None and not hasattr(kernel, "configs"):
        kernel = getattr(kernel, "fn", None) if hasattr(kernel, "run") else None
    if kernel is None:
        return
    warps = _WARPS.get(kernel.base_fn.__name__, 4)
    kernel.configs = [min(kernel.configs, key=lambda config: _distance(config, warps))]


_WARPS = {"prepare_wy_repr_bwd_kernel": 2}
"""Warps of kernels that have not 4. Triton miscompiles the variant of this kernel without decays
with 4 for Hopper (fla-org/flash-linear-attention, issue 984)."""


def _distance(config: Any, warps: int) -> tuple[float, ...]:
    tiles = (abs(size - 64) for _, size in sorted(config.kwargs.items()))
    return abs(config.num_warps - warps), abs(config.num_stages - 2), *tiles
