# ruff: noqa: RUF012  (attributes of contracts, which nobody changes)
"""Kernels `fc1_act`, `fc2_dgrad_dact` and `grouped_gemm` in FP8 on a Hopper GPU.

Results of integers are those of the kernel in bf16, quantised, bit for bit.
"""

import pytest
import torch

pytest.importorskip("cutlass")

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.quantize.blocks import Quantized
from phalanx.kernels.sm90.experts.grouped_gemm import grouped_gemm
from phalanx.kernels.sm90.fp8.mainloop import Fp8Mainloop
from phalanx.kernels.sm90.gemm.mainloop import Mainloop
from tests.kernels.sm90.fp8.fp8_problems import (
    EDGES,
    FORMATS,
    Fp8DgradProblem,
    Fp8Fc1Problem,
    Fp8RowsProblem,
    exact_in_bf16,
)
from tests.kernels.sm90.gemm.contract import GATHERED, GemmContract, check_equal
from tests.kernels.sm90.gemm.gemm_problems import GPT_OSS, ON_HOPPER, SQUARED, SWIGLU

pytestmark = ON_HOPPER

TILES = [128, 192, 256]
ACTS = {
    "swiglu": SWIGLU,
    "gpt_oss": GPT_OSS,
    "geglu": Activation("geglu"),
    "squared_relu": SQUARED,
}
SIZES = [(64, 64), (2880, 2880), (768, 2048), (2048, 7168)]
gathered = pytest.mark.parametrize("variant", GATHERED.values(), ids=GATHERED)
formats = pytest.mark.parametrize("dtype", FORMATS.values(), ids=FORMATS)


class Fp8Contract(GemmContract):
    """With the tile that the tables choose; rows that the contract sets to NaN are FP8's own."""

    counts, tiles, all_sizes = EDGES, [None], SIZES
    size, of_counts = (320, 192), dict(integers=True)
    schedules = [((704, 320), None, variant) for variant in GATHERED.values()]
    counted, counted_options = [EDGES["ragged"]], dict(gather=True)
    graphs, counters = {"gathered": dict(gather=True)}, {"own counter": True}
    same: Mainloop
    """Main loop of the kernel in bf16 with which integers are compared."""
    test_few_rows_in_a_full_buffer = None
    test_integers_are_exact = None
    test_an_expert_does_not_see_its_neighbours = None
    test_other_stream_than_the_default = None
    test_errors_name_the_argument = None

    def loop(self, tile, variant):
        return {}

    def check_counts(self, p, ours):
        p.check_like_bf16(ours, self.same)


class TestFc1Act(Fp8Contract):
    problem, same = Fp8Fc1Problem, Mainloop(256)

    @gathered
    @pytest.mark.parametrize("act", ACTS)
    @pytest.mark.parametrize("F", [64, 320, 384])
    def test_integers_are_those_of_bf16_quantised(self, F, act, variant):
        """h and a, its bytes and scales, bit for bit, for short last blocks as well."""
        given = dict(integers=True, bias=True, **variant)
        p = self.make(EDGES["edges"], (F, 192), act=ACTS[act], **given)
        p.check_like_bf16(p.ours(), self.same)

    @pytest.mark.parametrize("prob", [False, True])
    def test_without_h(self, prob):
        p = self.make(EDGES["ragged"], gather=True, prob=prob)
        whole, ours = p.ours(), p.ours(keep_h=False)
        assert "h" not in ours
        check_equal(ours, {name: whole[name] for name in ours})

    def test_infinite_activations_poison_their_block(self):
        """A block with an infinity has no scale, its neighbours keep theirs."""
        p = self.make([64, 64], padding=0)
        clean = p.ours()
        p.prob[70] = float("inf")
        ours = p.ours()
        assert ours["a_scale"][70].isnan().all()
        check_other_rows(70, ours, clean)

    def test_scales_of_any_strides(self):
        p = self.make(EDGES["ragged"], gather=True)
        clean = p.ours()
        p.x = Quantized(p.x.data, p.x.scale.T.contiguous().T)
        p.w = Quantized(p.w.data, p.w.scale.mT.contiguous().mT)
        check_equal(p.ours(), clean)


