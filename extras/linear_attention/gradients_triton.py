"""Gradients of queries, keys and decays within a chunk of the gated delta rule, in Triton.

flash-linear-attention's kernel of this step transposes the result of a product in registers to
multiply with it. Triton from 3.4 to before 3.7.1 compiles that wrongly for Hopper, and the library
refuses to run it there (fla-org/flash-linear-attention, issue 640); torch 2.11 has Triton 3.6. Here
the transpose is a separate product of transposed inputs. `register` replaces the library's kernel
through its registry.

Shape legend: B sequences, S positions, K key heads, V value heads, N chunks of L positions; d
channels of query and key, e of value, in blocks of D and E.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 64


@triton.jit
def delta_rule_gradients(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    g,
    h,
    do,
    dh,
    dv,
    dq,
    dk,
    dw,
    dg,
    scale,
    S,
    rows,
    K: tl.constexpr,
    V: tl.constexpr,
    d: tl.constexpr,
    e: tl.constexpr,
    L: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
):
    """One block of D channels of one chunk of one value head.

    g is the base-2 logarithm of the decay since the start of the chunk. With s_ij = scale do_i.v_j
    2^(g_i - g_j) for keys j up to query i, and dg from the factors of these:
        dq_i = scale 2^g_i h do_i + sum_j s_ij k_j
        dk_j = 2^(g_last - g_j) dh v_j + sum_i s_ij q_i
        dw_i = -h dv_i
    """
    block, chunk = tl.program_id(0), tl.program_id(1)
    sequence, head = (tl.program_id(2) // V).to(tl.int64), tl.program_id(2) % V
    chunks = tl.num_programs(1)
    of_value = sequence * S * V + head
    of_key = sequence * S * K + head // (V // K)
    of_state = ((sequence * chunks + chunk) * V + head) * d * e

    at = chunk * L + tl.arange(0, L)
    here = at < S
    channel = block * D + tl.arange(0, D)
    inside = here[:, None] & (channel < d)[None, :]

    dq_LD = tl.zeros((L, D), tl.float32)
    dk_LD = tl.zeros((L, D), tl.float32)
    dw_LD = tl.zeros((L, D), tl.float32)
    s_LL = tl.zeros((L, L), tl.float32)  # from query to key
    t_LL = tl.zeros((L, L), tl.float32)  # from key to query
    at_end = tl.zeros((1,), tl.float32)
    for first in range(0, e, E):
        value = first + tl.arange(0, E)
        place = (of_value + at * V)[:, None] * e + value[None, :]
        there = here[:, None] & (value < e)[None, :]
        v_LE = tl.load(v + place, mask=there, other=0.0)
        do_LE = tl.load(do + place, mask=there, other=0.0)
        dv_LE = tl.load(dv + place, mask=there, other=0.0)
        state = of_state + value[:, None] + channel[None, :] * e
        filled = (value < e)[:, None] & (channel < d)[None, :]
        h_ED = tl.load(h + state, mask=filled, other=0.0)
        dh_ED = tl.load(dh + state, mask=filled, other=0.0)
        at_end += tl.sum(h_ED.to(tl.float32) * dh_ED.to(tl.float32))
        s_LL = tl.dot(do_LE, tl.trans(v_LE), s_LL)
        t_LL = tl.dot(v_LE, tl.trans(do_LE), t_LL)
        dq_LD = tl.dot(do_LE, h_ED.to(do_LE.dtype), dq_LD)
        dk_LD = tl.dot(v_LE, dh_ED.to(v_LE.dtype), dk_LD)
        dw_LD = tl.dot(dv_LE.to(v_LE.dtype), h_ED.to(v_LE.dtype), dw_LD)

    by_value = (of_value + at * V)[:, None] * d + channel[None, :]
    tl.store(dw + by_value, (-dw_LD).to(dw.dtype.element_ty), mask=inside)
    by_key = (of_key + at * K)[:, None] * d + channel[None, :]
    q_LD = tl.load(q + by_key, mask=inside, other=0.0)
    k_LD = tl.load(k + by_key, mask=inside, other=0.0)

    last = tl.minimum(chunk * L + L, S) - 1
    g_L = tl.load(g + of_value + at * V, mask=here, other=0.0)
    g_last = tl.load(g + of_value + last * V)
    dq_LD *= tl.exp2(g_L)[:, None] * scale
    dk_LD *= tl.where(here, tl.exp2(g_last - g_L), 0.0)[:, None]
    at_end = at_end * tl.exp2(g_last) + tl.sum(dk_LD * k_LD)

    both = here[:, None] & here[None, :]
    seen = (at[:, None] >= at[None, :]) & both
    sees = (at[:, None] <= at[None, :]) & both
    s_LL = tl.where(seen, s_LL * tl.exp2(g_L[:, None] - g_L[None, :]), 0.0) * scale
    t_LL = tl.where(sees, t_LL * tl.exp2(g_L[None, :] - g_L[:, None]), 0.0) * scale
    dq_LD = tl.dot(s_LL.to(k_LD.dtype), k_LD, dq_LD)
    dk_LD = tl.dot(t_LL.to(q_LD.dtype), q_LD, dk_LD)
    dg_L = tl.sum(dq_LD * q_LD, axis=1) - tl.sum(dk_LD * k_LD, axis=1)
    dg_L += tl.where(at == last, at_end, 0.0)

    tl.store(dq + by_value, dq_LD.to(dq.dtype.element_ty), mask=inside)
    tl.store(dk + by_value, dk_LD.to(dk.dtype.element_ty), mask=inside)
    tl.store(dg + block * rows + of_value + at * V, dg_L, mask=here)


def gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    h: Tensor,
    dh: Tensor,
    w: Tensor,
    g: Tensor,
    dv: Tensor,
    scale: float,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """flash-linear-attention's `chunk_bwd_dqkwg` for sequences of one document with decays.

    All are contiguous: q and k [B, S, K, d]; v, the values written to the state, do and dv [B, S,
    V, e]; h and dh [B, N, V, d, e], states at the starts of chunks and gradients at their ends; w
    [B, S, V, d]; g [B, S, V] fp32. `scale` is of the queries, `chunk_size` L.

    Returns:
        dq and dk [B, S, K, d], dw [B, S, V, d] and dg [B, S, V], fp32.
    """
    B, S, K, d = k.shape
    V, e = v.shape[2:]
    blocks = triton.cdiv(d, _BLOCK)
    dq, dk = (x.new_empty(B, S, V, d) for x in (q, k))
    dw, dg = torch.empty_like(w), g.new_empty(blocks, B, S, V, dtype=torch.float32)
    tile = min(_BLOCK, max(16, triton.next_power_of_2(d)))
    delta_rule_gradients[blocks, triton.cdiv(S, chunk_size), B * V](
        *(q, k, v, g, h, do, dh, dv, dq, dk, dw, dg, scale, S, B * S * V),
        **dict(K=K, V=V, d=d, e=e, L=chunk_size, D=tile),
        E=min(_BLOCK, max(16, triton.next_power_of_2(e))),
        num_warps=4,
        num_stages=2,
    )
    if K != V:
        dq, dk = (x.view(B, S, K, V // K, d).sum(3) for x in (dq, dk))
    return dq, dk, dw, dg.sum(0)


def register() -> None:
    """Have flash-linear-attention use `gradients` for sequences of one document with decays."""
    from fla.backends import BaseBackend
    from fla.backends import register as registered

    class Phalanx(BaseBackend):
        backend_type = "phalanx"
        priority = 0

        def chunk_bwd_dqkwg_verifier(self, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
            unsplit = kwargs.get("cu_seqlens") is None and not kwargs.get("state_v_first")
            plain = kwargs.get("g_gamma") is None
            if unsplit and plain and all(kwargs.get(x) is not None for x in ("g", "w", "dv")):
                return True, None
            return False, "only sequences of one document with decays"

        def chunk_bwd_dqkwg(self, **kwargs: Any) -> tuple[Tensor, ...]:
            names = ("q", "k", "v", "do", "h", "dh", "w", "g", "dv", "scale", "chunk_size")
            return gradients(**{name: kwargs[name] for name in names})

    registered("common")(Phalanx)
