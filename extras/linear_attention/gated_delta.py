"""A Gated DeltaNet layer (arXiv 2412.06464) between its projections: the interface of its backends.

    short causal convolution -> normalised queries and keys -> gated delta rule -> gated RMSNorm

Backends: `torch` (`extras.linear_attention.torch_delta`), which runs everywhere and in any dtype,
and `fla`, the chunked kernels of flash-linear-attention in Triton, for bf16 on GPUs; another one is
a ValueError. No function reads the device on the host: a step can be captured in a CUDA graph, and
documents inside a sequence are distinguished only by the positions of tokens, `position_BS`: int64,
of each token in its document. None: a sequence is one document.

Shape legend: B sequences, S positions, C channels, W taps of the convolution, K key heads, V value
heads, d channels of a head.
"""

from importlib import import_module
from typing import Any, cast

from torch import Tensor

from phalanx.configs.tables.layers import MIXERS, LinearAttentionBackend
from phalanx.extras.linear_attention import torch_delta


def causal_conv(
    x_BSC: Tensor, weight_CW: Tensor, position_BS: Tensor | None = None, *, backend: str = "torch"
) -> Tensor:
    """SiLU of a depthwise causal convolution: of each channel with the W - 1 tokens before it.

    `x_BSC` is bf16 or fp32, of any strides with contiguous channels; `weight_CW` and the result
    have its dtype. The last tap is of the token itself; taps stop at the first token of a document.
    """
    facts = _facts(backend)
    # flash-linear-attention's kernel finds documents by tables that the host builds.
    documents = position_BS is None or facts.documents
    implementation = import_module(facts.implementation) if documents else torch_delta
    out_BSC: Tensor = implementation.causal_conv(x_BSC, weight_CW, position_BS)
    return out_BSC


def gated_delta_rule(
    q_BSKd: Tensor,
    k_BSKd: Tensor,
    v_BSVd: Tensor,
    log_decay_BSV: Tensor,
    beta_BSV: Tensor,
    position_BS: Tensor | None = None,
    *,
    backend: str = "torch",
) -> Tensor:
    """The gated delta rule (arXiv 2412.06464, equation 10) over normalised queries and keys.

        state_t = decay_t (I - beta_t k_t k_t^T) state_(t-1) + beta_t k_t v_t^T
        out_t = q_t^T state_t / sqrt(d)

    of a value head, with q and k of its key head divided by their norms. The initial state of a
    document is zero.

    Args:
        q_BSKd, k_BSKd: bf16 or fp32.
        v_BSVd: in the dtype of q, which the result [B, S, V, d] has too; V is a multiple of K, and
            value heads that share a key head are contiguous.
        log_decay_BSV: fp32, 0 or less.
        beta_BSV: in (0, 1), of any floating dtype.
    """
    out_BSVd: Tensor = _module(backend).gated_delta_rule(
        q_BSKd, k_BSKd, v_BSVd, log_decay_BSV, beta_BSV, position_BS
    )
    return out_BSVd


def gated_delta_rule_and_state(
    q_BSKd: Tensor,
    k_BSKd: Tensor,
    v_BSVd: Tensor,
    log_decay_BSV: Tensor,
    beta_BSV: Tensor,
    *,
    backend: str = "torch",
) -> tuple[Tensor, Tensor]:
    """`gated_delta_rule` of sequences of one document, and their last states: fp32 [B, V, d, d].

    A position with a beta and a log decay of 0 changes no state. No gradients.
    """
    out_BSVd, state_BVdd = _module(backend).gated_delta_rule_and_state(
        q_BSKd, k_BSKd, v_BSVd, log_decay_BSV, beta_BSV
    )
    return out_BSVd, state_BVdd


def gated_rms_norm(
    x_BSVd: Tensor, gate_BSVd: Tensor, weight_d: Tensor, eps: float, *, backend: str = "torch"
) -> Tensor:
    """RMSNorm of every head, times its weight, times SiLU of the gate: [B, S, V, d].

    `x_BSVd` and `gate_BSVd` are bf16 or fp32, `weight_d` and the result in the dtype of x; `eps` is
    added to the mean square.
    """
    out_BSVd: Tensor = _module(backend).gated_rms_norm(x_BSVd, gate_BSVd, weight_d, eps)
    return out_BSVd


def _module(backend: str) -> Any:
    return import_module(_facts(backend).implementation)


def _facts(backend: str) -> LinearAttentionBackend:
    backends = MIXERS["linear_attention"].backends
    if backend not in backends:
        known = " or ".join(backends)
        raise ValueError(f"unknown backend {backend!r} of linear attention: use {known}")
    return cast(LinearAttentionBackend, backends[backend])
