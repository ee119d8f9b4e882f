"""Core attention by flash-attn-4 on Hopper (Dao et al., FlashAttention-4: CuTe DSL kernels).

The library is called below its autograd function, with outputs and gradients allocated here in the
layout of the surrounding layers, so that nothing is copied. It supports grouped queries, values
narrower than keys, sliding windows and learnable sinks with their gradient; fewer queries than keys
are the last of them. In deterministic mode the backward pass sums in a fixed order; otherwise the
gradient of the queries, and with grouped queries those of keys and values, are summed by atomics.

Packed documents take its interface for sequences of various lengths (`flash_attn_varlen_func`):
bounds on the device, and tensors [T, H, d] of one sequence. Entries after the last document start
and end at T, an empty sequence. Sizes and launches follow from shapes and the bound of a document's
length, so that a graph can be replayed with other documents. The backward pass needs 128 rows of
fp32 scratch memory for each possible document.

Kernels for the models in configs/model (`SHIPPED`) are compiled ahead of time without a GPU, for
the tensors of a `FakeTensorMode`, which have no memory. A kernel serves any batch, any number of
heads and any sequence longer than its tile. Others are compiled at their first launch.

Legend: B batch, H query heads, G key-value heads (G divides H), S queries, T keys (T >= S), d
channels of query and key, v channels of value.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import once_differentiable

from phalanx.kernels.cache import use_folder
from phalanx.kernels.core_attention.documents import Documents
from phalanx.kernels.core_attention.fa4_library import calling, library, named
from phalanx.kernels.core_attention.max_logit import MaxLogit, raise_max_logits
from phalanx.kernels.core_attention.rope import dense
from phalanx.kernels.library_objects import ARCH, replaced
from phalanx.kernels.limits import unsupported_heads


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
    batch_first: bool = False,
) -> Tensor:
    """Causal attention as `kernels.core_attention.core.attention`; returns o_SBHv, contiguous.

    Args:
        q_SBHd, k_TBGd, v_TBGv: bf16 on a Hopper GPU; read in place if channels are contiguous and
            every row is aligned to 16 bytes, copied otherwise.
        sinks_H: bf16 or fp32.
        documents: with bounds, for the S = T tokens of one sequence.
        batch_first: the result, and gradients, have the order of [B, S, H, v] in memory.

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
    options = scale, window, documents, top, batch_first
    return _Attention.apply(q_SBHd, k_TBGd, v_TBGv, sinks_H, *options)


def run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    scale: float,
    window: int,
    documents: Documents | None = None,
    batch_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """`attention`, and fp32 log-sums of the softmax: [B, H, S], or [H, T] with documents."""
    S, B, H, _ = q.shape
    out = _empty((S, B, H, v.shape[-1]), q, batch_first)
    lse = q.new_empty((B, H, S) if documents is None else (H, S), dtype=torch.float32)
    with calling() as library:
        library._flash_attn_fwd(
            *(_batches(_readable(x), documents) for x in (q, k, v)),
            softmax_scale=scale,
            learnable_sink=sinks,
            out=_batches(out, documents),
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
    batch_first: bool = False,
) -> list[Tensor]:
    """Gradients of q, k, v, contiguous, and of the sinks; `saved`: q, k, v, out and log-sums."""
    q, k, v, out, lse = saved
    gradients = [_empty(x.shape, x, batch_first) for x in (q, k, v)]
    dq, dk, dv = (_batches(x, documents) for x in gradients)
    dout = _readable(dout) if batch_first else dout.contiguous()
    with calling() as library:
        returned = library._flash_attn_bwd(
            *(_batches(_readable(x), documents) for x in (q, k, v, out)),
            _batches(dout, documents),
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
        batch_first: bool,
    ) -> Tensor:
        out, lse = run_forward(q, k, v, sinks, scale, window, documents, batch_first)
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
        ctx.scale, ctx.window, ctx.rest = scale, window, (documents, batch_first)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        *saved, sinks = ctx.saved_tensors
        deterministic = torch.are_deterministic_algorithms_enabled()
        options = ctx.scale, ctx.window, deterministic, *ctx.rest
        dq, dk, dv, *dsinks = run_backward(dout, saved, sinks, *options)
        return dq, dk, dv, dsinks[0] if dsinks else None, *(None,) * 5


def _mask(window: int) -> dict[str, Any]:
    sides = dict(window_size_left=window - 1, window_size_right=0) if window else {}
    return dict(causal=True, **sides)


