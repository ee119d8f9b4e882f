"""Problems for weight gradients, in bf16 and FP8, of one micro-batch and of two.

Rows that no expert has are NaN, and their index is no row at all; nothing around the result may be
written. Built on the GPU, or without one on the CPU.

Legend as in `gemm_problems`; O and I are channels of a weight, T tokens by columns.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phalanx.kernels.expert_mlp.calls import ExpertRows, Operand
from phalanx.kernels.quantize.blocks import (
    QuantizedColumns,
    column_offsets,
    dequantize_columns,
    quantize_columns,
)
from phalanx.kernels.sm90.wgrad.wgrad import wgrad, wgrad_pair
from tests.kernels.sm90.fp8.fp8_problems import Fp8Problem
from tests.kernels.sm90.gemm.gemm_problems import BF16, DEVICE, FP32, FP64

TILES = [128, 192, 256]
MODES = {
    "bf16": (BF16, False),
    "bf16 +=": (BF16, True),
    "fp32": (FP32, False),
    "fp32 +=": (FP32, True),
}
OF_TWO = {
    "even": ([256] * 3, [256] * 3),
    "ragged": ([1, 130, 0, 333, 64, 127, 129, 0, 65], [70, 0, 0, 64, 1, 300, 63, 128, 257]),
    "the first has none": ([0, 0, 0], [100, 64, 1]),
    "the second has none": ([100, 64, 1], [0, 0, 0]),
    "other experts": ([0, 1000, 0, 0], [5, 0, 0, 500]),
}
_GUARD = 64  # elements before and after the result that must not be written


class OneWgrad:
    """Base of both precisions. `given` are the operands of a call, `d` and `v` their values."""

    given: dict[str, Any]
    d: Tensor
    v: Tensor
    L: int
    shape: tuple[int, int]
    begins: list[int]
    ends: list[int]

    def ours(self, mode: str = "bf16", start: Tensor | None = None, **options) -> Tensor:
        """dw; `start`: what is added to, default a fixed draw."""

        def call(out: Tensor, add: bool) -> Tensor:
            return wgrad(**{**self.given, **options}, out_LOI=out, accumulate=add)

        return self.within_guards(mode, start, call)

    def within_guards(
        self, mode: str, start: Tensor | None, call: Callable[[Tensor, bool], Tensor]
    ) -> Tensor:
        """Result of a call that must write it, and nothing around it."""
        dtype, add = MODES[mode]
        count = self.L * self.shape[0] * self.shape[1]
        room = torch.full((count + 2 * _GUARD,), 7.0, dtype=dtype, device=DEVICE)
        out = room[_GUARD : _GUARD + count].view(self.L, *self.shape)
        out.copy_((self.start() if start is None else start) if add else float("nan"))
        assert call(out, add) is out
        assert (room[:_GUARD] == 7).all() and (room[_GUARD + count :] == 7).all()
        return out

    def start(self) -> Tensor:
        g = torch.Generator(DEVICE).manual_seed(1)
        drawn = torch.randint(-50, 51, (self.L, *self.shape), generator=g, device=DEVICE)
        return drawn.to(FP32)

    def expert_by_expert(self, dtype: torch.dtype) -> Tensor:
        """The same by a loop in `dtype`."""
        parts = zip(self.begins, self.ends, strict=True)
        return torch.stack([self.d[b:e].to(dtype).T @ self.v[b:e].to(dtype) for b, e in parts])

    def exact(self, mode: str = "fp32") -> Tensor:
        """In fp64."""
        return self.expert_by_expert(FP64) + (self.start().double() if MODES[mode][1] else 0)

    @property
    def rows(self) -> ExpertRows:
        return ExpertRows(**self.given)


class WgradProblem(OneWgrad):
    """In bf16, of which one operand may be gathered."""

    def __init__(
        self,
        counts: list[int],
        O: int,  # noqa: E741
        I: int,  # noqa: E741
        *,
        gathered: str | None = None,
        integers: bool = False,
        padding: int = 77,
        before: int = 0,
    ) -> None:
        g = torch.Generator(DEVICE).manual_seed(sum(counts) + O + I)
        self.L, self.shape, self.integers, self.generator = len(counts), (O, I), integers, g
        self.ends = [before + sum(counts[: e + 1]) for e in range(self.L)]
        self.begins = [before, *self.ends[:-1]]
        S = self.ends[-1] + padding
        self.d, self.v = self._draw(S, O), self._draw(S, I)
        for t in (self.d, self.v):
            t[self.ends[-1] :] = float("nan")
            t[:before] = float("nan")
        self.offsets = torch.tensor([before, *self.ends], dtype=torch.int32, device=DEVICE)
        self.given = {"d": Operand(self.d), "v": Operand(self.v), "offsets": self.offsets}
        if gathered:
            used, rows = slice(before, self.ends[-1]), S + 100
            index = torch.randint(0, rows, (S,), generator=g, device=DEVICE).to(torch.int32)
            picked = index[used].long()
            dense = self.given[gathered].matrix
            table = torch.full_like(self._draw(rows, dense.shape[1]), float("nan"))
            table[picked] = self._draw(rows, dense.shape[1])[picked]
            dense[used] = table[picked]
            index[: used.start], index[used.stop :] = -(2**31), 2**31 - 1
            self.given |= {gathered: Operand(table, gather=True), "index_S": index}

    def _draw(self, *shape: int) -> Tensor:
        if self.integers:
            return torch.randint(-2, 3, shape, generator=self.generator, device=DEVICE).to(BF16)
        return torch.randn(*shape, generator=self.generator, device=DEVICE).to(BF16)

    def poison(self, expert: int) -> None:
        """Set the rows of an expert to NaN, in a table those that only it has."""
        own = slice(self.begins[expert], self.ends[expert])
        for name in ("d", "v"):
            operand = self.given[name]
            matrix = operand.matrix.clone()
            self.given[name] = operand._replace(matrix=matrix)
            if operand.gather:
                rows = self.given["index_S"]
                others = torch.cat(
                    [rows[self.begins[0] : own.start], rows[own.stop : self.ends[-1]]]
                )
                mine = rows[own].long()
                matrix[mine[~torch.isin(mine, others.long())]] = float("nan")
            else:
                matrix[own] = float("nan")

    def check(self, mode: str, **options) -> None:
        """Compare the kernel's result with fp64."""
        self.check_made(mode, self.ours(mode, **options))

    def check_made(self, mode: str, made: Tensor) -> None:
        """In bf16 at most twice the error of bf16 torch; in fp32 that of an fp32 sum."""
        ours, exact = made.double(), self.exact(mode)
        assert ours.isfinite().all()
        if MODES[mode][0] == BF16:
            plain = self.expert_by_expert(BF16)
            plain = (plain + self.start().to(BF16) if MODES[mode][1] else plain).double()
            error, worst = (plain - exact).norm(), (plain - exact).abs().max()
            assert (ours - exact).norm() <= 2 * error + 1e-12
            assert (ours - exact).abs().max() <= 2 * worst + 1e-2 * exact.abs().max()
        else:
            assert (ours - exact).norm() <= 2e-5 * exact.norm() + 1e-12
            assert (ours - exact).abs().max() <= 1e-4 * exact.abs().max() + 1e-12
        idle = [e for e in range(self.L) if self.begins[e] == self.ends[e]]
        assert torch.equal(ours[idle], exact[idle])


