"""Core attention by flash-attn-4 on Hopper (Dao et al., FlashAttention-4: CuTe DSL kernels).

The library is called below its autograd function, with outputs and gradients allocated here in the
layout that the layers around them have, so that nothing is copied on either side. It serves grouped
queries, values narrower than keys, sliding windows and learnable sinks with their gradient; fewer
queries than keys are the last of them. In deterministic mode the backward pass adds in a fixed
order; otherwise the gradient of the queries, and with grouped queries those of keys and values, are
sums by atomics.

Packed documents take its interface for sequences of various lengths, `cu_seqlens_q` and
`cu_seqlens_k` of `flash_attn_varlen_func`: bounds on the device, and tensors [T, H, d] of one
sequence. The bounds have a fixed number of places; those behind the last document begin and end at
T, which is a sequence without tokens. All sizes and launches follow from shapes and from the bound
of a document's length, so that a graph can be replayed with other documents. The backward pass
takes 128 rows of fp32 more for each place in its scratch memory.

`scripts/bench_libraries.py attention` measures it beside cuDNN's and torch's kernels.

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
        q_SBHd, k_TBGd, v_TBGv: bf16 on a Hopper GPU; read where they are if channels are contiguous
            and every row starts at a multiple of 16 bytes, copied otherwise.
        sinks_H: a logit per head in the softmax denominator (arXiv 2508.10925), bf16 or fp32.
        scale: factor on q @ k^T.
        window: keys that a query sees, itself included; 0 is no limit.
        documents: with bounds, of the S = T tokens of one sequence.
        top: takes note of the largest logit of each head.

    Returns:
        o_SBHv, contiguous.

    Raises:
        ValueError: tensors that the kernels do not take.
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
    """`attention`, and the logarithm of the softmax denominator of each row in fp32, [B, H, S]; of
    documents [H, T]."""
    out, lse = _outputs(q, v)
    lse, given = (lse, _batch_first) if documents is None else (lse[0], _only)
    with calling() as library:
        library._flash_attn_fwd(
            *(given(_readable(x)) for x in (q, k, v)),
            softmax_scale=scale,
            learnable_sink=sinks,
            out=given(out),
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
    given = _batch_first if documents is None else _only
    dq, dk, dv = (given(x) for x in gradients)
    with calling() as library:
        returned = library._flash_attn_bwd(
            *(given(_readable(x)) for x in (q, k, v, out)),
            given(dout.contiguous()),
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
    """Not an operator of torch's library, which the host would spend twice the time on."""

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
            heads = (x.permute(1, 2, 0, 3) for x in (q, k))
            how = dict(scale=scale, window=window, documents=documents)
            raise_max_logits(
                top, *heads, **how, lse_BHS=lse.view(out.size(1), out.size(2), out.size(0))
            )
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.scale, ctx.window, ctx.documents = scale, window, documents
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        *saved, sinks = ctx.saved_tensors
        deterministic = torch.are_deterministic_algorithms_enabled()
        how = ctx.scale, ctx.window, deterministic, ctx.documents
        gradients = run_backward(dout, saved, sinks, *how)
        dq, dk, dv, *rest = gradients
        return dq, dk, dv, rest[0] if rest else None, *(None,) * 4


def _mask(window: int) -> dict[str, Any]:
    """Of the last queries. A window is of keys before the query's, and after it."""
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


def _only(x_T1Hd: Tensor) -> Tensor:
    """The one sequence."""
    return x_T1Hd.squeeze(1)


def _readable(x: Tensor) -> Tensor:
    """Without strides of 0, for which other kernels would be compiled."""
    return x.contiguous() if 0 in x.stride() else dense(x)
