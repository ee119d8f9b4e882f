"""Products in fp32, rows by index, and pieces of queries that bound memory."""

from collections.abc import Iterator

import torch
from torch import Tensor

_BYTES, _ON_CPU = 1 << 28, 1 << 24
"""Bytes of the largest tensor of a piece, on a GPU and on a CPU, whose caches hold no more."""


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of [..., m, n] and [..., n, p], in fp32 at least. Not differentiable."""
    dtype = torch.promote_types(a.dtype, torch.float32)
    if a.is_cuda and a.dtype != dtype:
        batch = a.shape[:-2]
        flat = torch.bmm(a.flatten(0, -3), b.flatten(0, -3), out_dtype=dtype)
        return flat.unflatten(0, batch)
    return a.to(dtype) @ b.to(dtype)


def rows(x_BTc: Tensor, idx_BCK: Tensor) -> Tensor:
    """Rows of every sequence, [B, C, K, c]; those of index -1 are some row."""
    return x_BTc.flatten(0, 1)[_places(idx_BCK, x_BTc.shape[1])]


def add_rows_(sum_BTc: Tensor, idx_BCK: Tensor, x_BCKc: Tensor) -> None:
    """Add rows to those of `rows`, always in the same order: a run repeats its bits."""
    flat, at = sum_BTc.view(-1, sum_BTc.shape[2]), _places(idx_BCK, sum_BTc.shape[1]).flatten()
    if sum_BTc.is_cuda:  # which sorts; `index_add_` has atomic additions there
        flat.index_put_((at,), x_BCKc.flatten(0, 2), accumulate=True)
    else:
        flat.index_add_(0, at, x_BCKc.flatten(0, 2))


def _places(idx_BCK: Tensor, T: int) -> Tensor:
    """Rows [B, C, K] of all sequences one behind the other.

    Missing keys of a query have rows of their own, K <= T: a GPU adds to one row after another.
    """
    (B, _, K), device = idx_BCK.shape, idx_BCK.device
    some_BCK = torch.where(idx_BCK < 0, torch.arange(K, device=device), idx_BCK)
    return some_BCK + torch.arange(0, B * T, T, device=device)[:, None, None]


def pieces(like_BSx: Tensor, bytes_of_a_query: int) -> Iterator[slice]:
    """Slices of the queries S; a piece has at least one."""
    queries, most = like_BSx.shape[1], _BYTES if like_BSx.is_cuda else _ON_CPU
    step = max(1, most // max(1, bytes_of_a_query))
    for start in range(0, queries, step):
        yield slice(start, min(start + step, queries))
