"""Rotary embeddings of transformers in one pass over queries and keys.

transformers rotates by some seven operations for each of both. The functions belong to the file of
a model's classes, so that they are replaced for all its models in this process. They are known by
their values, not by their names; on a CPU, in torch.compile and for tensors that the kernel does
not take, they are called as they were.

Legend: B batch, H heads, S positions, d channels, P rotated pairs, F columns of cosines.
"""

import functools
import sys
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from phalanx.kernels.derivatives import transformed

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Kind(NamedTuple):
    """The layout of pairs and of cosines that a function takes."""

    neighbours: bool  # channels 2i and 2i + 1 are a pair, which then is i and i + P
    repeated: bool  # cosines have two equal columns for each pair, P apart


_KINDS = (Kind(False, True), Kind(False, False), Kind(True, True))


def fuse_rotary(model: nn.Module) -> list[str]:
    """Replace the functions that rotate queries and keys; return the names of those.

    They are the functions `apply_rotary...` of the files of the classes of a model's modules.
    """
    files = {type(module).__module__ for module in model.modules()}
    found = []
    for file in sorted(files):
        functions = vars(sys.modules[file])
        for name in [n for n in functions if n.startswith("apply_rotary")]:
            if _fused(sys.modules[file], name):
                found.append(f"{name} of {file.rsplit('.', 1)[-1].removeprefix('modeling_')}")
    return found


def _fused(file: ModuleType, name: str) -> bool:
    function = getattr(file, name)
    if hasattr(function, "_phalanx"):
        return True
    kind = next((k for k in _KINDS if _is_of(function, k)), None)
    if kind is None:
        return False

    @functools.wraps(function)
    def rotate(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        if rest or options.keys() - {"unsqueeze_dim"} or not _fits(kind, q, k, cos, sin):
            unchanged: tuple[Tensor, Tensor] = function(q, k, cos, sin, *rest, **options)
            return unchanged
        heads_first = options.get("unsqueeze_dim", 1) == 1
        rotated = [
            _Rotate.apply(x if heads_first else x.transpose(1, 2), cos, sin, kind) for x in (q, k)
        ]
        return tuple(y if heads_first else y.transpose(1, 2) for y in rotated)  # type: ignore[return-value]

    rotate._phalanx = True  # type: ignore[attr-defined]
    setattr(file, name, rotate)
    return True


def _fits(kind: Kind, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    if torch.compiler.is_compiling() or transformed() or not q.is_cuda:
        return False
    given = q, k, cos, sin
    if len({x.dtype for x in given}) > 1 or q.dtype not in _DTYPES:
        return False
    if cos.shape != sin.shape or cos.stride() != sin.stride() or sin.requires_grad:
        return False
    F = cos.shape[-1] if kind.repeated else 2 * cos.shape[-1]
    return (
        (q.ndim, k.ndim, cos.ndim) == (4, 4, 3)
        and all(x.stride(-1) == 1 and x.shape[-1] >= F for x in (q, k))
        and cos.stride(-1) == 1
        and cos.shape[0] in (1, q.shape[0])
    )


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BHSd: Tensor, cos: Tensor, sin: Tensor, kind: Kind) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.kind = kind
        return _rotate(x_BHSd, cos, sin, kind, inverse=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin, ctx.kind, inverse=True), None, None, None


def _rotate(x_BHSd: Tensor, cos: Tensor, sin: Tensor, kind: Kind, *, inverse: bool) -> Tensor:
    from phalanx.adapters.transformers.rotary_triton import rotate

    pairs = cos.shape[-1] // 2 if kind.repeated else cos.shape[-1]
    return rotate(x_BHSd, cos, sin, pairs=pairs, neighbours=kind.neighbours, inverse=inverse)


def rotated(x_BHSd: Tensor, cos_BSF: Tensor, sin_BSF: Tensor, kind: Kind) -> Tensor:
    """The kernel's formula in operations of PyTorch."""
    P = cos_BSF.shape[-1] // (1 + kind.repeated)
    cos, sin = cos_BSF[:, None, :, :P], sin_BSF[:, None, :, :P]
    x, rest = x_BHSd[..., : 2 * P], x_BHSd[..., 2 * P :]
    u, v = (x[..., 0::2], x[..., 1::2]) if kind.neighbours else x.chunk(2, -1)
    return torch.cat((u * cos - v * sin, v * cos + u * sin, rest), -1)


@torch.no_grad()
def _is_of(function: Any, kind: Kind) -> bool:
    """True if a function rotates whole heads so; those that leave channels must agree too."""
    generator = torch.Generator().manual_seed(0)
    agrees = []
    for width in (8, 12):
        q, k = (torch.randn(2, heads, 5, width, generator=generator) for heads in (3, 1))
        cos, sin = (
            torch.randn(2, 5, 4, generator=generator).repeat(1, 1, 1 + kind.repeated)
            for _ in range(2)
        )
        try:
            found = function(q.clone(), k.clone(), cos, sin)
            agrees.append(
                all(
                    torch.allclose(got, rotated(x, cos, sin, kind), atol=1e-5)
                    for got, x in zip(found, (q, k), strict=True)
                )
            )
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError):
            agrees.append(width > 8)  # it rotates whole heads alone, or is something else
    return all(agrees)
