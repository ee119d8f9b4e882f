# ruff: noqa: RUF012  (attributes of contracts, which nobody changes)
"""Kernels `fc1_act`, `fc2_dgrad_dact` and `grouped_gemm` in bf16 on a Hopper GPU."""

from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.sm90.experts.fc1_act import fc1_act
from phalanx.kernels.sm90.experts.fc2_dgrad_dact import fc2_dgrad_dact
from phalanx.kernels.sm90.experts.grouped_gemm import grouped_gemm
from phalanx.kernels.sm90.gemm.mainloop import Mainloop
from phalanx.kernels.sm90.gemm.tiles import TILES, configured
from phalanx.kernels.sm90.jit import launch as device
from tests.kernels.problems import ACTIVATIONS
from tests.kernels.sm90.gemm.contract import GemmContract, check_equal
from tests.kernels.sm90.gemm.gemm_problems import (
    BF16,
    COUNTS,
    GPT_OSS,
    ON_HOPPER,
    SQUARED,
    SWIGLU,
    DgradProblem,
    Fc1Problem,
    RowsProblem,
    zeros,
)

pytestmark = ON_HOPPER

SIZES = [(64, 64), (192, 128), (448, 2880), (704, 64), (2880, 2880), (1408, 2048)]
STORED = {"NK": dict(transposed=False, bias=True), "KN": dict(transposed=True)}
both_acts = pytest.mark.parametrize("act", [SWIGLU, SQUARED], ids=["swiglu", "squared_relu"])
of_rows = [
    ({"offsets": zeros(4, dtype=torch.int64)}, "offsets must be"),
    ({"index_S": zeros(128, dtype=torch.int64)}, "index must be torch.int32"),
    ({"prob_S": zeros(128)}, "prob must be torch.float32"),
    ({"counter": zeros(2, dtype=torch.int32)}, r"counter must be torch.int32 \[1\]"),
]


def loop(tile: str, options: dict[str, Any], *, transposed: bool = False) -> dict[str, Any]:
    gather = options.get("gather", False)
    return {"loop": configured(tile, gather=gather, transposed=transposed)}


def offsets() -> torch.Tensor:
    return torch.tensor([0, 100, 120, 128], dtype=torch.int32, device="cuda")


class TestFc1Act(GemmContract):
    problem, tiles, all_sizes = Fc1Problem, [*TILES], SIZES
    exact_cases = [
        ((448, 128), dict(gather=True), ("h",)),
        ((448, 128), dict(gather=True, act=SQUARED), ("h", "a")),
    ]
    schedules = [((1408, 320), "pp192", dict(gather=True))]
    errors = [
        ({"w1_LHD": torch.zeros(3, 128, 128, dtype=BF16)}, "w1 must be on the CUDA device"),
        ({"w1_LHD": zeros(3, 64, 128)}, "2 part.s. of N and 1 of K must be multiples of 64"),
        ({"w1_LHD": zeros(3, 128, 128).mT}, "w1 must be contiguous"),
        ({"x": zeros(128, 64)}, r"x must be torch.bfloat16 \[128, 128\]"),
        ({"bias_LH": zeros(3, 64)}, r"bias must be torch.bfloat16 \[3, 128\]"),
        *of_rows,
    ]

    def loop(self, tile, variant):
        return loop(tile, variant)

    def call(self, **change):
        given = {"x": zeros(128, 128), "w1_LHD": zeros(3, 128, 128), "offsets": offsets()}
        return fc1_act(**given | change, act=SWIGLU)

    @pytest.mark.parametrize("number", range(len(ACTIVATIONS)), ids=lambda n: str(ACTIVATIONS[n]))
    def test_every_activation(self, number):
        """With every second a bias."""
        act, bias = ACTIVATIONS[number], number % 2 == 1
        for counts in ("ragged", "many", "nobody"):
            p = self.make(COUNTS[counts], act=act, bias=bias, gather=True)
            p.check(p.ours(**loop("pp192", dict(gather=True))))

    @pytest.mark.parametrize("tile", ["pp128", "co256"])
    def test_one_half_without_a_gate(self, tile):
        for counts in COUNTS.values():
            p = self.make(counts, act=SQUARED)
            p.check(p.ours(**loop(tile, {})))

    def test_gpt_oss(self):
        p = self.make(COUNTS["ragged"], (2880, 2880), act=GPT_OSS, bias=True, gather=True)
        p.check(p.ours())

    @both_acts
    def test_h_that_is_not_kept_is_not_missed(self, act):
        p = self.make(COUNTS["ragged"], act=act, gather=True)
        made = p.ours(keep_h=False)
        assert "h" not in made
        p.check(made)
        check_equal(p.ours(), made)

    @pytest.mark.parametrize("tile", ["pp192", "co256"])
    def test_without_prob(self, tile):
        for counts in COUNTS.values():
            p = self.make(counts, prob=False)
            p.check(p.ours(**loop(tile, {})))


