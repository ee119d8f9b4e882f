"""Inputs of linear attention for tests of every backend."""

from typing import NamedTuple

import torch
from torch import Tensor


class Case(NamedTuple):
    """Sizes of a problem, and where documents begin in each sequence."""

    B: int
    S: int
    K: int
    V: int
    d: int
    documents: tuple[tuple[int, ...], ...] | None = None

    @property
    def position_BS(self) -> Tensor | None:
        """Position of each token in its document."""
        if self.documents is None:
            return None
        rows = []
        for begins in self.documents:
            bounds = [*begins, self.S]
            rows.append([t - max(b for b in bounds if b <= t) for t in range(self.S)])
        return torch.tensor(rows)


CASES = [
    Case(2, 5, 1, 1, 8),
    Case(1, 64, 2, 4, 16),
    Case(2, 65, 1, 3, 16),
    Case(1, 150, 2, 2, 12),
    Case(1, 1, 1, 2, 16),
    # Documents of one token; that begin and end with a chunk; that fill several.
    Case(2, 70, 1, 2, 16, ((0, 1, 2, 3, 63, 64, 65), (0,))),
    Case(1, 200, 2, 4, 8, ((0, 10, 64, 128, 190, 199),)),
    Case(1, 192, 1, 1, 16, ((0, 100, 128),)),
]


def given(case: Case, dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Tensor]:
    """q, k, v, logarithms of decays of all sizes, beta: leaves that need gradients."""
    B, S, K, V, d = case[:5]
    generator = torch.Generator().manual_seed(S * 100 + d)
    q, k, v = (torch.randn(B, S, n, d, generator=generator) for n in (K, K, V))
    # From hardly any decay to one that leaves nothing, as A up to 16 makes it.
    log_decay = -torch.exp(4 * torch.randn(B, S, V, generator=generator) - 3).clamp(max=60)
    beta = torch.rand(B, S, V, generator=generator)
    wide = [x.to(device, dtype) for x in (q, k, v)]
    return [
        x.requires_grad_()
        for x in (*wide, log_decay.to(device, _at_least_fp32(dtype)), beta.to(device, dtype))
    ]


def _at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def gradient(like: Tensor) -> Tensor:
    """Gradient of the output."""
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(9)).to(like)
