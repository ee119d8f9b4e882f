"""A mixed projection taken apart: against formulas in fp64, and the kernels by an interpreter."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from phalanx.kernels.core_attention.qkv import HeadNorms, queries_keys_values
from tests.kernels.core_attention.test_rope import angles, statement
from tests.kernels.interpreter import interpret

EPS = 1e-5


class Case(NamedTuple):
    """A mixed projection; F rotated channels."""

    S: int
    B: int
    G: int
    R: int
    d: int
    biased: bool
    normed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return self.S, self.B, self.G, self.R + 2, self.d


CASES = [
    Case(S, B, G, R, d, biased, normed)
    for S, B, G, R, d in ((5, 2, 3, 2, 8), (1, 1, 1, 1, 12), (9, 1, 2, 6, 16), (3, 3, 2, 1, 20))
    for biased in (False, True)
    for normed in (False, True)
]


INTERPRETED = [*CASES[:4], *CASES[7::4]]
"""One shape with all that is decided when a kernel is compiled; the others with most of it."""


class Given(NamedTuple):
    """Inputs of a case; the first four need gradients if present."""

    qkv: Tensor
    bias: Tensor | None
    query: Tensor | None
    key: Tensor | None
    freqs: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        return [x for x in self[:4] if x is not None]

    @property
    def norms(self) -> HeadNorms | None:
        return None if self.query is None or self.key is None else HeadNorms(*self[2:4], EPS)


def given(case: Case, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Given:
    """Rows of sizes so different that the norm's eps counts for some."""
    torch.manual_seed(0)
    qkv = torch.randn(case.shape) * 10.0 ** torch.randint(-3, 2, (*case.shape[:-1], 1))
    bias = torch.randn(case.shape[2:]) / 8 if case.biased else None
    weights = [1 + torch.randn(case.d) / 4 if case.normed else None for _ in "qk"]
    leaves = [
        None if x is None else x.to(device, dtype).requires_grad_() for x in (qkv, bias, *weights)
    ]
    return Given(*leaves, angles(case.S, case.d).to(device))  # type: ignore[arg-type]


def exact(g: Given, mscale: float) -> tuple[Tensor, Tensor, Tensor]:
    """fp64: group by group R queries, a key, a value; query head h is of group h // R."""
    x = g.qkv.double() + (0 if g.bias is None else g.bias.double())
    q, k, v = x[..., :-2, :].flatten(2, 3), x[..., -2, :], x[..., -1, :]
    if g.query is not None and g.key is not None:
        q, k = (
            t / (t.square().mean(-1, keepdim=True) + EPS).sqrt() * w.double()
            for t, w in ((q, g.query), (k, g.key))
        )
    return *(statement(t, g.freqs, mscale, False, 0) for t in (q, k)), v  # type: ignore[return-value]


def upstream(outs: tuple[Tensor, ...]) -> list[Tensor]:
    """Gradients as attention lays them out: positions last but for channels."""
    g = torch.Generator().manual_seed(1)
    return [
        torch.randn(o.shape[1], o.shape[2], o.shape[0], o.shape[3], generator=g)
        .to(o.device, o.dtype)
        .permute(2, 0, 1, 3)
        for o in outs
    ]


def results(outs: tuple[Tensor, ...], leaves: list[Tensor], ups: list[Tensor]) -> list[Tensor]:
    return [*outs, *torch.autograd.grad(outs, leaves, [u.to(outs[0].dtype) for u in ups])]


@pytest.mark.parametrize("case", CASES)
def test_forward_and_backward(case: Case) -> None:
    g = given(case)
    outs, want = queries_keys_values(*g[:2], g.freqs, mscale=1.3, norms=g.norms), exact(g, 1.3)
    ups = upstream(outs)
    for a, b in zip(results(outs, g.leaves, ups), results(want, g.leaves, ups), strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=2e-5, atol=2e-5)


def test_part_of_the_channels_turned() -> None:
    case = Case(4, 2, 3, 2, 16, True, True)
    g = given(case)._replace(freqs=angles(4, 8))
    outs = queries_keys_values(*g[:2], g.freqs, norms=g.norms)
    for a, b in zip(outs, exact(g, 1.0), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-5)


def test_angles_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="rotary angles"):
        queries_keys_values(torch.zeros(5, 2, 3, 4, 8), None, angles(4, 8))


def interpreted() -> None:
    """In a process of its own, where Triton interprets kernels on CPU tensors.

    Its interpreter has no FMA, which costs angles two digits, and truncates to bf16: fp32 then, and
    the bounds of tests on a GPU are tighter.
    """
    from phalanx.kernels.core_attention.qkv import QkvArgs, QueriesKeysValues

    for case in INTERPRETED:
        g = given(case)
        apply = QueriesKeysValues.apply
        outs = apply(*g, QkvArgs(1.3, EPS, view=False))
        ups = upstream(outs)
        got = results(outs, g.leaves, ups)
        for a, b in zip(got, results(exact(g, 1.3), g.leaves, ups), strict=True):
            torch.testing.assert_close(a.double(), b.double(), rtol=2e-5, atol=5e-5)
        viewed = apply(*g, QkvArgs(1.3, EPS, view=True))
        shares = viewed[2].untyped_storage().data_ptr() == g.qkv.untyped_storage().data_ptr()
        assert shares == (case.normed and not case.biased)
        again = results(viewed, g.leaves, ups)
        assert all(torch.equal(a, b) for a, b in zip(again, got, strict=True))
    wide = torch.randn(2, 70, 5, 4, 19)  # several turns of a program, in any strides
    qkv = wide.transpose(0, 1)[:, :, 1:-1, :, 2:-1].requires_grad_()
    g = given(Case(70, 2, 3, 2, 16, True, True))._replace(qkv=qkv)
    outs = QueriesKeysValues.apply(*g, QkvArgs(1.3, EPS, view=False))
    ups = upstream(outs)
    for a, b in zip(
        results(outs, g.leaves, ups), results(exact(g, 1.3), g.leaves, ups), strict=True
    ):
        torch.testing.assert_close(a.double(), b.double(), rtol=2e-5, atol=1e-4)
    nothing = given(Case(0, 2, 3, 2, 16, True, True))
    outs = QueriesKeysValues.apply(*nothing, QkvArgs(1.0, EPS, view=False))
    grads = torch.autograd.grad(outs, nothing.leaves, [torch.zeros_like(o) for o in outs])
    assert grads[0].shape == (0, 2, 3, 4, 16) and not any(x.any() for x in grads[1:])


def test_kernels_interpreted() -> None:
    interpret(__name__)
