"""Core attention as one function: softmax(scale * q @ k^T + mask) @ v, causal, windows and sinks.

Backends: `reference` (explicit fp32 softmax, S x T memory: the oracle), `sdpa` (torch's fused
kernels), `flex` (FlexAttention compiled to Triton: windows and sinks at fused speed) and `fa4`
(flash-attn-4 for Hopper). All differentiate through q, k, v and the sinks, and read no device value
on the host. In a packed sequence a query sees only its own document
(`kernels.core_attention.documents`).

Shape legend: B batch, H query heads, G key-value heads (G divides H), S queries, T keys (T >= S), d
channels of query and key, v channels of value. The queries are the last S of T positions: query i
is at position p = T - S + i and sees keys j with p - window < j <= p (window 0: j <= p). With
documents there is one sequence, B = 1; `documents.before` of its keys precede the queries.
"""

import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from phalanx.kernels.core_attention.documents import Documents
from phalanx.kernels.core_attention.max_logit import MaxLogit, raise_max_logits

BLOCK = 128  # rows and columns of a tile of FlexAttention's block mask


def attention(
    q_BHSd: Tensor,
    k_BGTd: Tensor,
    v_BGTv: Tensor,
    *,
    scale: float,
    window: int = 0,
    sinks_H: Tensor | None = None,
    documents: Documents | None = None,
    top: MaxLogit | None = None,
    backend: str,
) -> Tensor:
    """Causal attention with grouped queries, an optional sliding window and optional sinks.

    Args:
        q_BHSd: any strides with contiguous channels, bf16 or fp32.
        k_BGTd: query head h uses key-value head h // (H / G).
        v_BGTv: v may differ from d (multi-head latent attention).
        scale: factor on q @ k^T.
        window: keys that a query sees, itself included; 0 is no limit.
        sinks_H: a logit per head that joins the softmax denominator and has no value (GPT-OSS,
            arXiv 2508.10925; "softmax off by one" is the sink 0).
        documents: those of the S queries of one sequence; a query sees only its own.
        top: records the largest logit of each head, without sinks.
        backend: `reference`, `sdpa`, `flex` or `fa4`.

    Returns:
        o_BHSv in the dtype of q; with `fa4` contiguous as o_SBHv.

    Raises:
        ValueError: shapes that do not fit, or that the backend does not support.
    """
    heads, groups, queries, keys = q_BHSd.size(1), k_BGTd.size(1), q_BHSd.size(2), k_BGTd.size(2)
    if heads % groups:
        raise ValueError(f"{heads} query heads are not a multiple of {groups} key-value heads")
    if queries > keys:
        raise ValueError(f"{queries} queries cannot be the last of {keys} positions")
    if backend not in _BACKENDS:
        raise ValueError(f"unknown attention backend {backend!r}: use {', '.join(_BACKENDS)}")
    if documents is not None:
        batch, tokens = q_BHSd.size(0), documents.first_T.numel()
        if (batch, queries, keys) != (1, tokens, documents.before + tokens):
            raise ValueError(
                f"documents in {tokens} tokens of one sequence, behind {documents.before} others, "
                f"do not fit {queries} queries and {keys} keys of {batch}"
            )
    # A window that covers every key is no window: one mask fewer to build, compile or reject.
    window = 0 if window >= keys else window
    call = _Call(scale, window, sinks_H, documents, top)
    return _BACKENDS[backend](q_BHSd, k_BGTd, v_BGTv, call)


def visible_ST(
    queries: int,
    keys: int,
    window: int,
    device: torch.device | str,
    documents: Documents | None = None,
) -> Tensor:
    """Boolean [S, T]: the keys (columns) that each query (row) sees."""
    p_S1 = torch.arange(keys - queries, keys, device=device)[:, None]
    j_1T = torch.arange(keys, device=device)[None]
    visible_keys = j_1T <= p_S1
    if documents is not None:
        visible_keys &= j_1T >= documents.first_T[:, None]
    return visible_keys & (j_1T > p_S1 - window) if window else visible_keys


class _Call(NamedTuple):
    scale: float
    window: int
    sinks_H: Tensor | None
    documents: Documents | None
    top: MaxLogit | None

    def visible_ST(self, q: Tensor, k: Tensor) -> Tensor:
        return visible_ST(q.size(2), k.size(2), self.window, q.device, self.documents)


