"""Squared ReLU with a learned scale an expert, as fusions, on a Hopper GPU against fp64.

Legend: S rows, K channels in, F channels out, L experts.
"""

import pytest
import torch

pytest.importorskip("cutlass")
if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from phalanx.kernels.launch_options import LaunchOptions
from phalanx.kernels.sm90.experts.fused_gemm import fused_gemm, sum_of_experts
from tests.kernels.sm90.gemm.contract import check_equal
from tests.kernels.sm90.gemm.gemm_problems import (
    BF16,
    COUNTS,
    FP32,
    FP64,
    Outputs,
    Problem,
    prefilled,
)
from tests.kernels.sm90.gemm.scaled_squared_relu import ScaledSquaredRelu
from tests.kernels.sm90.gemm.scaled_squared_relu_grad import ScaledSquaredReluGrad

pytestmark = pytest.mark.gpu
TILES = ["pp128", "pp192", "co256"]


class ScaledProblem(Problem):
    """x @ w^T of rows, or its gradient: of a with weights that are read transposed."""

    written = ("h", "a", "dh")

    def __init__(self, counts: list[int], F: int, K: int, *, gradient: bool, **options) -> None:
        super().__init__(counts, gather=True, **options)
        self.gradient = gradient
        self.x, self.dense = self.operand(K)
        shape = (self.L, K, F) if gradient else (self.L, F, K)
        w = self.draw(*shape, scale=K**-0.5)
        self.w = w.mT if gradient else w
        # Of integers these are powers of two, so that products with them are exact.
        drawn = self.draw(self.L).float()
        self.scale = drawn.sign().exp2() if self.integers else drawn
        self.h = self.draw(self.S, F, scale=1.5, span=4)
        self.h[self.used :] = float("nan")

    def ours(self, **options) -> Outputs:
        given = dict(index_S=self.index, scale=self.scale, **options)
        with prefilled():
            if not self.gradient:
                return fused_gemm(self.x, self.w, self.offsets, ScaledSquaredRelu(), **given)
            epilogue = ScaledSquaredReluGrad()
            made = fused_gemm(self.x, self.w, self.offsets, epilogue, loaded=self.h, **given)
        made["rows"] = made["dscale"].sum(0)
        made["dscale"] = sum_of_experts(made["dscale"], self.offsets)
        return made

    def exact(self) -> Outputs:
        return self._made(FP64, self.product(self.dense, self.w, FP64))

    def plain(self) -> Outputs:
        made = self._made(FP32, self.product(self.dense, self.w, BF16))
        return {k: v if k in ("rows", "dscale") else v.to(BF16) for k, v in made.items()}

    def _made(self, dtype: torch.dtype, acc: torch.Tensor) -> Outputs:
        scale = self.spread(self.scale).to(dtype)[:, None]
        if not self.gradient:
            h = acc.to(dtype)
            # Of integers exactly what is asked for: a follows from h as it is rounded.
            kept = h.to(BF16).to(dtype) if self.integers else h
            return {"h": h, "a": scale * kept.relu() ** 2}
        h = self.h[: self.used].to(dtype).requires_grad_()
        scale = scale.detach().requires_grad_()
        dh, rows = torch.autograd.grad(scale * h.relu() ** 2, (h, scale), acc.to(dtype))
        return {"dh": dh, "rows": rows[:, 0]}

    def dscale(self, rows: torch.Tensor) -> torch.Tensor:
        """Sums of the rows of each expert."""
        begins = [0, *self.ends[:-1]]
        parts = [rows[begin:end].sum() for begin, end in zip(begins, self.ends, strict=True)]
        return torch.stack(parts)


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("counts", COUNTS)
def test_error_is_that_of_bf16_torch(counts, tile, gradient):
    p = ScaledProblem(COUNTS[counts], 448, 320, gradient=gradient)
    ours = p.ours(tile=tile)
    dscale = ours.pop("dscale", None)
    p.check(ours)
    if gradient:
        exact, plain = (p.dscale(made["rows"].double()) for made in (p.exact(), p.plain()))
        error, bound = (dscale - exact).norm(), (plain - exact).norm()
        assert error <= 2 * bound + 1e-5 * exact.norm()


@pytest.mark.parametrize("tile", TILES)
def test_integers_are_exact(tile):
    for gradient, names in ((False, ("h", "a")), (True, ("dh", "rows"))):
        p = ScaledProblem(COUNTS["many"], 192, 128, gradient=gradient, integers=True)
        p.check_exact(p.ours(tile=tile), *names)


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
def test_bits_do_not_depend_on_who_computes(gradient):
    p = ScaledProblem(COUNTS["many"], 448, 320, gradient=gradient)
    first = p.ours(tile="pp192")
    for margin in (8, 32, 131, 32, 0, 0):
        check_equal(p.ours(tile="pp192", options=LaunchOptions(margin)), first)
