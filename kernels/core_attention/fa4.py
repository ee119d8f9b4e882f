"""Core attention by flash-attn-4 on Hopper (Dao et al., FlashAttention-4: CuTe DSL kernels).

The library is called below its autograd function, with outputs and gradients allocated here in the
layout of the surrounding layers, so that nothing is copied. It supports grouped queries, values
narrower than keys, sliding windows and learnable sinks with their gradient; fewer queries than keys
are the last of them. In deterministic mode the backward pass sums in a fixed order; otherwise the
gradient of the queries, and with grouped queries those of keys and values, are summed by atomics.

Packed documents take its interface for sequences of various lengths, `cu_seqlens_q` and
`cu_seqlens_k` of `flash_attn_varlen_func`: bounds on the device, and tensors [T, H, d] of one
sequence. The number of bounds is fixed; entries after the last document start and end at T, which
is an empty sequence. All sizes and launches follow from shapes and from the bound of a document's
length, so that a graph can be replayed with other documents. The backward pass needs 128 rows of
fp32 scratch memory for each possible document.

`scripts/lab/bench_libraries.py attention` compares it with cuDNN's and torch's kernels.

Legend: B batch, H query heads, G key-value heads (G divides H), S queries, T keys (T >= S),
d channels of query and key, v channels of value.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.kernels.core_attention.documents import Documents
from phalanx.kernels.core_attention.fa4_library import calling
from phalanx.kernels.core_attention.limits import unsupported_heads
from phalanx.kernels.core_attention.max_logit import MaxLogit, raise_max_logits
from phalanx.kernels.core_attention.rope import dense


def attention(
    q_SBHd: Tensor,
    k_TBGd: Tensor,
    v_TBGv: Tensor,
    sinks_H: Tensor | None = None,
    *,
    scale: float,
    window: int = 0,
    documents: Documents | None = None,
    top: MaxLogit | None = None,
) -> Tensor:
    """Causal attention; query i is at position T - S + i.

    Args:
        q_SBHd, k_TBGd, v_TBGv: bf16 on a Hopper GPU; read in place if channels are contiguous and
            every row is aligned to 16 bytes, copied otherwise.
        sinks_H: a logit per head in the softmax denominator (arXiv 2508.10925), bf16 or fp32.
        scale: factor on q @ k^T.
        window: keys that a query sees, itself included; 0 is no limit.
        documents: with bounds, for the S = T tokens of one sequence.
        top: records the largest logit of each head.

    Returns:
        o_SBHv, contiguous.

    Raises:
        ValueError: tensors that the kernels do not support.
    """
    H, d = q_SBHd.shape[2:]
    G, v = v_TBGv.shape[2:]
    if any(x.dtype != torch.bfloat16 for x in (q_SBHd, k_TBGd, v_TBGv)):
        raise ValueError(f"kernels.attention=fa4 needs bf16, not {q_SBHd.dtype}")
    if not q_SBHd.is_cuda or torch.cuda.get_device_capability(q_SBHd.device) != (9, 0):
        raise ValueError("kernels.attention=fa4 needs CUDA capability 9.0")
    if why := unsupported_heads(d, v, grouped=H != G):
        raise ValueError(f"kernels.attention=fa4 {why}")
    if documents is not None and documents.bounds_N1 is None:
        raise ValueError("kernels.attention=fa4 needs places for the bounds of documents")
    return _Attention.apply(q_SBHd, k_TBGd, v_TBGv, sinks_H, scale, window, documents, top)


def run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    scale: float,
    window: int,
    documents: Documents | None = None,
) -> tuple[Tensor, Tensor]:
    """`attention`, and the logarithm of the softmax denominator of each row.

    The latter is fp32 [B, H, S], or [H, T] with documents.
    """
    out, lse = _outputs(q, v)
    lse, layout = (lse, _batch_first) if documents is None else (lse[0], _single_sequence)
    with calling() as library:
        library._flash_attn_fwd(
            *(layout(_readable(x)) for x in (q, k, v)),
            softmax_scale=scale,
            learnable_sink=sinks,
            out=layout(out),
            lse=lse,
            **_mask(window),
            **_lengths(documents),
        )
    return out, lse


def run_backward(
    dout: Tensor,
    saved: list[Tensor],
    sinks: Tensor | None,
    scale: float,
    window: int,
    deterministic: bool,
    documents: Documents | None = None,
) -> list[Tensor]:
    """Gradients of q, k, v, contiguous, and of the sinks if there are any.

    `saved`: q, k, v and the two results of `run_forward`.
    """
    q, k, v, out, lse = saved
    gradients = _gradients(q, k, v)
    layout = _batch_first if documents is None else _single_sequence
    dq, dk, dv = (layout(x) for x in gradients)
    with calling() as library:
        returned = library._flash_attn_bwd(
            *(layout(_readable(x)) for x in (q, k, v, out)),
            layout(dout.contiguous()),
            lse,
            softmax_scale=scale,
            deterministic=deterministic,
            learnable_sink=sinks,
            dq=dq,
            dk=dk,
            dv=dv,
            **_mask(window),
            **_lengths(documents),
        )
    return [*gradients, *returned[3:]]


class _Attention(torch.autograd.Function):
    """Not a torch custom operator, which would double the time on the host."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        scale: float,
        window: int,
        documents: Documents | None,
        top: MaxLogit | None,
    ) -> Tensor:
        out, lse = run_forward(q, k, v, sinks, scale, window, documents)
        if top is not None:
            raise_max_logits(
                top,
                q.permute(1, 2, 0, 3),
                k.permute(1, 2, 0, 3),
                scale=scale,
                window=window,
                documents=documents,
                lse_BHS=lse.view(out.size(1), out.size(2), out.size(0)),
            )
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.scale, ctx.window, ctx.documents = scale, window, documents
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        *saved, sinks = ctx.saved_tensors
        deterministic = torch.are_deterministic_algorithms_enabled()
        options = ctx.scale, ctx.window, deterministic, ctx.documents
        dq, dk, dv, *dsinks = run_backward(dout, saved, sinks, *options)
        return dq, dk, dv, dsinks[0] if dsinks else None, *(None,) * 4


def _mask(window: int) -> dict[str, Any]:
    """Arguments of the causal mask; the window counts keys before and after the query's."""
    if not window:
        return dict(causal=True)
    return dict(causal=True, window_size_left=window - 1, window_size_right=0)


def _lengths(documents: Documents | None) -> dict[str, Any]:
    if documents is None:
        return {}
    bounds, longest = documents.bounds_N1, documents.longest
    return dict(
        cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=longest, max_seqlen_k=longest
    )


def _outputs(q_SBHd: Tensor, v_TBGv: Tensor) -> tuple[Tensor, Tensor]:
    S, B, H, _ = q_SBHd.shape
    out_SBHv = q_SBHd.new_empty(S, B, H, v_TBGv.shape[-1])
    return out_SBHv, q_SBHd.new_empty(B, H, S, dtype=torch.float32)


def _gradients(*tensors: Tensor) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in tensors]


def _batch_first(x_SBHd: Tensor) -> Tensor:
    return x_SBHd.transpose(0, 1)


def _single_sequence(x_T1Hd: Tensor) -> Tensor:
    return x_T1Hd.squeeze(1)


def _readable(x: Tensor) -> Tensor:
    """x without strides of 0, for which other kernels would be compiled."""
    return x.contiguous() if 0 in x.stride() else dense(x)
