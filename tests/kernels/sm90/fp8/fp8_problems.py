"""Problems for the GEMMs in FP8: quantised by the oracle, exact by what it gives back.

Integers have blocks with different scales, all powers of two, and sums that 14 bits hold; then the
results are those of fp64 bit for bit. Rows that no expert has are NaN in their bytes and scales.

Legend as in `gemm_problems`; B_X blocks of X.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from phalanx.kernels.quantize.blocks import (
    Quantized,
    block_count,
    dequantize_rows,
    dequantize_weights,
    quantize_rows,
    quantize_weights,
)
from tests.kernels.problems import formula
from tests.kernels.sm90.gemm.gemm_problems import (
    BF16,
    COUNTS,
    DEVICE,
    FP32,
    FP64,
    UNTOUCHED,
    DgradProblem,
    Fc1Problem,
    Outputs,
    Problem,
    RowsProblem,
)

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
EDGES = {**COUNTS, "edges": [0, 1, 127, 128, 129], "short": [5, 64, 65, 3]}
_NAN_BYTE = 0x7F


class Fp8Problem(Problem):
    """Operands in FP8; outputs in FP8 are given as bytes."""

    formats: ClassVar[dict[str, torch.dtype]] = {"a": torch.float8_e4m3fn}
    """Formats of outputs in FP8."""

    def __init__(
        self, *sizes: Any, parts: int = 1, dtype: torch.dtype = torch.float8_e4m3fn, **options
    ) -> None:
        self.parts, self.dtype = parts, dtype
        super().__init__(*sizes, **options)

    def spread_blocks(self, x: Tensor, parts: int = 1, rows: int = 1) -> Tensor:
        """Integers times another power of two, 1 to 8, for every `rows` x 128 of each part."""
        if not self.integers:
            return x
        shape = (*x.shape[:-2], -(-x.shape[-2] // rows), block_count(x.shape[-1], parts))
        power = torch.randint(0, 4, shape, generator=self.generator, device=DEVICE)
        wide = torch.exp2(power.float()).repeat_interleave(rows, -2)[..., : x.shape[-2], :]
        wide = wide.unflatten(-1, (parts, -1)).repeat_interleave(128, -1)
        return x * wide[..., : x.shape[-1] // parts].flatten(-2).to(x.dtype)

    def operand(self, columns: int) -> tuple[Any, Tensor]:
        """Rows that a kernel reads, and in fp32 the rows of the experts."""
        count = self.S if self.index is None else self.S // 2 + 3
        x = self.spread_blocks(self.draw(count, columns), self.parts)
        q = quantize_rows(x, self.parts, self.dtype)
        wanted = torch.arange(self.used, device=DEVICE)
        if self.index is not None:
            wanted = self.index[: self.used].long()
        others = torch.ones(count, dtype=torch.bool, device=DEVICE)
        others[wanted] = False
        dense = dequantize_rows(q, self.parts)[wanted]
        q.data.view(torch.uint8)[others] = _NAN_BYTE
        q.scale[others] = float("nan")
        return q, dense

    def weights(self, N: int, K: int, parts: int = 1, *, transposed: bool = False) -> Any:
        out, channels = (K, N) if transposed else (N, K)
        drawn = self.draw(self.L, out, channels, scale=channels**-0.5)
        q = quantize_weights(self.spread_blocks(drawn, 1, 128), parts)
        w = dequantize_weights(q.forward, parts)
        return (Quantized(q.data_LIO, q.scale.mT), w.mT) if transposed else (q.forward, w)

    def poison(self, rows: slice) -> None:
        for name in self.reads:
            q = getattr(self, name)
            q.data.view(torch.uint8)[rows] = _NAN_BYTE
            q.scale[rows] = float("nan")

    def twin[P: Problem](self, kind: type[P], rows: str, **change) -> P:
        """The problem in bf16 of the same numbers, of the experts' rows alone, dense in `rows`."""
        same = kind.__new__(kind)
        dense, w = self.dense.to(BF16), self.w_LNK.to(BF16)
        prob = None if self.prob is None else self.prob[: self.used]
        vars(same).update(
            {**vars(self), rows: dense, "w": w, "index": None, "prob": prob, **change}
        )
        assert torch.equal(w.float(), self.w_LNK) and torch.equal(dense.float(), self.dense)
        return same

    def check_bound(self, made: Tensor, exact: Tensor) -> None:
        """The error of rounding the exact result to bf16, and that of promoted sums in 14 bits."""
        assert made.isfinite().all()
        off, rounding = made.double() - exact, exact.to(BF16).double() - exact
        norm = exact.norm()
        assert off.norm() <= rounding.norm() + 3e-4 * norm
        assert off.abs().max() <= 2 * rounding.abs().max() + 1e-2 * exact.abs().max()

    def check_padding(self, ours: Outputs) -> None:
        for name in self.written:
            if name in ours:
                padding = ours[name][self.used :]
                if padding.dtype == torch.uint8:
                    untouched = torch.full_like(padding, UNTOUCHED, dtype=self.formats[name])
                    assert torch.equal(padding, untouched.view(torch.uint8)), name
                else:
                    assert (padding == UNTOUCHED).all(), name

    def check_a(self, ours: Outputs, want: Tensor) -> None:
        """Half a step of e4m3 from `want`, 2^-4 of a number, or of the smallest one in the block,
        and a bit of bf16."""
        used = slice(0, self.used)
        data = ours["a"][used].view(torch.float8_e4m3fn)
        made = dequantize_rows(Quantized(data, ours["a_scale"][used]))
        assert made.isfinite().all()
        amax = torch.nn.functional.pad(want.abs(), (0, -want.shape[1] % 128))
        amax = amax.unflatten(1, (-1, 128)).amax(2).repeat_interleave(128, 1)
        bound = want.abs() * (2**-4 + 2**-7) + amax[:, : want.shape[1]] * 2**-16
        assert ((made.double() - want).abs() <= bound).all()


