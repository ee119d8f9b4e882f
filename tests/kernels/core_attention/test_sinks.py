"""The gradient of attention sinks: the kernel's code, run by an interpreter, against autograd."""

import pytest
import torch

from phalanx.kernels.core_attention.core import attention
from tests.kernels.interpreter import interpret

pytest.importorskip("triton")


def interpreted() -> None:
    from phalanx.kernels.core_attention.sinks_triton import gradient

    for S, B, H, d, window in ((300, 2, 3, 8, 0), (128, 1, 2, 5, 16)):
        torch.manual_seed(S)
        q, k, v, dout = (torch.randn(B, H, S, d) for _ in range(4))
        sinks = torch.randn(H).requires_grad_()
        how = dict(scale=0.3, window=window, sinks_H=sinks, backend="reference")
        out = attention(q, k, v, **how)
        (want,) = torch.autograd.grad(out, sinks, dout)
        logits = 0.3 * q @ k.transpose(-1, -2)
        i, j = torch.arange(S)[:, None], torch.arange(S)
        seen = (j <= i) & ((j > i - window) if window else True)
        lse = logits.masked_fill(~seen, float("-inf")).logsumexp(-1)
        lse = torch.logaddexp(lse, sinks.detach()[:, None])
        rows = (x.detach().permute(2, 0, 1, 3).contiguous() for x in (out, dout))
        got = gradient(*rows, lse.contiguous(), sinks.detach())
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_gradient_interpreted() -> None:
    interpret(__name__)