class Fp8WgradProblem(OneWgrad, Fp8Problem):
    """Operands by columns; tokens after the last expert's are NaN, bytes and scales."""

    def __init__(
        self,
        counts: list[int],
        O: int,  # noqa: E741
        I: int,  # noqa: E741
        **options,
    ) -> None:
        super().__init__(counts, **options)
        self.shape, self.begins = (O, I), [0, *self.ends[:-1]]
        self.ends_T = column_offsets(self.offsets)
        self.q_d, self.d = self._columns(O, self.parts, self.dtype)
        self.q_v, self.v = self._columns(I, 1, torch.float8_e4m3fn)

    def _columns(
        self, channels: int, parts: int, dtype: torch.dtype
    ) -> tuple[QuantizedColumns, Tensor]:
        x = self.draw(self.S, channels)
        if self.integers:  # an expert's token blocks have powers of two of their own
            row = torch.arange(self.S, dtype=torch.int32, device=DEVICE)
            expert = torch.searchsorted(self.offsets[1:], row, right=True).clamp(max=self.L - 1)
            block = (self.ends_T[expert] + row - self.offsets[expert]) // 128
            ones = torch.ones(int(block.max()) + 1, channels, device=DEVICE)
            x = x * self.spread_blocks(ones, parts)[block].to(BF16)
        q = quantize_columns(x, self.offsets, parts, dtype)
        dense = dequantize_columns(q, self.offsets, self.S, parts)
        used = int(self.ends_T[-1])
        q.data_CT.view(torch.uint8)[:, used:] = 0x7F
        q.scale[used // 128 :] = float("nan")
        return q, dense

    @property
    def given(self) -> dict[str, Any]:
        operands = {"d": Operand(self.q_d, parts=self.parts), "v": Operand(self.q_v)}
        return {**operands, "offsets": self.ends_T}


class Pair:
    """Two problems of the same experts and channels; in bf16 the second starts behind row 0."""

    def __init__(
        self,
        kind: type[OneWgrad],
        counts: tuple[list[int], list[int]],
        O: int,  # noqa: E741
        I: int,  # noqa: E741
        **options: Any,
    ) -> None:
        other = dict(padding=13, before=9) if kind is WgradProblem else {}
        first, second = counts
        make: Any = kind
        self.both = make(first, O, I, **options), make(second, O, I, **options | other)

    @property
    def rows(self) -> list[ExpertRows]:
        return [p.rows for p in self.both]

    def start(self) -> Tensor:
        return self.both[0].start()

    def ours(self, mode: str, start: Tensor | None = None, **options: Any) -> Tensor:
        """dw, in the middle of a buffer around which nothing is written."""

        def call(out: Tensor, add: bool) -> Tensor:
            return wgrad_pair(*self.rows, out, accumulate=add, **options)

        return self.both[0].within_guards(mode, start, call)

    def exact(self, mode: str) -> Tensor:
        first, second = self.both
        return first.exact(mode) + second.exact("fp32")