class TestFc2DgradDact(Fp8Contract):
    problem, same = Fp8DgradProblem, Mainloop(128, b_transposed=True)
    counted_size = (320, 192)

    def check_counted(self, p, ours):
        p.check_padding(ours)

    @gathered
    @formats
    @pytest.mark.parametrize("act", ACTS)
    @pytest.mark.parametrize("F", [64, 320, 384])
    def test_integers_are_those_of_bf16_quantised(self, F, act, dtype, variant):
        """dh and a, bytes and scales, bit for bit, for short last blocks of either half as well."""
        given = dict(integers=True, dtype=dtype, **variant)
        p = self.make(EDGES["edges"], (F, 192), act=ACTS[act], **given)
        p.check_like_bf16(p.ours(), self.same)

    @gathered
    def test_error_in_e5m2(self, sizes, variant):
        p = self.make(EDGES["ragged"], sizes, dtype=FORMATS["e5m2"], **variant)
        p.check(p.ours())

    def test_without_probabilities(self):
        p = self.make(EDGES["ragged"], prob=False, integers=True)
        p.check_like_bf16(p.ours(), self.same)

    def test_a_poisoned_row_reaches_no_other(self):
        p = self.make([100, 100], padding=0)
        clean = p.ours()
        p.dy.scale[150] = float("nan")
        ours = p.ours()
        check_other_rows(150, ours, clean)
        assert ((ours["dh"][150] & 0x7F) == 0x7F).all() and ours["parts"][150].sum().isnan()


class TestGroupedGemm(Fp8Contract):
    problem, tiles, size = Fp8RowsProblem, TILES, (448, 320)
    variants, of_counts = {"bias": dict(bias=True)}, dict(integers=True)
    all_sizes = [(64, 64), (192, 128), (448, 2880), (704, 64), (2880, 2880), (2048, 768)]
    all_sizes += [(128, 4096)]
    schedules = [((2880, 320), tile, {}) for tile in TILES]
    counted, counted_options = [*EDGES.values()], {}
    usual, graphs = {}, {"rows": {}}

    def loop(self, tile, variant):
        return {} if tile is None else {"loop": Fp8Mainloop(tile)}

    def check_counts(self, p, ours):
        assert torch.equal(ours["y"][: p.used], exact_in_bf16(p.exact()["y"]))
        p.check_padding(ours)

    @pytest.mark.parametrize("name", FORMATS)
    @pytest.mark.parametrize(("each", "parts"), [(192, 1), (192, 2), (64, 2), (256, 2)])
    def test_the_data_gradient_of_fc1_is_exact(self, each, parts, name, tile):
        """Blocks start anew at the linear half, whose last one is short."""
        given = dict(parts=parts, transposed=True, integers=True, dtype=FORMATS[name])
        p = self.make(EDGES["edges"], (320, parts * each), **given)
        self.check_counts(p, p.ours(loop=Fp8Mainloop(tile, rows_format=name)))

    @formats
    def test_error_at_the_sizes_of_gpt_oss(self, dtype):
        given = dict(parts=2, transposed=True, dtype=dtype)
        p = self.make(EDGES["ragged"], (2880, 5760), **given)
        p.check(p.ours())

    def test_sums_are_promoted(self, tile):
        """wgmma keeps some 14 bits of a sum: without promotion a long one of positive products
        comes out too small."""
        p = self.make([256, 200], (256, 7168), padding=0)
        a, w = (t.data.float().abs().to(t.data.dtype) for t in (p.a, p.w))
        given = Quantized(a, p.a.scale), Quantized(w, p.w.scale), p.offsets
        made = grouped_gemm(*given, loop=Fp8Mainloop(tile))
        exact = p.product(p.dense.abs(), p.w_LNK.abs(), torch.float64)
        assert abs(float(((made.double() - exact) / exact).mean())) < 1e-3

    @pytest.mark.parametrize("tile", [None])
    def test_an_expert_does_not_see_its_neighbours(self, tile):
        GemmContract.test_an_expert_does_not_see_its_neighbours(self, tile)

    def test_scales_of_any_strides(self):
        p = self.make(EDGES["ragged"], integers=True)
        clean = p.ours()["y"][: p.used]
        blocks_first = p.a.scale.T.contiguous().T
        wide = torch.full((p.L, 5, 7), float("nan"), device="cuda")
        wide[:, :4, :3] = p.w.scale
        given = Quantized(p.a.data, blocks_first), Quantized(p.w.data, wide[:, :4, :3]), p.offsets
        assert torch.equal(grouped_gemm(*given)[: p.used], clean)

    def test_a_poisoned_block_reaches_its_row_only(self):
        p = self.make([100, 100], padding=0)
        clean = p.ours()
        p.a.scale[150, 1] = float("nan")
        ours = p.ours()
        assert ours["y"][150].isnan().all()
        check_other_rows(150, ours, clean)


def check_other_rows(row, ours, clean):
    others = torch.arange(len(ours[next(iter(ours))]), device="cuda") != row
    check_equal({k: v[others] for k, v in ours.items()}, {k: v[others] for k, v in clean.items()})
