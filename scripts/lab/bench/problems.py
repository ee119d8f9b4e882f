"""Random problems: rows per expert, the token of each expert row, and the operands.

Legend: S expert rows, N source rows of a gather, L experts, D hidden, F expert width, H = 2F.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.scripts.lab.bench.shapes import Shape

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
    """Rows of experts if each row draws its expert, the i-th likeliest with weight i^-exponent."""
    g = torch.Generator().manual_seed(0)
    weight = torch.arange(1, L + 1, dtype=torch.float64) ** -exponent
    weight = weight[torch.randperm(L, generator=g)]
    chosen = torch.multinomial(weight, S, replacement=True, generator=g)
    return torch.bincount(chosen, minlength=L).tolist()


def balanced(S: int, L: int) -> list[int]:
    """Rows of experts, as equal as possible."""
    return [S // L + (e < S % L) for e in range(L)]


def offsets_of(counts: list[int], device: torch.device) -> Tensor:
    """int32 [L + 1]: first row of each expert, and the number of rows."""
    return torch.tensor([0, *counts]).cumsum(0).to(device, torch.int32)


def order_of(counts: list[int], device: torch.device) -> Tensor:
    """int32 [L]: experts by falling number of rows."""
    return torch.tensor(counts).argsort(descending=True, stable=True).to(device, torch.int32)


def index_of(counts: list[int], N: int, device: torch.device) -> Tensor:
    """int32 [S]: distinct ascending source rows of each expert."""
    g = torch.Generator().manual_seed(0)
    chosen = [torch.randperm(N, generator=g)[:count].sort().values for count in counts]
    return torch.cat(chosen).to(device, torch.int32)


def random(*shape: int, device: torch.device, scale: float = 1.0) -> Tensor:
    """bf16 tensor of normal values times `scale`."""
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
    w1: Tensor  # [L, H, D]
    w2: Tensor  # [L, D, F]

    @property
    def forward_flops(self) -> float:
        return 6 * self.S * self.D * self.F

    def routed(self, counts: list[int]) -> "Experts":
        """The same operands with other rows per expert."""
        offsets, order_L = offsets_of(counts, self.device), order_of(counts, self.device)
        return replace(self, counts=counts, offsets=offsets, order_L=order_L)

    @property
    def device(self) -> torch.device:
        return self.x_SD.device


def experts(shape: Shape, counts: list[int], device: torch.device) -> Experts:
    """Random operands for a shape S, D, F, L."""
    S, D, F, L = shape
    torch.manual_seed(0)
    return Experts(
        S,
        D,
        F,
        L,
        counts,
        offsets_of(counts, device),
        order_of(counts, device),
        random(S, D, device=device, scale=_X),
        random(S, D, device=device, scale=_X),
        torch.rand(S, device=device),
        random(L, 2 * F, D, device=device, scale=_W),
        random(L, D, F, device=device, scale=_W),
    )


def give_main_grads(parameters: Iterable[Any]) -> None:
    """Give each parameter an fp32 buffer of zeros, `main_grad`, that its gradient is added to."""
    for parameter in parameters:
        zeros = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
        parameter.main_grad = zeros


def error(ours: Tensor, theirs: Tensor) -> float:
    """Norm of the difference over the norm of `theirs`."""
    reference = theirs.float()
    difference = ours.float().sub_(reference)
    return (difference.norm() / reference.norm()).item()
