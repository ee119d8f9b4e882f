"""Problems for the grouped GEMMs: operands, exact results, and those of torch in bf16.

They are built on the GPU, or without one on the CPU, where their references run too. Whatever the
kernels must not read is NaN or no index, and whatever they must not write is `UNTOUCHED` before
(see `prefilled`). Integers are small enough for sums in fp32 to be exact.

Legend: S rows, N rows of a gathered operand, K channels in, F channels out or expert width, H
channels of h, L experts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.sm90.experts.fc1_act import fc1_act
from phalanx.kernels.sm90.experts.fc2_dgrad_dact import fc2_dgrad_dact
from phalanx.kernels.sm90.experts.grouped_gemm import grouped_gemm
from tests.kernels.problems import formula

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_HOPPER = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="needs a Hopper GPU",
    ),
]
SWIGLU, SQUARED = Activation("swiglu"), Activation("squared_relu")
GPT_OSS = Activation("quick_geglu", limit=7.0, offset=1.0)
UNTOUCHED = 7.0
COUNTS = {
    "even": [256, 256, 256],
    "ragged": [1, 130, 0, 333, 64, 127, 129, 0, 65],
    "one row": [0, 1, 0],
    "one has all": [0, 1000, 0, 0],
    "nobody": [0, 0],
    "idle ends": [0, 0, 300, 20, 0],
    "many": [(37 * e) % 150 for e in range(70)],
}
Outputs = dict[str, Tensor]


def zeros(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


@contextmanager
def prefilled(value: float = UNTOUCHED) -> Iterator[None]:
    """Tensors that torch makes without values have this one."""
    new_empty, empty_like = torch.Tensor.new_empty, torch.empty_like
    with (
        patch.object(torch.Tensor, "new_empty", lambda *a, **k: new_empty(*a, **k).fill_(value)),
        patch.object(torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(value)),
    ):
        yield


class Problem:
    """Rows of experts, and what the three kinds of problems do with them."""

    reads: tuple[str, ...]
    """Inputs [S, ...]."""
    parts = 1
    """Parts of the channels of a row, each with its own blocks in FP8."""
    written: tuple[str, ...]
    """Outputs [S, ...] whose padding stays as it was."""

    def __init__(
        self,
        counts: list[int],
        *,
        gather: bool = False,
        integers: bool = False,
        padding: int = 77,
    ) -> None:
        self.generator = torch.Generator(DEVICE).manual_seed(sum(counts) + 7 * len(counts))
        self.integers = integers
        self.ends = [sum(counts[: e + 1]) for e in range(len(counts))]
        self.L, self.used = len(counts), sum(counts)
        self.S = self.used + padding
        self.offsets = torch.tensor([0, *self.ends], dtype=torch.int32, device=DEVICE)
        self.index = None
        if gather:
            self.index = self._random(self.S // 2 + 3, self.S)
            self.index[self.used :: 2], self.index[self.used + 1 :: 2] = 2**31 - 1, -(2**31)

    def draw(self, *shape: int, scale: float = 1.0, span: int = 2) -> Tensor:
        """bf16: normal numbers times `scale`, or integers up to `span`."""
        g = self.generator
        if self.integers:
            return torch.randint(-span, span + 1, shape, generator=g, device=DEVICE).to(BF16)
        return (torch.randn(*shape, generator=g, device=DEVICE) * scale).to(BF16)

    def of_rows(self) -> Tensor:
        """fp32 [S]: a positive factor a row."""
        factor = torch.rand(self.S, generator=self.generator, device=DEVICE) + 0.5
        factor = factor.ceil() if self.integers else factor
        factor[self.used :] = float("nan")
        return factor

    def operand(self, columns: int) -> tuple[Tensor, Tensor]:
        """Rows that a kernel reads, and the rows of the experts; others are NaN."""
        if self.index is None:
            given = self.draw(self.S, columns)
            given[self.used :] = float("nan")
            return given, given[: self.used]
        picked = self.index[: self.used].long()
        table = self.draw(self.S // 2 + 3, columns)
        given = torch.full_like(table, float("nan"))
        given[picked] = table[picked]
        return given, given[picked]

    def weights(self, N: int, K: int, parts: int = 1, *, transposed: bool = False) -> Any:
        """Weights [L, N, K] as a kernel takes them, and their values; `transposed`: stored
        [L, K, N]. `parts`: of the output channels as they are stored, each with its own blocks."""
        w = self.draw(self.L, *((K, N) if transposed else (N, K)), scale=K**-0.5)
        w = w.mT if transposed else w
        return w, w

    def poison(self, rows: slice) -> None:
        """Set rows that a kernel reads to NaN; of a problem that does not gather."""
        for name in self.reads:
            getattr(self, name)[rows] = float("nan")

    def product(self, dense: Tensor, w_LNK: Tensor, dtype: torch.dtype) -> Tensor:
        """dense @ w^T, expert by expert."""
        begins = [0, *self.ends[:-1]]
        parts = [
            dense[begin:end].to(dtype) @ w.to(dtype).T
            for begin, end, w in zip(begins, self.ends, w_LNK, strict=True)
        ]
        return torch.cat(parts)

    def spread(self, of_experts: Tensor) -> Tensor:
        """Rows [L, ...] to rows of experts."""
        counts = torch.tensor(self.ends).diff(prepend=torch.zeros(1, dtype=torch.int64))
        return of_experts.repeat_interleave(counts.to(DEVICE), dim=0)

    def ours(self, **options) -> Outputs:
        """The kernel's outputs, prefilled."""
        raise NotImplementedError

    def exact(self) -> Outputs:
        """In fp64, rows of experts only."""
        raise NotImplementedError

    def plain(self) -> Outputs:
        """In bf16 by torch."""
        raise NotImplementedError

    def check(self, ours: Outputs) -> None:
        """Twice the error of bf16 torch at most, and padding as it was."""
        exact, plain = self.exact(), self.plain()
        for name, want in ((name, exact[name]) for name in exact if name in ours):
            made = ours[name][: self.used].double()
            assert made.isfinite().all(), name
            if self.used:
                error, bound = made - want, plain[name].double() - want
                assert error.norm() <= 2 * bound.norm() + 1e-6 * want.norm(), name
                worst = 2 * bound.abs().max() + 1e-2 * want.abs().max()
                assert error.abs().max() <= worst, name
        self.check_padding(ours)

    def check_padding(self, ours: Outputs) -> None:
        for name in self.written:
            if name in ours:
                assert (ours[name][self.used :] == UNTOUCHED).all(), name

    def check_exact(self, ours: Outputs, *names: str) -> None:
        """Compare integers bit for bit in the outputs called `names`."""
        exact = self.exact()
        for name in names:
            rounded = exact[name].to(FP32).to(ours[name].dtype)
            assert torch.equal(ours[name][: self.used], rounded), name
        self.check_padding(ours)

    def reroute(self, g: torch.Generator) -> None:
        """Other rows for every expert, in place; of a problem without padding."""
        cuts = torch.randint(0, self.S + 1, (self.L,), generator=g).sort().values
        self.offsets[1:].copy_(cuts.to(torch.int32))
        if self.index is not None:
            self.index.copy_(self.index.roll(int(cuts[0]) + 1))

    def _random(self, high: int, count: int) -> Tensor:
        drawn = torch.randint(0, high, (count,), generator=self.generator, device=DEVICE)
        return drawn.to(torch.int32)