class Fp8RowsProblem(Fp8Problem, RowsProblem):
    """`transposed`, weights are stored [L, K, N], as those of fc1 in its data gradient."""

    def check(self, ours: Outputs) -> None:
        if self.used:
            self.check_bound(ours["y"][: self.used], self.exact()["y"])
        self.check_padding(ours)


class Fp8Fc1Problem(Fp8Problem, Fc1Problem):
    """`Fc1Problem` of the same numbers in bf16, which they are, is what it is compared with."""

    written = ("h", "a", "a_scale")

    def ours(self, **options) -> Outputs:
        made = super().ours(**options)
        a = made.pop("a")
        return {**made, "a": a.data.view(torch.uint8), "a_scale": a.scale}

    def check_like_bf16(self, ours: Outputs, loop: Any) -> None:
        """Compare integers bit for bit with the kernel in bf16, its a quantised by the oracle."""
        assert self.integers
        if self.used:
            made = self.twin(Fc1Problem, "x").ours(loop=loop)
            a = quantize_rows(made["a"])
            wanted = {"h": made["h"], "a": a.data.view(torch.uint8), "a_scale": a.scale}
            for name, want in wanted.items():
                if name in ours:
                    assert torch.equal(ours[name][: self.used], want), name
        self.check_padding(ours)

    def check(self, ours: Outputs) -> None:
        """h within its bound; a the oracle's of what the reference makes of this h, but for a last
        bit of bf16 before it is quantised."""
        if self.used:
            h = ours["h"][: self.used]
            self.check_bound(h, self._h(FP64))
            self.check_a(ours, self._a(h.double()))
        self.check_padding(ours)


class Fp8DgradProblem(Fp8Problem, DgradProblem):
    """`DgradProblem` of the same numbers in bf16 is what it is compared with."""

    written = ("dh", "dh_scale", "a", "a_scale", "parts")

    def __init__(self, *sizes: Any, **options) -> None:
        super().__init__(*sizes, **options)
        self.formats = {**self.formats, "dh": self.dtype}

    def ours(self, **options) -> Outputs:
        made = super().ours(**options)
        dh, a = made["dh"], made["a"]
        assert dh.data.dtype == self.dtype
        found = {"dh": dh.data.view(torch.uint8), "dh_scale": dh.scale}
        found |= {"a": a.data.view(torch.uint8), "a_scale": a.scale}
        return {**found, "parts": made["parts"]} if "parts" in made else found

    def bf16(self) -> DgradProblem:
        return self.twin(DgradProblem, "dy", h=self.h[: self.used])

    def check_like_bf16(self, ours: Outputs, loop: Any) -> None:
        """Compare integers bit for bit in dh and a, and dprob but for the rounding of its terms and
        sum."""
        assert self.integers
        if self.used:
            made = self.bf16().ours(loop=loop)
            dh = quantize_rows(made["dh"], self.num_gate_parts, self.dtype)
            for name, want in (("dh", dh), ("a", quantize_rows(made["a"]))):
                assert torch.equal(ours[name][: self.used], want.data.view(torch.uint8)), name
                assert torch.equal(ours[f"{name}_scale"][: self.used], want.scale), name
            if "parts" in ours:
                da = self.product(self.dense, self.w_LNK, FP64)
                terms = da * formula(self.h[: self.used].double(), self.act)
                error = ours["parts"][: self.used].double().sum(1) - terms.sum(1)
                roundings = terms.shape[1] + 64  # of the sum, and those of a term
                assert (error.abs() <= roundings * 2**-24 * terms.abs().sum(1)).all()
        self.check_padding(ours)

    def check(self, ours: Outputs) -> None:
        """Within 4 % (e4m3) or 8 % (e5m2) of the norm of dh, and 0.1 % of that of dprob; a as close
        as its format allows."""
        if self.used:
            error, exact = 0.04 if self.dtype == FORMATS["e4m3"] else 0.08, self.bf16().exact()
            self.check_a(ours, exact["a"])
            data = ours["dh"][: self.used].view(self.dtype)
            q = Quantized(data, ours["dh_scale"][: self.used])
            dh = dequantize_rows(q, self.num_gate_parts)
            assert dh.isfinite().all()
            assert (dh.double() - exact["dh"]).norm() <= error * exact["dh"].norm()
            if "parts" in ours:
                dprob = ours["parts"][: self.used].double().sum(1)
                assert (dprob - exact["dprob"]).norm() <= 1e-3 * exact["dprob"].norm()
        self.check_padding(ours)


def exact_in_bf16(exact: Tensor) -> Tensor:
    """Rounded as the kernels do, from fp32."""
    return exact.to(FP32).to(BF16)
