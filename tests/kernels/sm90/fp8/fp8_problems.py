"""Problems on a GPU for the GEMMs in FP8: quantised by the oracle, exact by what it gives back.

Integers have blocks with different scales, all powers of two, and sums that 14 bits hold; then the
results are those of fp64 bit for bit. Rows that no expert has are NaN in their bytes and scales.

Legend as in `gemm_problems`; B_X blocks of X.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.quantize.blocks import (
    Quantized,
    block_count,
    dequantize_rows,
    dequantize_weights,
    quantize_rows,
    quantize_weights,
)
from phalanx.kernels.sm90.experts.fc1_act import fc1_act
from phalanx.kernels.sm90.experts.fc2_dgrad_dact import fc2_dgrad_dact
from phalanx.kernels.sm90.experts.grouped_gemm import grouped_gemm
from tests.kernels.problems import formula
from tests.kernels.sm90.gemm.gemm_problems import (
    BF16,
    COUNTS,
    FP32,
    FP64,
    UNTOUCHED,
    DgradProblem,
    Fc1Problem,
    Outputs,
    Problem,
    prefilled,
)

EDGES = {**COUNTS, "edges": [0, 1, 127, 128, 129], "short": [5, 64, 65, 3]}
_NAN_BYTE = 0x7F


class Fp8Problem(Problem):
    """Operands in FP8; outputs in FP8 are given as bytes."""

    formats: ClassVar[dict[str, torch.dtype]] = {"a": torch.float8_e4m3fn}
    """Formats of outputs in FP8."""

    def spread_blocks(self, x: Tensor, parts: int = 1, rows: int = 1) -> Tensor:
        """Integers times another power of two, 1 to 8, for every `rows` x 128 of each part."""
        if not self.integers:
            return x
        shape = (*x.shape[:-2], -(-x.shape[-2] // rows), block_count(x.shape[-1], parts))
        power = torch.randint(0, 4, shape, generator=self.generator, device="cuda")
        wide = torch.exp2(power.float()).repeat_interleave(rows, -2)[..., : x.shape[-2], :]
        wide = wide.unflatten(-1, (parts, -1)).repeat_interleave(128, -1)
        return x * wide[..., : x.shape[-1] // parts].flatten(-2).to(x.dtype)

    def rows_in_fp8(
        self, columns: int, parts: int = 1, dtype: torch.dtype = torch.float8_e4m3fn
    ) -> tuple[Quantized, Tensor]:
        """Rows that a kernel reads, and in fp32 the rows of the experts."""
        count = self.S if self.index is None else self.S // 2 + 3
        x = self.spread_blocks(self.draw(count, columns), parts)
        q = quantize_rows(x, parts, dtype)
        wanted = torch.arange(self.used, device="cuda")
        if self.index is not None:
            wanted = self.index[: self.used].long()
        others = torch.ones(count, dtype=torch.bool, device="cuda")
        others[wanted] = False
        dense = dequantize_rows(q, parts)[wanted]
        q.data.view(torch.uint8)[others] = _NAN_BYTE
        q.scale[others] = float("nan")
        return q, dense

    def weights_in_fp8(self, N: int, K: int, n_parts: int = 1) -> tuple[Any, Tensor]:
        """`QuantizedWeights` [L, N, K], and in fp32 what they are."""
        w = self.spread_blocks(self.draw(self.L, N, K, scale=K**-0.5), 1, 128)
        q = quantize_weights(w, n_parts)
        return q, dequantize_weights(q.forward, n_parts)

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


class Fp8RowsProblem(Fp8Problem):
    """With `dgrad`, weights are stored [L, K, N], as those of fc1 in its data gradient."""

    written = ("y",)

    def __init__(
        self,
        counts: list[int],
        N: int,
        K: int,
        *,
        parts: int = 1,
        dgrad: bool = False,
        bias: bool = False,
        dtype: torch.dtype = torch.float8_e4m3fn,
        **options,
    ) -> None:
        super().__init__(counts, **options)
        self.parts = parts
        self.a, self.dense = self.rows_in_fp8(K, parts, dtype)
        if dgrad:
            q, w = self.weights_in_fp8(K, N, parts)
            self.w, self.w_LNK = Quantized(q.data_LIO, q.scale.mT), w.mT
        else:
            assert parts == 1
            q, self.w_LNK = self.weights_in_fp8(N, K)
            self.w = q.forward
        self.bias = self.draw(self.L, N) if bias else None
        self.scale = self.of_rows() if bias else None

    def ours(self, **options) -> Outputs:
        given = dict(bias_LN=self.bias, scale_S=self.scale, parts=self.parts)
        with prefilled():
            return {"y": grouped_gemm(self.a, self.w, self.offsets, **{**given, **options})}

    def exact(self) -> Outputs:
        y = self.product(self.dense, self.w_LNK, FP64)
        if self.bias is None:
            return {"y": y}
        return {"y": y + self.spread(self.bias).double() * self.scale[: self.used, None]}

    def check(self, ours: Outputs) -> None:
        if self.used:
            self.check_bound(ours["y"][: self.used], self.exact()["y"])
        self.check_padding(ours)


class Fp8Fc1Problem(Fp8Problem):
    """`Fc1Problem` of the same numbers in bf16, which they are, is what it is compared with."""

    written = ("h", "a", "a_scale")

    def __init__(
        self,
        counts: list[int],
        F: int,
        D: int,
        act: Activation,
        *,
        bias: bool = False,
        prob: bool = True,
        **options,
    ) -> None:
        super().__init__(counts, **options)
        self.act, H = act, act.width(F)
        self.x, self.dense = self.rows_in_fp8(D)
        q, self.w_LHD = self.weights_in_fp8(H, D, H // F)
        self.w = q.forward
        self.bias = self.draw(self.L, H) if bias else None
        self.prob = self.of_rows() if prob else None

    def ours(self, **options) -> Outputs:
        given = dict(index_S=self.index, bias_LH=self.bias, prob_S=self.prob)
        with prefilled():
            h, a = fc1_act(self.x, self.w, self.offsets, self.act, **{**given, **options})
        made = {"a": a.data.view(torch.uint8), "a_scale": a.scale}
        return made if h is None else {"h": h, **made}

    def in_bf16(self, loop: Any) -> Outputs:
        """Result of the kernel in bf16 for the same numbers, with its a quantised by the oracle."""
        same = Fc1Problem.__new__(Fc1Problem)
        vars(same).update(vars(self))
        same.x, same.index = self.dense.to(BF16), None
        same.w = self.w_LHD.to(BF16)
        same.offsets, same.prob = (
            self.offsets,
            None if self.prob is None else self.prob[: self.used],
        )
        assert torch.equal(same.w.float(), self.w_LHD) and torch.equal(same.x.float(), self.dense)
        made = same.ours(loop=loop)
        a = quantize_rows(made["a"])
        return {"h": made["h"], "a": a.data.view(torch.uint8), "a_scale": a.scale}

    def check_like_bf16(self, ours: Outputs, loop: Any) -> None:
        """Compare integers bit for bit."""
        assert self.integers
        for name, want in self.in_bf16(loop).items() if self.used else ():
            if name in ours:
                assert torch.equal(ours[name][: self.used], want), name
        self.check_padding(ours)

    def check(self, ours: Outputs) -> None:
        """h within its bound; a the oracle's of what the reference makes of this h, but for a last
        bit of bf16 before it is quantised."""
        used = slice(0, self.used)
        if self.used:
            h = self.product(self.dense, self.w_LHD, FP64)
            if self.bias is not None:
                h = h + self.spread(self.bias).double()
            self.check_bound(ours["h"][used], h)
            same = Fc1Problem.__new__(Fc1Problem)
            vars(same).update(vars(self))
            want = same._a(ours["h"][used].double())
            self.check_a(ours, want)
        self.check_padding(ours)


class Fp8DgradProblem(Fp8Problem):
    """`DgradProblem` of the same numbers in bf16 is what it is compared with."""

    written = ("dh", "dh_scale", "a", "a_scale", "parts")

    def __init__(
        self,
        counts: list[int],
        F: int,
        D: int,
        act: Activation,
        *,
        prob: bool = True,
        dtype: torch.dtype = torch.float8_e4m3fn,
        **options,
    ) -> None:
        super().__init__(counts, **options)
        self.act, self.dtype = act, dtype
        self.formats = {**self.formats, "dh": dtype}
        self.dy, self.dense = self.rows_in_fp8(D, dtype=dtype)
        q, self.w_LDF = self.weights_in_fp8(D, F)
        self.w = Quantized(q.data_LIO, q.scale.mT)
        self.h = self.draw(self.S, act.width(F), scale=1.5, span=8)
        self.h[self.used :] = float("nan")
        self.prob = self.of_rows() if prob else None

    def ours(self, **options) -> Outputs:
        given = dict(index_S=self.index, prob_S=self.prob)
        tensors = (self.dy, self.w, self.h, self.offsets)
        with prefilled():
            dh, a, parts = fc2_dgrad_dact(*tensors, self.act, **{**given, **options})
        assert (parts is None) == (self.prob is None) and dh.data.dtype == self.dtype
        made = {"dh": dh.data.view(torch.uint8), "dh_scale": dh.scale}
        made |= {"a": a.data.view(torch.uint8), "a_scale": a.scale}
        return made if parts is None else {**made, "parts": parts.T}

    def _same(self) -> DgradProblem:
        same = DgradProblem.__new__(DgradProblem)
        vars(same).update(vars(self))
        same.dy, same.index, same.h = self.dense.to(BF16), None, self.h[: self.used]
        same.prob = None if self.prob is None else self.prob[: self.used]
        same.w = self.w_LDF.to(BF16)
        assert torch.equal(same.w.float(), self.w_LDF) and torch.equal(same.dy.float(), self.dense)
        return same

    def check_like_bf16(self, ours: Outputs, loop: Any) -> None:
        """Compare integers bit for bit in dh and a, and dprob but for the rounding of its terms and
        sum."""
        assert self.integers
        if self.used:
            same, num_gate_parts = self._same(), self.h.shape[1] // self.w_LDF.shape[2]
            made = same.ours(loop=loop)
            dh, a = quantize_rows(made["dh"], num_gate_parts, self.dtype), quantize_rows(made["a"])
            for name, want in (("dh", dh), ("a", a)):
                assert torch.equal(ours[name][: self.used], want.data.view(torch.uint8)), name
                assert torch.equal(ours[f"{name}_scale"][: self.used], want.scale), name
            if "parts" in ours:
                da = same.product(self.dense, self.w_LDF.mT, FP64)
                terms = da * formula(same.h.double(), self.act)
                error = ours["parts"][: self.used].double().sum(1) - terms.sum(1)
                roundings = terms.shape[1] + 64  # of the sum, and those of a term
                assert (error.abs() <= roundings * 2**-24 * terms.abs().sum(1)).all()
        self.check_padding(ours)

    def check(self, ours: Outputs, *, error: float) -> None:
        """Within `error` of the norm of dh and dprob; a as close as its format allows."""
        if self.used:
            same = self._same()
            exact = same._gradients(FP64, same.product(self.dense, self.w_LDF.mT, FP64))
            self.check_a(ours, exact["a"])
            num_gate_parts = self.h.shape[1] // self.w_LDF.shape[2]
            data = ours["dh"][: self.used].view(self.dtype)
            dh = dequantize_rows(Quantized(data, ours["dh_scale"][: self.used]), num_gate_parts)
            assert dh.isfinite().all()
            assert (dh.double() - exact["dh"]).norm() <= error * exact["dh"].norm()
            if "parts" in ours:
                dprob = ours["parts"][: self.used].double().sum(1)
                assert (dprob - exact["dprob"]).norm() <= 1e-3 * exact["dprob"].norm()
        self.check_padding(ours)


def exact_in_bf16(exact: Tensor) -> Tensor:
    """Rounded as the kernels do, from fp32."""
    return exact.to(FP32).to(BF16)