class TestFc2DgradDact(GemmContract):
    problem, tiles, all_sizes = DgradProblem, ["pp128", "co256"], SIZES
    exact_cases = [((192, 128), dict(gather=True, act=SQUARED), ("dh", "a", "dprob"))]
    schedules = [((1408, 320), tile, dict(gather=True)) for tile in tiles]
    errors = [
        ({"w2_LFD": torch.zeros(3, 128, 64, dtype=BF16).mT}, "w2 must be on the CUDA device"),
        ({"w2_LFD": zeros(3, 128, 96).mT}, "w2 is .* multiples of 64"),
        ({"w2_LFD": zeros(3, 64, 128)}, "w2 must be the transpose of contiguous weights"),
        ({"dy": zeros(100, 128)}, r"dy must be torch.bfloat16 \[128, 128\]"),
        ({"h_SH": zeros(128, 64)}, r"h must be torch.bfloat16 \[128, 128\]"),
        *of_rows,
    ]

    def loop(self, tile, variant):
        return loop(tile, variant, transposed=True)

    def call(self, **change):
        given = {"dy": zeros(128, 128), "w2_LFD": zeros(3, 128, 64).mT, "h_SH": zeros(128, 128)}
        return fc2_dgrad_dact(**{**given, "offsets": offsets(), **change}, act=SWIGLU)

    @pytest.mark.parametrize("act", ACTIVATIONS, ids=str)
    def test_every_activation(self, act):
        for counts in ("ragged", "many", "nobody"):
            p = self.make(COUNTS[counts], act=act, gather=True)
            p.check(p.ours(**self.loop("pp128", dict(gather=True))))

    def test_gpt_oss(self):
        p = self.make(COUNTS["ragged"], (2880, 2880), act=GPT_OSS, gather=True)
        p.check(p.ours())

    def test_gradients_at_the_limits(self):
        """Up to and with a limit a clamp passes the gradient, beyond it does not."""
        act = Activation("quick_geglu", alpha=1.3, limit=0.625, offset=1.0)
        p = self.make([300], act=act, gather=True)
        values = torch.tensor([-0.63, -0.625, -0.62, 0.0, 0.62, 0.625, 0.63, 7.0], device="cuda")
        p.h[: p.used] = values.to(BF16).repeat(p.used, p.h.shape[1] // 8)
        p.h[: p.used, 448:] = p.h[: p.used, 448:].roll(1, 1)
        p.check(p.ours(**self.loop("pp128", dict(gather=True))))

    @both_acts
    def test_without_prob(self, act):
        for counts in COUNTS.values():
            p = self.make(counts, act=act, prob=False)
            p.check(p.ours(**self.loop("pp128", {})))

    def test_h_is_left_alone(self):
        p = self.make(COUNTS["ragged"])
        before = p.h.clone()
        p.ours()
        assert torch.equal(p.h.view(torch.int16), before.view(torch.int16))


class TestGroupedGemm(GemmContract):
    problem, tiles, variants = RowsProblem, [*TILES], STORED
    all_sizes = [*SIZES[:-1], (2048, 768), (128, 4096)]
    exact_cases = [((448, 128), kind, ("y",)) for kind in STORED.values()]
    schedules = [((2880, 320), tile, {}) for tile in TILES]
    usual, graphs = {}, {"rows": {}}
    errors = [
        ({"w_LNK": torch.zeros(3, 64, 128, dtype=BF16)}, "w must be on the CUDA device"),
        ({"a": zeros(128, 64)}, r"a must be torch.bfloat16 \[128, 128\]"),
        ({"a": zeros(128, 128).mT}, "a must be contiguous"),
        ({"a": zeros(128 * 128 + 1)[1:].view(128, 128)}, "a must start at a multiple of 16"),
        ({"bias_LN": zeros(3, 64)}, "bias and scale"),
        ({"out_SN": zeros(128, 128)}, r"out must be torch.bfloat16 \[128, 64\]"),
        of_rows[0],
        of_rows[-1],
    ]

    def loop(self, tile, variant):
        return loop(tile, {}, transposed=variant.get("transposed", False))

    def call(self, **change):
        given = {"a": zeros(128, 128), "w_LNK": zeros(3, 64, 128), "offsets": offsets()}
        return grouped_gemm(**given | change)

    @pytest.mark.parametrize("variant", [STORED["NK"]], ids=["NK"])
    def test_few_rows_in_a_full_buffer(self, tile, variant):
        super().test_few_rows_in_a_full_buffer(tile, variant)

    @pytest.mark.parametrize("tile", [Mainloop(128), Mainloop(192)], ids=str)
    def test_tiles_that_no_table_has(self, counts, tile):
        p = self.make(counts, transposed=tile.b_transposed)
        p.check(p.ours(loop=tile))

    def test_writes_where_it_is_told(self):
        p = self.make(COUNTS["ragged"])
        whole = torch.full((p.S + 2, 448), 3.0, dtype=BF16, device="cuda")
        y = grouped_gemm(p.a, p.w, p.offsets, out_SN=whole[1:-1])
        assert y.data_ptr() == whole[1:].data_ptr()
        assert torch.equal(y[: p.used], p.ours()["y"][: p.used])
        assert (whole[0] == 3).all() and (whole[p.used + 1 :] == 3).all()

    def test_a_capture_may_be_the_first_to_need_a_counter(self, monkeypatch):
        p = self.make(COUNTS["ragged"])
        expected, graphs = p.ours(), [torch.cuda.CUDAGraph() for _ in range(2)]
        monkeypatch.setattr(device, "_CAPTURED", device.CaptureCounters())
        made = []
        for graph in graphs:
            with torch.cuda.graph(graph):
                made.append(p.ours())
        for number in (1, 0, 1):
            made[number]["y"].zero_()
            graphs[number].replay()
            check_equal(made[number], expected)

    def test_counters_of_a_graph_are_its_own_after_many_captures(self):
        """10,800 captured launches, dropped as a step is whose sizes grow; then others use
        memory."""
        p = self.make(COUNTS["ragged"])
        expected, graph, made = p.ours(), None, []
        for _ in range(18):
            if graph is not None:
                graph.reset()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                made = [p.ours() for _ in range(600)]
        others = [torch.full((2048,), 77, dtype=torch.int32, device="cuda") for _ in range(256)]
        for _ in range(3):
            for result in made:
                result["y"].zero_()
            graph.replay()
            for result in made:
                check_equal(result, expected)
        assert all(torch.equal(o, torch.full_like(o, 77)) for o in others)
