"""Cross entropy over a vocabulary that may be split over ranks, on an NVIDIA GPU, in Triton.

Logits are read once for the loss and once for the gradient, which takes their place: nothing of
their size is written in fp32 or kept beside them. Statistics of a row are combined over the ranks
by the caller (`moe.model.loss`). The online softmax is that of arXiv 1805.02867.

Where the gradient of every loss is known beforehand, `kernels.sm90.loss` needs one pass on Hopper,
and `rescale_` corrects what was not as foretold.

Megatron-Core's own loss takes the logits to fp32. Transformer Engine's `parallel_cross_entropy`
writes the gradient forward and reads and writes it once more backward, to scale it, and is there
only where Transformer Engine is.

Legend: N tokens, V vocabulary of this rank.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def cross_entropy_statistics(logits, target, most, total, hit, V, first, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * V
    m = tl.full((), float("-inf"), tl.float32)
    s = tl.zeros((), tl.float32)
    for begin in range(0, V, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(start + at, mask=at < V, other=float("-inf")).to(tl.float32)
        new = tl.maximum(m, tl.max(x, 0))
        s = s * tl.exp(m - new) + tl.sum(tl.exp(x - new), 0)
        m = new
    t = tl.load(target + row) - first
    here = (t >= 0) & (t < V)
    x = tl.load(start + tl.where(here, t, 0)).to(tl.float32)
    tl.store(most + row, m)
    tl.store(total + row, s)
    tl.store(hit + row, tl.where(here, x, 0.0))


@triton.jit
def cross_entropy_gradient(logits, target, lse, grad, V, first, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    where = logits + row * V + at
    x = tl.load(where, mask=at < V, other=float("-inf")).to(tl.float32)
    p = tl.exp(x - tl.load(lse + row))
    p = tl.where(at == tl.load(target + row) - first, p - 1.0, p)
    tl.store(where, (p * tl.load(grad + row)).to(logits.dtype.element_ty), mask=at < V)


@triton.jit
def cross_entropy_rescale(gradient, grad, foretold, V, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(grad + row) / tl.load(foretold)
    same = tl.abs(factor - 1.0) <= 1e-6  # so far fp32 differs by its order; NaN is never the same
    if not same:
        start = gradient + row * V
        for begin in range(0, V, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            x = tl.load(start + at, mask=at < V, other=0.0).to(tl.float32)
            tl.store(start + at, (x * factor).to(gradient.dtype.element_ty), mask=at < V)


def statistics(logits_NV: Tensor, target_N: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row: largest logit, sum of exp(logit - largest), logit of the target.

    Args:
        logits_NV: bf16 or fp32, contiguous.
        target_N: int64 token of the whole vocabulary.
        first: token of column 0.

    Returns:
        fp32 [N] each; the target's logit is 0 if it is on another rank.
    """
    N, V = logits_NV.shape
    most, total, hit = (logits_NV.new_empty(N, dtype=torch.float32) for _ in range(3))
    if N:
        cross_entropy_statistics[(N,)](
            logits_NV, target_N, most, total, hit, V, first, BLOCK=_BLOCK
        )
    return most, total, hit


def gradient_(
    logits_NV: Tensor, target_N: Tensor, lse_N: Tensor, grad_N: Tensor, first: int
) -> None:
    """Replace logits by grad * (softmax - one-hot of the target).

    Args:
        logits_NV, target_N, first: as in `statistics`.
        lse_N: fp32 logarithm of the sum of exp(logit) over the whole vocabulary.
        grad_N: fp32 gradient of each loss.
    """
    N, V = logits_NV.shape
    if N:
        grid = (N, triton.cdiv(V, _BLOCK))
        cross_entropy_gradient[grid](logits_NV, target_N, lse_N, grad_N, V, first, BLOCK=_BLOCK)


def rescale_(gradient_NV: Tensor, grad_N: Tensor, foretold: Tensor) -> None:
    """Multiply gradients of logits that were made with `foretold`, so that they are of `grad_N`.

    Rows whose gradient is what was foretold are not touched.

    Args:
        gradient_NV: contiguous.
        grad_N: fp32 gradient of each loss.
        foretold: fp32, of one element, not 0.
    """
    N, V = gradient_NV.shape
    if N:
        cross_entropy_rescale[(N,)](gradient_NV, grad_N, foretold, V, BLOCK=_BLOCK)
