"""The kernels of flash-linear-attention, and ours among them, by an interpreter on a CPU: the rule,
the convolution and the norm against the recurrence in fp64."""

import importlib
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("fla")

from phalanx.extras.linear_attention import fla, gradients_triton
from phalanx.extras.linear_attention.gated_delta import (
    causal_conv,
    gated_delta_rule,
    gated_rms_norm,
)
from tests.extras.linear_attention import recurrent
from tests.extras.linear_attention.problems import Case, given, gradient
from tests.kernels.interpreter import count_in_tensors, interpret
from tests.kernels.triton_code import launched

MODULES = [
    "fla.modules.causal_conv1d.ops",
    "fla.modules.norm.fused_norm_gate",
    "fla.modules.norm.l2norm",
    "fla.ops.common.chunk_delta_h",
    "fla.ops.common.chunk_o",
    "fla.ops.gated_delta_rule.chunk_fwd",
    "fla.ops.gated_delta_rule.wy_fast",
    "fla.ops.utils.cumsum",
]
"""Files of the kernels that a forward and a backward pass launch."""

INTERPRETED = [
    Case(1, 70, 1, 2, 16),
    Case(2, 20, 1, 1, 16),
    Case(1, 40, 1, 1, 16, ((0, 1, 2, 17),)),
]


def interpreted() -> None:
    from fla.ops.common import chunk_delta_h

    count_in_tensors(chunk_delta_h)
    for case in INTERPRETED:
        # Of several documents in a chunk decays sum up to hundreds, which fp32 holds less exactly.
        bound = 2e-4 if case.documents else 2e-5
        leaves = given(case)
        out = gated_delta_rule(*leaves, case.position_BS, backend="fla")
        found = torch.autograd.grad(out, leaves, gradient(out))
        exact_leaves = [x.detach().double().requires_grad_() for x in leaves]
        exact_out = recurrent.rule(*exact_leaves, case.position_BS)
        exact = torch.autograd.grad(exact_out, exact_leaves, gradient(exact_out))
        for mine, theirs in zip((out, *found), (exact_out, *exact), strict=True):
            error = (mine.double() - theirs).norm() / theirs.norm()
            assert error < bound, f"{case}: {error:.1e}"
    generator = torch.Generator().manual_seed(1)
    x, gate = (torch.randn(1, 9, 2, 16, generator=generator).requires_grad_() for _ in "xg")
    weight = torch.rand(16, generator=generator).requires_grad_()
    taps = torch.randn(32, 4, generator=generator).requires_grad_()
    rows = x.detach().flatten(2).requires_grad_()
    for mine, theirs, of in (
        (
            gated_rms_norm(x, gate, weight, 1e-3, backend="fla"),
            recurrent.norm(x, gate, weight, 1e-3),
            (x, gate, weight),
        ),
        (causal_conv(rows, taps, backend="fla"), recurrent.conv(rows, taps, None), (rows, taps)),
    ):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)
        exact = torch.autograd.grad(theirs, of, gradient(theirs))
        for a, b in zip(torch.autograd.grad(mine, of, gradient(mine)), exact, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_kernels_by_an_interpreter() -> None:
    interpret(__name__)


def test_our_gradients_compile_for_hopper(tmp_path: Path) -> None:
    """At the sizes of Qwen3-Next: within registers, every product on tensor cores."""
    meta = partial(torch.empty, dtype=torch.bfloat16, device="meta")
    B, S, K, V, d = 1, 4096, 16, 32, 128
    q = meta(B, S, K, d)
    v, states = meta(B, S, V, d), meta(B, S // 64, V, d, d)
    g = torch.empty(B, S, V, device="meta")
    run = lambda: gradients_triton.gradients(  # noqa: E731
        q=q, k=q, v=v, do=v, h=states, dh=states, w=v, g=g, dv=v, scale=0.1, chunk_size=64
    )
    code = launched(gradients_triton, "delta_rule_gradients", run, tmp_path)
    assert code.stack == 0 and code.registers <= 255
    assert "wgmma.mma_async" in code.ptx and "mma.sync" not in code.ptx


def test_each_kernel_has_one_configuration() -> None:
    """Also in another process, and on another rank: sums are always in the same order."""
    fla._library()
    tuned = 0
    for module in MODULES:
        for kernel in vars(importlib.import_module(module)).values():
            while kernel is not None and not hasattr(kernel, "configs"):
                kernel = getattr(kernel, "fn", None) if hasattr(kernel, "run") else None
            if kernel is not None:
                tuned += 1
                assert len(kernel.configs) == 1
    assert tuned >= 12
