"""Norms with a residual against fp64: inputs, both gradients, and errors."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from phalanx.kernels.rms_norm.rms_norm import fork, rms_norm

NAMES = ("normed", "total", "dx", "dresidual", "dweight")


@dataclass
class Problem:
    """Shape, what is added, and which results have a gradient."""

    shape: tuple[int, ...]
    residual: bool = True
    upstream: tuple[bool, bool] = (True, True)
    """Gradients of the norm and of the sum."""
    eps: float = 1e-5
    scale: float = 1.0
    seed: int = 0
    device: str = "cpu"
    dtype: torch.dtype = torch.bfloat16
    centered: bool = False
    """The weight is stored less 1."""
    given: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.seed)
        N = self.shape[-1]
        sizes = dict(x=self.shape, residual=self.shape, dnormed=self.shape, dtotal=self.shape)
        for name, size in (*sizes.items(), ("weight", (N,))):
            value = torch.randn(size, generator=g, dtype=torch.float64)
            value = value * self.scale if name in ("x", "residual") else value
            self.given[name] = value.to(self.device, self.dtype)

    def leaves(self, dtype: torch.dtype) -> list[Tensor]:
        names = ("x", "residual", "weight") if self.residual else ("x", "weight")
        return [self.given[n].to(dtype).requires_grad_() for n in names]

    def run(self, backend: str, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Results and gradients of a backend, on copies of the inputs in a dtype."""
        dtype = dtype or self.dtype
        leaves = self.leaves(dtype)
        x, *rest, weight = leaves
        how: dict[str, Any] = dict(backend=backend, centered=self.centered)
        normed, total = fork(x, rest[0] if rest else None, weight, self.eps, **how)
        pairs = [
            (result, self.given[f"d{name}"].to(dtype))
            for result, name, used in zip(
                (normed, total), ("normed", "total"), self.upstream, strict=True
            )
            if used
        ]
        torch.autograd.backward([p[0] for p in pairs], [p[1] for p in pairs])
        grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        made = [normed, total, *grads]
        names = NAMES if self.residual else [n for n in NAMES if n != "dresidual"]
        return {n: t.detach() for n, t in zip(names, made, strict=True)}

    def exact(self) -> dict[str, Tensor]:
        """In fp64, by the definition."""
        leaves = self.leaves(torch.float64)
        x, *rest, weight = leaves
        total = x + rest[0] if rest else x * 1
        factor = weight + 1 if self.centered else weight
        normed = total / (total.square().mean(-1, keepdim=True) + self.eps).sqrt() * factor
        loss = torch.zeros((), dtype=torch.float64, device=total.device)
        for result, name, used in zip(
            (normed, total), ("normed", "total"), self.upstream, strict=True
        ):
            if used:
                loss = loss + (result * self.given[f"d{name}"].double()).sum()
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        grads = [
            torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True)
        ]
        names = NAMES if self.residual else [n for n in NAMES if n != "dresidual"]
        return {n: t.detach() for n, t in zip(names, [normed, total, *grads], strict=True)}


def error(got: Tensor, exact: Tensor) -> float:
    """Norm of the difference over that of the exact value."""
    size = exact.norm().item()
    return (got.double() - exact).norm().item() / (size or 1.0)


def plain(problem: Problem, backend: str) -> list[Tensor]:
    """`rms_norm` alone: result, and gradients of x and weight."""
    x, weight = replace(problem, residual=False).leaves(problem.dtype)
    out = rms_norm(x, weight, problem.eps, backend=backend, centered=problem.centered)
    return [out.detach(), *torch.autograd.grad(out, (x, weight), problem.given["dnormed"])]
