"""Cross entropy over a vocabulary that may be split over ranks, on an NVIDIA GPU, in Triton.

Logits are read once for the loss and once for the gradient, which takes their place: nothing of
their size is written in fp32 or kept beside them. The caller combines statistics of a row over the
ranks (`moe.model.loss`). The online softmax is that of arXiv 1805.02867. If the gradient of every
loss is known in advance, `kernels.sm90.loss` needs one pass on Hopper, and `rescale_` corrects rows
whose gradient differs from the expected one.

Megatron-Core's loss converts the logits to fp32. Transformer Engine's `parallel_cross_entropy`
writes the gradient in the forward pass, and reads and writes it again in the backward pass.

Legend: N tokens, V vocabulary of this rank.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def cross_entropy_statistics(logits, target, largest, total, hit, V, first, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
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
    tl.store(largest + row, m)
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
def cross_entropy_rescale(gradient, grad, expected_grad, V, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(grad + row) / tl.load(expected_grad)
    same = tl.abs(factor - 1.0) <= 1e-6  # fp32 sums differ by their order so far; NaN is not equal
    if not same:
        start = gradient + row * V
        for begin in range(0, V, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            x = tl.load(start + at, mask=at < V, other=0.0).to(tl.float32)
            tl.store(start + at, (x * factor).to(gradient.dtype.element_ty), mask=at < V)


def statistics(logits_NV: Tensor, target_N: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """Largest logit, sum of exp(logit - largest) and logit of the target of each row, fp32 [N].

    `target_N`: int64 tokens of the whole vocabulary; `first`: token of column 0. The target's logit
    is 0 if it is on another rank.
    """
    N, V = logits_NV.shape
    largest, total, hit = (logits_NV.new_empty(N, dtype=torch.float32) for _ in range(3))
    if N:
        cross_entropy_statistics[(N,)](
            logits_NV, target_N, largest, total, hit, V, first, BLOCK=_BLOCK
        )
    return largest, total, hit


def gradient_(
    logits_NV: Tensor, target_N: Tensor, lse_N: Tensor, grad_N: Tensor, first: int
) -> None:
    """Replace logits by grad * (softmax - one-hot of the target).

    `lse_N`: fp32 logarithm of the sum of exp(logit) over the whole vocabulary.
    """
    N, V = logits_NV.shape
    if N:
        grid = (N, triton.cdiv(V, _BLOCK))
        cross_entropy_gradient[grid](logits_NV, target_N, lse_N, grad_N, V, first, BLOCK=_BLOCK)


def rescale_(gradient_NV: Tensor, grad_N: Tensor, expected_grad: Tensor) -> None:
    """Rescale gradients of logits that were computed with `expected_grad` to those of `grad_N`.

    Both are fp32; the former has one element, not 0. Rows whose gradient is it are not touched.
    """
    N, V = gradient_NV.shape
    if N:
        cross_entropy_rescale[(N,)](gradient_NV, grad_N, expected_grad, V, BLOCK=_BLOCK)
