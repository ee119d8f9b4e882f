"""Random problems: rows per expert, which token an expert row reads, and the operands.

Legend: S expert rows, N rows that are gathered from, L experts, D hidden, F expert width, H = 2F.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.scripts.bench.shapes import Shape

SWIGLU = Activation("swiglu")
BF16 = torch.bfloat16
_X, _W = 0.2, 0.02


def dirichlet(S: int, L: int, multiple: int = 128) -> list[int]:
    """Rows of experts whose shares are drawn from Dirichlet(8), in multiples except the last."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        share = torch.distributions.Dirichlet(torch.full((L,), 8.0)).sample()
    counts = (share * S / multiple).long() * multiple
    counts[-1] += S - counts.sum()
    return counts.tolist()


def drawn(S: int, L: int, exponent: float) -> list[int]:
    """Rows of experts when each row draws its own, the i-th likeliest with weight i^-exponent."""
    g = torch.Generator().manual_seed(0)
    weight = torch.arange(1, L + 1, dtype=torch.float64) ** -exponent
    weight = weight[torch.randperm(L, generator=g)]
    picked = torch.multinomial(weight, S, replacement=True, generator=g)
    return torch.bincount(picked, minlength=L).tolist()


def balanced(S: int, L: int) -> list[int]:
    """As equal as can be."""
    return [S // L + (e < S % L) for e in range(L)]


def offsets_of(counts: list[int], device: torch.device) -> Tensor:
    """int32 [L + 1]: first row of each expert, and the end."""
    return torch.tensor([0, *counts]).cumsum(0).to(device, torch.int32)


def order_of(counts: list[int], device: torch.device) -> Tensor:
    """int32 [L]: experts by falling number of rows."""
    return torch.tensor(counts).argsort(descending=True, stable=True).to(device, torch.int32)


def index_of(counts: list[int], N: int, device: torch.device) -> Tensor:
    """int32 [S]: each expert reads some of the N rows, each once, in their order."""
    g = torch.Generator().manual_seed(0)
    picked = [torch.randperm(N, generator=g)[:count].sort().values for count in counts]
    return torch.cat(picked).to(device, torch.int32)


def random(*shape: int, device: torch.device, scale: float = 1.0) -> Tensor:
    """bf16, normal."""
    return torch.randn(*shape, dtype=BF16, device=device).mul_(scale)


@dataclass
class Experts:
    """Operands of the kernels of an expert MLP with sorted rows."""

    S: int
    D: int
    F: int
    L: int
    counts: list[int]
    offsets: Tensor
    order_L: Tensor
    x_SD: Tensor
    dy_SD: Tensor
    prob_S: Tensor
    w1: Tensor
    """[L, H, D]"""
    w2: Tensor
    """[L, D, F]"""

    @property
    def forward_flops(self) -> float:
        return 6 * self.S * self.D * self.F

    def routed(self, counts: list[int]) -> "Experts":
        """The same operands with other rows per expert."""
        where = self.device
        own = dict(offsets=offsets_of(counts, where), order_L=order_of(counts, where))
        return replace(self, counts=counts, **own)

    @property
    def device(self) -> torch.device:
        return self.x_SD.device


def experts(shape: Shape, counts: list[int], device: torch.device) -> Experts:
    """Random operands for a shape S, D, F, L."""
    S, D, F, L = shape
    torch.manual_seed(0)
    return Experts(
        *shape,
        counts,
        offsets_of(counts, device),
        order_of(counts, device),
        random(S, D, device=device, scale=_X),
        random(S, D, device=device, scale=_X),
        torch.rand(S, device=device),
        random(L, 2 * F, D, device=device, scale=_W),
        random(L, D, F, device=device, scale=_W),
    )


def error(ours: Tensor, theirs: Tensor) -> float:
    """Norm of the difference over the norm of `theirs`."""
    exact = theirs.float()
    difference = ours.float().sub_(exact)
    return (difference.norm() / exact.norm()).item()
