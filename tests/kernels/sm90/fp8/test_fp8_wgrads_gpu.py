# ruff: noqa: RUF012  (attributes of contracts, which nobody changes)
"""Kernels of `wgrad` and `wgrad_pair` in FP8 on a Hopper GPU."""

import pytest
import torch

pytest.importorskip("cutlass")

from phalanx.kernels.sm90.wgrad.wgrad import wgrad
from tests.kernels.sm90.fp8.fp8_problems import EDGES, FORMATS
from tests.kernels.sm90.gemm.gemm_problems import BF16, FP32, ON_HOPPER
from tests.kernels.sm90.wgrad.wgrad_contract import PairContract, WgradContract, rounded
from tests.kernels.sm90.wgrad.wgrad_problems import MODES, OF_TWO, TILES, Fp8WgradProblem, Pair

pytestmark = ON_HOPPER

OF_FP8 = {mode: mode for mode in MODES if mode != "bf16 +="}
formats = pytest.mark.parametrize("dtype", FORMATS.values(), ids=FORMATS)


class TestWgrad(WgradContract):
    problem, modes, exact_counts, counted = Fp8WgradProblem, OF_FP8, EDGES, [EDGES["ragged"]]
    schedules = [(tile, mode, {}) for mode in OF_FP8 for tile in TILES]
    schedule_shape = (448, 320)

    def check(self, counts, mode="fp32 +=", **options):
        p = self.problem(counts, 192, 320, integers=True)
        assert torch.equal(p.ours(mode, **options), rounded(p.exact(mode), mode))

    @formats
    @pytest.mark.parametrize(("each", "parts"), [(192, 1), (192, 2), (64, 2), (320, 2), (64, 1)])
    def test_blocks_that_start_anew_in_the_linear_half(self, each, parts, dtype, tile):
        given = dict(parts=parts, dtype=dtype, integers=True)
        p, mode = self.problem(EDGES["edges"], parts * each, 448, **given), "fp32 +="
        assert torch.equal(p.ours(mode, tile=tile), rounded(p.exact(mode), mode))

    @pytest.mark.parametrize(
        ("O", "I", "parts"), [(5760, 2880, 2), (2880, 2880, 1), (2048, 768, 1)]
    )
    def test_error_at_the_sizes_of_models(self, O, I, parts, mode, tile):  # noqa: E741
        p = self.problem(EDGES["ragged"], O, I, parts=parts)
        exact, made = p.exact(mode), p.ours(mode, tile=tile).double()
        rounding = exact.to(MODES[mode][0]).double() - exact
        assert made.isfinite().all()
        assert (made - exact).norm() <= rounding.norm() + 3e-4 * exact.norm()

    def test_many_tokens(self):
        p = self.problem([4096, 3000], 256, 256)
        made, exact = p.ours("fp32").double(), p.exact()
        assert (made - exact).norm() <= 3e-4 * exact.norm()

    def test_default_output(self):
        p = self.problem(EDGES["ragged"], 192, 320, integers=True)
        made = wgrad(**p.given)
        assert made.dtype == BF16 and torch.equal(made, rounded(p.exact(), "bf16"))

    def test_the_order_of_tokens_in_a_block_does_not_matter_to_integers(self):
        """Whoever transposes may permute an expert's 128 tokens, if it does so for both
        operands."""
        p = self.problem(EDGES["edges"], 192, 320, integers=True)
        first = p.ours("fp32")
        by = torch.randperm(128, device="cuda")
        for q in (p.q_d, p.q_v):
            blocks = q.data_CT.view(torch.uint8).unflatten(1, (-1, 128))
            q.data_CT.copy_(blocks[..., by].flatten(1).view(torch.float8_e4m3fn))
        assert torch.equal(p.ours("fp32"), first)

    def test_scales_of_any_strides(self):
        p = self.problem(EDGES["ragged"], 384, 320, parts=2, integers=True)
        clean = p.ours("fp32")
        p.q_d = p.q_d._replace(scale=p.q_d.scale.T.contiguous().T)
        p.q_v = p.q_v._replace(scale=p.q_v.scale.T.contiguous().T)
        assert torch.equal(p.ours("fp32"), clean)

    def test_a_graph_serves_every_routing(self):
        p = self.problem([300, 200, 100, 400], 192, 320, padding=0)
        out = wgrad(**p.given, dtype=FP32)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            wgrad(**p.given, out_LOI=out)
        for ends in ([128, 128, 512, 1024], [0, 0, 1024, 1024], [0, 0, 0, 0]):
            p.ends_T[1:].copy_(torch.tensor(ends))
            graph.replay()
            assert torch.equal(out, wgrad(**p.given, dtype=FP32))


class TestWgradPair(PairContract):
    kind, modes = Fp8WgradProblem, OF_FP8
    counts = {**OF_TWO, "even": ([256] * 3, [128] * 3)}
    schedules = [(None, OF_TWO["ragged"], {})]

    @formats
    @pytest.mark.parametrize(("O", "I", "parts"), [(5760, 2880, 2), (2048, 768, 1)])
    def test_error_against_fp64(self, O, I, parts, dtype):  # noqa: E741
        both = Pair(self.kind, OF_TWO["ragged"], O, I, parts=parts, dtype=dtype)
        made, wanted = both.ours("fp32").double(), both.exact("fp32")
        assert (made - wanted).norm() <= 3e-4 * wanted.norm()