def _reference(q: Tensor, k: Tensor, v: Tensor, call: _Call) -> Tensor:
    (_, H, S, _), (_, G, T, _) = q.shape, k.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    # The H / G query heads of a group are more rows against the same keys: no key is copied.
    q_Bgrd = q.to(dtype).unflatten(1, (G, H // G)).flatten(2, 3)
    logits_BHST = (q_Bgrd @ k.to(dtype).transpose(-1, -2)).reshape(-1, H, S, T) * call.scale
    logits_BHST = logits_BHST.masked_fill(~call.visible_ST(q, k), float("-inf"))
    if call.sinks_H is not None:
        column_BHS1 = call.sinks_H.to(dtype)[:, None, None].expand(logits_BHST.size(0), H, S, 1)
        logits_BHST = torch.cat([logits_BHST, column_BHS1], -1)
    weights_BHST = logits_BHST.softmax(-1)[..., :T]
    o_Bgrv = weights_BHST.reshape(-1, G, H // G * S, T) @ v.to(dtype)
    return o_Bgrv.reshape(-1, H, S, v.size(-1)).to(q.dtype)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, call: _Call) -> Tensor:
    scale, window, sinks_H, documents, _ = call
    S, T, grouped = q.size(2), k.size(2), q.size(1) != k.size(1)
    if q.device.type != "cuda":
        if sinks_H is not None:
            visible_keys = F.pad(call.visible_ST(q, k), (0, 1), value=True)
            q, k, v = _with_sink_key(q, k, v, sinks_H, scale)
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=visible_keys, scale=scale, enable_gqa=grouped
            )[..., :-2]
        whole = S == T and not window and documents is None
        mask = None if whole else call.visible_ST(q, k)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
        )
    if window or S != T or documents is not None or sinks_H is not None:
        raise ValueError(
            "sdpa on CUDA has no sinks, no window, no context parallelism and no documents: "
            "set kernels.attention=flex"
        )
    # cuDNN is the only fast one with d != v; it gives way to flash or memory-efficient attention
    # under deterministic algorithms. Without the math kernel, what none of them can run is an
    # error, not S x T memory.
    fused = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
    ]
    with sdpa_kernel(fused, set_priority=True):
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=grouped
        )


def _with_sink_key(
    q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """An additional key, whose logit is a head's sink and whose value is 0.

    The heads of a group share keys: the sink is two channels of the queries, in which that key has
    1 and all others have 0. The second holds the rounding error of the first. Values get two
    channels too, as kernels require equal widths.
    """
    (B, H, S, _), (_, G, _, d) = q.shape, k.shape
    sink_H = sinks_H.to(torch.promote_types(q.dtype, torch.float32)) / scale
    high_H = sink_H.to(q.dtype)
    channels_H2 = torch.stack([high_H, (sink_H - high_H).to(q.dtype)], -1)
    key = torch.zeros(d + 2, dtype=k.dtype, device=k.device)
    key[d:] = 1
    keys = torch.cat([F.pad(k, (0, 2)), key.expand(B, G, 1, -1)], 2)
    queries = torch.cat([q, channels_H2.view(1, H, 1, 2).expand(B, H, S, 2)], -1)
    return queries, keys, F.pad(v, (0, 2, 0, 1))


def _flex(q: Tensor, k: Tensor, v: Tensor, call: _Call) -> Tensor:
    if call.documents is None:
        mask = block_mask(q.size(2), k.size(2), call.window, q.device)
    else:
        mask = document_block_mask(call.documents, call.window)
    if q.device.type != "cuda":  # inference only: torch has no backward pass on a CPU
        return _flex_with_sinks(q, k, v, call.sinks_H, mask, call.scale)
    # Layers with and without a window, evaluation, recomputation and each chunk of a context
    # parallel rank are variants of one compiled function, more than torch's usual limit of 8.
    with torch._dynamo.config.patch(recompile_limit=64):
        return _compiled_flex()(q, k, v, call.sinks_H, mask, call.scale)


def _flex_with_sinks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks_H: Tensor | None,
    mask: BlockMask,
    scale: float,
) -> Tensor:
    flex: Callable[..., Any] = functools.partial(
        flex_attention, block_mask=mask, scale=scale, enable_gqa=q.size(1) != k.size(1)
    )
    if q.device.type == "cuda":
        # Below 128 queries torch would use its decoding kernel, which puts the queries of all heads
        # of a group into one tile and has no configuration for more than 128 of them.
        flex = functools.partial(flex, kernel_options={"BACKEND": "TRITON"})
    if sinks_H is None:
        return flex(q, k, v)
    o_BHSv, aux = flex(q, k, v, return_aux=AuxRequest(lse=True))
    # exp(lse) / (exp(lse) + exp(sink)): the share of the softmax that the sink leaves to the keys.
    share_BHS1 = torch.sigmoid(aux.lse - sinks_H.to(aux.lse.dtype)[:, None])[..., None]
    return (o_BHSv * share_BHS1).to(q.dtype)


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    if torch._dynamo.config.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        raise ValueError(
            "kernels.attention=flex needs torch.compile: unset TORCHDYNAMO_DISABLE "
            "and TORCH_COMPILE_DISABLE"
        )
    # Without the option inductor autotunes the kernels of sums at their first run, so that bits
    # would depend on the GPU's load at that time.
    options: dict[str, Any] = {"deterministic": True}
    return torch.compile(_flex_with_sinks, dynamic=False, fullgraph=True, options=options)