class RowsProblem(Problem):
    reads, written = ("a",), ("y",)

    def __init__(
        self,
        counts: list[int],
        N: int,
        K: int,
        *,
        transposed: bool = False,
        bias: bool = False,
        **options,
    ) -> None:
        super().__init__(counts, **options)
        self.a, self.dense = self.operand(K)
        self.w, self.w_LNK = self.weights(N, K, self.parts, transposed=transposed)
        self.bias = self.draw(self.L, N) if bias else None
        self.scale = self.of_rows() if bias else None

    def ours(self, **options) -> Outputs:
        given = dict(bias_LN=self.bias, scale_S=self.scale, parts=self.parts)
        with prefilled():
            return {"y": grouped_gemm(self.a, self.w, self.offsets, **{**given, **options})}

    def exact(self) -> Outputs:
        return {"y": self._y(FP64)}

    def plain(self) -> Outputs:
        return {"y": self._y(BF16)}

    def _y(self, dtype: torch.dtype) -> Tensor:
        y = self.product(self.dense, self.w_LNK, dtype)
        if self.bias is None:
            return y
        return (y + self.spread(self.bias).to(dtype) * self.scale[: self.used, None]).to(dtype)


class Fc1Problem(Problem):
    reads, written = ("x",), ("h", "a")

    def __init__(
        self,
        counts: list[int],
        F: int,
        D: int,
        act: Activation = SWIGLU,
        *,
        bias: bool = False,
        prob: bool = True,
        **options,
    ) -> None:
        super().__init__(counts, **options)
        self.act, H = act, act.width(F)
        self.x, self.dense = self.operand(D)
        self.w, self.w_LNK = self.weights(H, D, H // F)
        self.bias = self.draw(self.L, H) if bias else None
        self.prob = self.of_rows() if prob else None

    def ours(self, **options) -> Outputs:
        given = dict(index_S=self.index, bias_LH=self.bias, prob_S=self.prob)
        with prefilled():
            h, a = fc1_act(self.x, self.w, self.offsets, self.act, **{**given, **options})
        return {"a": a} if h is None else {"h": h, "a": a}

    def exact(self) -> Outputs:
        h = self._h(FP64)
        # Of integers exactly what is asked for: a follows from h as it is rounded.
        return {"h": h, "a": self._a(h.to(BF16).double() if self.integers else h)}

    def plain(self) -> Outputs:
        h = self._h(BF16)
        return {"h": h, "a": self._a(h.float()).to(BF16)}

    def _h(self, dtype: torch.dtype) -> Tensor:
        h = self.product(self.dense, self.w_LNK, dtype)
        return h if self.bias is None else h + self.spread(self.bias).to(dtype)

    def _a(self, h: Tensor) -> Tensor:
        a = formula(h, self.act)
        return a if self.prob is None else a * self.prob[: self.used, None]


class DgradProblem(Problem):
    reads, written = ("dy", "h", "prob"), ("dh", "a", "parts")

    def __init__(
        self,
        counts: list[int],
        F: int,
        D: int,
        act: Activation = SWIGLU,
        *,
        prob: bool = True,
        **options,
    ) -> None:
        super().__init__(counts, **options)
        self.act, self.num_gate_parts = act, act.width(F) // F
        self.dy, self.dense = self.operand(D)
        self.w, self.w_LNK = self.weights(F, D, transposed=True)
        self.h = self.draw(self.S, act.width(F), scale=1.5, span=8)
        self.h[self.used :] = float("nan")
        self.prob = self.of_rows() if prob else None

    def ours(self, **options) -> Outputs:
        given = dict(index_S=self.index, prob_S=self.prob)
        tensors = (self.dy, self.w, self.h, self.offsets)
        with prefilled():
            dh, a, parts = fc2_dgrad_dact(*tensors, self.act, **{**given, **options})
        assert (parts is None) == (self.prob is None)
        if parts is None:
            return {"dh": dh, "a": a}
        assert parts.dtype == FP32
        return {"dh": dh, "a": a, "dprob": parts.sum(0), "parts": parts.T}

    def exact(self) -> Outputs:
        return self._gradients(FP64, self.product(self.dense, self.w_LNK, FP64))

    def plain(self) -> Outputs:
        made = self._gradients(FP32, self.product(self.dense, self.w_LNK, BF16))
        return {k: v if k == "dprob" else v.to(BF16) for k, v in made.items()}

    def _gradients(self, dtype: torch.dtype, da: Tensor) -> Outputs:
        h = self.h[: self.used].to(dtype).requires_grad_()
        ones = torch.ones(self.used, device=DEVICE)
        prob = (ones if self.prob is None else self.prob[: self.used]).to(dtype).requires_grad_()
        a = formula(h, self.act) * prob[:, None]
        dh, dprob = torch.autograd.grad(a, (h, prob), da.to(dtype))
        made = {"dh": dh, "a": a.detach()}
        return made if self.prob is None else {**made, "dprob": dprob}
