"""Ring attention (arXiv 2310.01889) of ranks that share sequences: a measurement, not a feature.

Keys and values go from rank to rank, and each rank attends with its own queries to what has come,
while the next part travels. Results of parts are merged by the logarithms of their softmax
denominators. Rank r has chunks r and 2 R - 1 - r of a sequence. So the part of an earlier rank is
seen by all queries in its first chunk alone, and the part of a later rank by the second half of the
queries in both chunks: half of a part's pairs, on every rank in every step.

Legend: B batch, H query heads, G key-value heads, S positions of this rank in two chunks, d
channels of a head, R context ranks.
"""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.kernels.core_attention.fa4_library import calling


class Kernel(Protocol):
    """Attention of some queries to some keys."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """Output [B, S, H, d] and fp32 logarithm of the denominators [B, H, S]."""

    def backward(
        self, dout: Tensor, saved: tuple[Tensor, ...], causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k, v; `saved` are q, k, v, output and logarithm over all keys."""


class Plain:
    """fp32, as written in textbooks."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        logits_BHST = self._logits(q, k, causal)
        lse_BHS = logits_BHST.logsumexp(-1)
        weight_BHST = (logits_BHST - lse_BHS[..., None]).exp()
        return torch.einsum("bhst,bthd->bshd", weight_BHST, _shared(v, q)), lse_BHS

    def backward(
        self, dout: Tensor, saved: tuple[Tensor, ...], causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, lse_BHS = saved
        weight_BHST = (self._logits(q, k, causal) - lse_BHS[..., None]).exp()
        dweight_BHST = torch.einsum("bshd,bthd->bhst", dout, _shared(v, q))
        mean_BHS1 = (dout * out).sum(-1).transpose(1, 2)[..., None]
        dlogits_BHST = weight_BHST * (dweight_BHST - mean_BHS1) * q.shape[-1] ** -0.5
        dq = torch.einsum("bhst,bthd->bshd", dlogits_BHST, _shared(k, q))
        dk = torch.einsum("bhst,bshd->bthd", dlogits_BHST, q)
        dv = torch.einsum("bhst,bshd->bthd", weight_BHST, dout)
        groups = k.shape[2]
        return dq, *(x.unflatten(2, (groups, -1)).sum(3) for x in (dk, dv))

    def _logits(self, q: Tensor, k: Tensor, causal: bool) -> Tensor:
        logits_BHST = torch.einsum("bshd,bthd->bhst", q, _shared(k, q)) * q.shape[-1] ** -0.5
        if not causal:
            return logits_BHST
        hidden = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(1)
        return logits_BHST.masked_fill(hidden, float("-inf"))


def _shared(x_BTGd: Tensor, q_BSHd: Tensor) -> Tensor:
    return x_BTGd.repeat_interleave(q_BSHd.shape[2] // x_BTGd.shape[2], 2)


class Flash:
    """flash-attn-4 on Hopper, in bf16."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(q)
        lse_BHS = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
        scale = q.shape[-1] ** -0.5
        with calling() as library:
            library._flash_attn_fwd(
                q, k, v, softmax_scale=scale, causal=causal, out=out, lse=lse_BHS
            )
        return out, lse_BHS

    def backward(
        self, dout: Tensor, saved: tuple[Tensor, ...], causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, lse_BHS = saved
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        scale, grads = q.shape[-1] ** -0.5, dict(dq=dq, dk=dk, dv=dv)
        with calling() as library:
            library._flash_attn_bwd(
                q, k, v, out, dout, lse_BHS, softmax_scale=scale, causal=causal, **grads
            )
        return dq, dk, dv


def ring_attention(
    q_BSHd: Tensor, k_BSGd: Tensor, v_BSGd: Tensor, group: dist.ProcessGroup, kernel: Kernel
) -> Tensor:
    """Causal attention [B, S, H, d] of this rank's two chunks of queries, contiguous inputs."""
    out: Tensor = _Ring.apply(q_BSHd, k_BSGd, v_BSGd, group, kernel)
    return out


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, kernel: Kernel
    ) -> Tensor:
        out = lse = None
        for source, kv in _parts(torch.stack([k, v]), group):
            queries, keys, causal = _seen(source, group.rank(), q.shape[1])
            part = kernel.forward(*_cut(q, kv, queries, keys), causal)
            if out is None or lse is None:
                out, lse = part[0].float(), part[1]
            else:
                _merge(out[:, queries], lse[..., queries], *part)
        assert out is not None and lse is not None
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group, ctx.kernel = group, kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        group, kernel, dout = ctx.group, ctx.kernel, dout.contiguous()
        dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        dkv = torch.zeros(2, *k.shape, dtype=torch.float32, device=q.device)
        travel: list[Any] = []
        for source, kv in _parts(torch.stack([k, v]), group):
            queries, keys, causal = _seen(source, group.rank(), q.shape[1])
            own = [x[:, queries].contiguous() for x in (out, dout)]
            saved = *_cut(q, kv, queries, keys), own[0], lse[..., queries].contiguous()
            dq_part, *dkv_part = kernel.backward(own[1], saved, causal)
            dq[:, queries] += dq_part
            _finish(travel)
            dkv[:, :, keys] += torch.stack(dkv_part)
            # Gradients follow the keys that they are of, beside the next part, and come home.
            dkv, travel = _sent(dkv, group)
        _finish(travel)
        dk, dv = dkv.to(k.dtype)
        return dq.to(q.dtype), dk, dv, None, None


def _parts(kv: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """Keys and values of all ranks in turn, own ones first; the next ones travel meanwhile."""
    ranks, rank = group.size(), group.rank()
    for step in range(ranks):
        coming, requests = kv, []
        if step < ranks - 1:
            coming, requests = _sent(kv, group)
        yield (rank - step) % ranks, kv
        _finish(requests)
        kv = coming


def _sent(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, list[Any]]:
    """A tensor that comes from the rank before, while `x` goes to the next one."""
    if group.size() == 1:
        return x, []
    coming, ranks, rank = torch.empty_like(x), group.size(), group.rank()
    after, before = (dist.get_global_rank(group, (rank + n) % ranks) for n in (1, -1))
    transfers = [
        dist.P2POp(dist.isend, x, after, group),
        dist.P2POp(dist.irecv, coming, before, group),
    ]
    return coming, dist.batch_isend_irecv(transfers)


def _finish(requests: list[Any]) -> None:
    for request in requests:
        request.wait()


def _seen(source: int, rank: int, positions: int) -> tuple[slice, slice, bool]:
    """Queries and keys of a part that see each other, and whether causally."""
    whole, half = slice(0, positions), positions // 2
    if source == rank:
        return whole, whole, True
    return (whole, slice(0, half), False) if source < rank else (slice(half, None), whole, False)


def _cut(q: Tensor, kv: Tensor, queries: slice, keys: slice) -> tuple[Tensor, Tensor, Tensor]:
    k, v = kv[:, :, keys]
    return q[:, queries].contiguous(), k.contiguous(), v.contiguous()


def _merge(out: Tensor, lse: Tensor, out_part: Tensor, lse_part: Tensor) -> None:
    """Add a part to the result so far, in place."""
    both = torch.logaddexp(lse, lse_part)
    before, after = ((x - both).exp().transpose(1, 2)[..., None] for x in (lse, lse_part))
    out.mul_(before).add_(out_part * after)
    lse.copy_(both)