@functools.lru_cache(maxsize=64)
def block_mask(queries: int, keys: int, window: int, device: torch.device) -> BlockMask:
    """FlexAttention's sparse form of `visible_ST`, cached.

    Tiles are classified by their corners, so that the S x T mask never exists: 128 tiles a side at
    16384 tokens instead of 256 MB.
    """
    offset = keys - queries

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        visible_keys = j <= i + offset
        return visible_keys & (j > i + offset - window) if window else visible_keys

    first_q = torch.arange(0, queries, BLOCK)[:, None] + offset
    first_k = torch.arange(0, keys, BLOCK)[None]
    last_q, last_k = first_q + BLOCK - 1, first_k + BLOCK - 1
    some = first_k <= last_q.clamp(max=keys - 1)
    # Tiles that extend past the end are never full: rows and columns past it must stay masked.
    full = (last_k <= first_q) & (last_q < keys) & (last_k < keys)
    if window:
        some &= last_k > first_q - window
        full &= first_k > last_q - window
    return _block_mask(some, full, visible, (queries, keys)).to(device)


def document_block_mask(documents: Documents, window: int) -> BlockMask:
    """FlexAttention's sparse form of `visible_ST` within documents, built once for all layers.

    First visible keys never decrease, so tiles are classified by their corners here too. Their
    number is static; which are visible is known only on the device.
    """
    if window in documents.masks:
        cached: BlockMask = documents.masks[window]
        return cached
    first_S, before = documents.first_T, documents.before
    S, device = first_S.numel(), first_S.device
    if window:
        first_S = first_S.maximum(torch.arange(S, device=device) + (before + 1 - window))

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i + before) & (j >= first_S[i])

    first_q = torch.arange(0, S, BLOCK, device=device)[:, None]
    first_k = torch.arange(0, before + S, BLOCK, device=device)[None]
    last_q, last_k = first_q + BLOCK - 1, first_k + BLOCK - 1
    seen_by_first, seen_by_last = first_S[first_q], first_S[last_q.clamp(max=S - 1)]
    some = (first_k <= last_q + before) & (last_k >= seen_by_first)
    full = (last_k <= first_q + before) & (last_q < S) & (first_k >= seen_by_last)
    documents.masks[window] = _block_mask(some, full, visible, (S, before + S))
    return documents.masks[window]


def _block_mask(
    some: Tensor,
    full: Tensor,
    visible: Callable[..., Tensor],
    size: tuple[int, int],
) -> BlockMask:
    partial_blocks, full_blocks = _rows(some & ~full), _rows(full)
    return BlockMask.from_kv_blocks(
        *partial_blocks, *full_blocks, BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=size
    )


def _rows(dense: Tensor) -> tuple[Tensor, Tensor]:
    """Count and indices (set columns first, in order) of each row: [1, 1, rows(, columns)]."""
    columns = dense.int().argsort(dim=-1, descending=True, stable=True)
    return dense.sum(-1).int()[None, None], columns.int()[None, None].contiguous()


def _fa4(q: Tensor, k: Tensor, v: Tensor, call: _Call) -> Tensor:
    from phalanx.kernels.core_attention import fa4

    q, k, v = (x.permute(2, 0, 1, 3) for x in (q, k, v))
    o_SBHv = fa4.attention(q, k, v, **call._asdict())
    return o_SBHv.permute(1, 2, 0, 3)


def _with_max_logits(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def attend_and_record(q: Tensor, k: Tensor, v: Tensor, call: _Call) -> Tensor:
        if call.top is not None:
            raise_max_logits(
                call.top, q, k, scale=call.scale, window=call.window, documents=call.documents
            )
        return attend(q, k, v, call)

    return attend_and_record


_BACKENDS = {
    "reference": _with_max_logits(_reference),
    "sdpa": _with_max_logits(_sdpa),
    "flex": _with_max_logits(_flex),
    "fa4": _fa4,
}
