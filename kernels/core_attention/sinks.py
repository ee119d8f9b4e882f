"""Attention with learnable sinks by cuDNN through Transformer Engine, except for their gradient.

In cuDNN's backward pass with sinks (Transformer Engine 2.20) a row sum takes 0.88 ms that without
them takes 0.07 ms, at 2 x 4096 tokens and 64 heads of 64 channels on an H200. The backward pass of
a softmax needs of a sink only its share in a row's log-sum and in the output, so that without sinks
is called with those of the forward pass with sinks:

    P = exp(logits - lse),  D = rowsum(dO * O),  dlogits = P * (dP - D),
    dsink = - sum over rows of exp(sink - lse) * D

where lse and O include the sink. The last line is a separate kernel, in Triton.

Legend: S positions, B batch, H query heads, G key-value heads, d channels.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def attention(
    q_SBHd: Tensor,
    k_SBGd: Tensor,
    v_SBGd: Tensor,
    sinks_H: Tensor,
    *,
    scale: float,
    window: int = 0,
) -> Tensor:
    """Causal attention with a logit per head in the softmax denominator (arXiv 2508.10925).

    q, k and v are bf16 on a GPU, contiguous. A query sees `window` keys, itself included; 0 is no
    limit.
    """
    return _Attention.apply(q_SBHd, k_SBGd, v_SBGd, sinks_H, scale, window)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor, scale: float, window: int
    ) -> Tensor:
        from transformer_engine.pytorch.cpp_extensions.fused_attn import fused_attn_fwd

        offset = sinks_H.float().view(1, -1, 1, 1)
        options = dict(softmax_type="learnable", softmax_offset=offset, **_options(scale, window))
        out, aux, *_ = fused_attn_fwd(True, *_sizes(q), q, k, v, q.dtype, _backend(), **options)
        # Log-sums of rows [B, H, S, 1] in fp32, and the (unused) state of dropout.
        stats, random = aux[:2]
        ctx.save_for_backward(q, k, v, out, stats, random, sinks_H)
        ctx.scale, ctx.window = scale, window
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        from transformer_engine.pytorch.cpp_extensions.fused_attn import fused_attn_bwd

        from phalanx.kernels.core_attention.sinks_triton import gradient

        q, k, v, out, stats, random, sinks_H = ctx.saved_tensors
        dout = dout.contiguous()
        dq, dk, dv, *_ = fused_attn_bwd(
            *_sizes(q),
            *(q, k, v, out, dout, q.dtype, [stats, random], _backend()),
            do_format="sbhd",
            dqkv_layout="sbhd_sbhd_sbhd",
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **_options(ctx.scale, ctx.window),
        )
        dsinks_H = gradient(out, dout, stats.view(stats.shape[:3]), sinks_H.float())
        return dq, dk, dv, dsinks_H.to(sinks_H.dtype), None, None


def _options(scale: float, window: int) -> dict[str, Any]:
    return dict(
        attn_scale=scale,
        qkv_layout="sbhd_sbhd_sbhd",
        o_format="sbhd",
        attn_mask_type="causal",
        window_size=(window - 1 if window else -1, 0),
    )


def _sizes(q_SBHd: Tensor) -> tuple[int, int, Tensor, Tensor]:
    """Longest sequences of queries and keys, and the start of each."""
    S, B = q_SBHd.shape[:2]
    starts = torch.arange(0, (B + 1) * S, S, dtype=torch.int32, device=q_SBHd.device)
    return S, S, starts, starts


def _backend() -> Any:
    from transformer_engine.pytorch.cpp_extensions.fused_attn import FusedAttnBackend

    return FusedAttnBackend["F16_arbitrary_seqlen"]
