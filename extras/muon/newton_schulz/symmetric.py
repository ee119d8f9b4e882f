"""Gram matrices of a stack, and polynomials of them.

Both are symmetric, so that the kernel for NVIDIA GPUs computes the tiles on and below the diagonal
and stores each twice, which saves most of half of the products; and a polynomial needs no pass of
its own. Elsewhere, and in fp32, they are torch's products. Operands are bf16 or fp32, contiguous.

Legend: B matrices, M rows, N columns, S the smaller of both.
"""

import torch
from torch import Tensor


@torch.no_grad()
def gram(x_BMN: Tensor) -> Tensor:
    """X X^T, or X^T X of more rows than columns: [B, S, S] of the dtype of `x_BMN`."""
    x_BSK = x_BMN.mT if x_BMN.shape[1] > x_BMN.shape[2] else x_BMN
    if not _fused(x_BMN):
        return x_BSK @ x_BSK.mT
    from phalanx.extras.muon.newton_schulz.symmetric_triton import launch

    out = x_BMN.new_empty(len(x_BSK), x_BSK.shape[1], x_BSK.shape[1])
    launch(x_BSK, out)
    return out


@torch.no_grad()
def polynomial(
    gram_BSS: Tensor, abc: tuple[float, float, float], scale_B: Tensor | None = None
) -> Tensor:
    """a I + b G + c G^2 of symmetric matrices G: [B, S, S] of their dtype.

    The kernel rounds once; torch's products are rounded before they are added. With fp32 factors
    `scale_B`, s, the result is that of s G, times the root of s: with G = X X^T it multiplies X as
    the polynomial of the scaled matrix would multiply that.
    """
    a, b, c = abc
    if _fused(gram_BSS):
        from phalanx.extras.muon.newton_schulz.symmetric_triton import launch

        out = torch.empty_like(gram_BSS)
        launch(gram_BSS, out, (a, b, c), scale_B)
        return out
    scale = 1.0 if scale_B is None else scale_B[:, None, None]
    found = scale * (b * gram_BSS.float() + c * scale * (gram_BSS @ gram_BSS).float())
    found.diagonal(dim1=1, dim2=2).add_(a)
    if scale_B is not None:
        found *= scale**0.5
    return found.to(gram_BSS.dtype)


def _fused(x: Tensor) -> bool:
    if not x.is_contiguous():
        raise ValueError("matrices of Newton-Schulz iterations are contiguous")
    return x.is_cuda and x.dtype == torch.bfloat16