def _lengths(documents: Documents | None) -> dict[str, Any]:
    if documents is None:
        return {}
    bounds, longest = documents.bounds_N1, documents.longest
    return dict(
        cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=longest, max_seqlen_k=longest
    )


def _empty(shape: Sequence[int], like: Tensor, batch_first: bool) -> Tensor:
    if batch_first:
        return like.new_empty(shape[1], shape[0], *shape[2:]).transpose(0, 1)
    return like.new_empty(shape)


def _batches(x_SBHd: Tensor, documents: Documents | None) -> Tensor:
    """[B, S, H, d], or the one sequence of documents [S, H, d]."""
    return x_SBHd.transpose(0, 1) if documents is None else x_SBHd.squeeze(1)


def _readable(x: Tensor) -> Tensor:
    """x without strides of 0, for which other kernels would be compiled."""
    return x.contiguous() if 0 in x.stride() else dense(x)


_H100_SMS = 132  # asked for in any case, and used on Blackwell


@dataclass(frozen=True)
class AttentionLayer:
    """Key of an attention layer's compiled kernels."""

    group: int  # query heads per key-value head
    d: int  # channels of query and key
    v: int  # channels of value
    window: bool = False
    sinks: bool = False
    deterministic: bool = False
    documents: bool = False  # attention within documents of a sequence


_LAYERS = (
    AttentionLayer(1, 128, 128),  # OLMoE
    AttentionLayer(4, 128, 128),  # Mixtral-8x7B
    AttentionLayer(6, 128, 128),  # Mixtral-8x22B, MiniMax-M2
    AttentionLayer(8, 128, 128),  # Qwen3-30B
    AttentionLayer(12, 128, 128),  # GLM-4.5
    AttentionLayer(16, 128, 128),  # Qwen3-235B
    AttentionLayer(8, 64, 64, sinks=True),  # GPT-OSS
    AttentionLayer(8, 64, 64, window=True, sinks=True),
    AttentionLayer(1, 192, 128),  # DeepSeek, Kimi-K2, Moonlight
    AttentionLayer(1, 256, 256),  # GLM-5, where all keys are seen
    AttentionLayer(8, 256, 256),  # Qwen3-Next
    AttentionLayer(2, 32, 32),  # tiny
)
SHIPPED = tuple(
    AttentionLayer(**vars(layer) | dict(deterministic=deterministic))
    for deterministic, layer in product((False, True), _LAYERS)
)


def entries(layer: AttentionLayer) -> set[str]:
    """Names in a `Cache` of the forward and backward kernels of a layer."""
    with named() as names:
        _call(layer)
    return names


def build(layer: AttentionLayer, cache_folder: Path) -> None:
    """Compile the kernels of a layer that are not in a folder yet; needs no GPU."""
    with use_folder(cache_folder):
        _call(layer)


def _call(layer: AttentionLayer) -> None:
    S, B, G, H = 1024, 1 if layer.documents else 2, 2, 2 * layer.group
    with without_gpu(), FakeTensorMode():
        bf16 = partial(torch.empty, dtype=torch.bfloat16, device="cuda")
        q, k, v = bf16(S, B, H, layer.d), bf16(S, B, G, layer.d), bf16(S, B, G, layer.v)
        sinks = bf16(H) if layer.sinks else None
        window = S // 2 if layer.window else 0
        documents = None
        if layer.documents:
            position = torch.empty(S, dtype=torch.int64, device="cuda")
            documents = Documents(position, places=16, longest=S)
        out, lse = run_forward(q, k, v, sinks, 1.0, window, documents)
        saved, options = [q, k, v, out, lse], (1.0, window, layer.deterministic, documents)
        run_backward(torch.empty_like(out), saved, sinks, *options)


@contextlib.contextmanager
def without_gpu() -> Iterator[None]:
    """Inside, the GPU's properties that library, compiler and torch query are constants."""
    from cutlass.cute.runtime import from_dlpack
    from cutlass.cutlass_dsl import CuTeDSL
    from flash_attn.cute import utils

    interface, settings = library(), CuTeDSL._get_dsl().envar
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (interface, "_get_device_arch", lambda: 90),
            (interface, "get_num_sms_for_selection", lambda *args: _H100_SMS),
            (settings, "_arch", ARCH),
            # torch's export of a tensor queries the current device.
            (utils, "from_dlpack", partial(from_dlpack, enable_tvm_ffi=True)),
        ):
            stack.enter_context(replaced(owner, name, value))
        # If Megatron-Core runs on this process's CPU, "cuda" is redirected to it, but not in here.
        stack.enter_context(torch._C.DisableTorchFunction())
        yield
