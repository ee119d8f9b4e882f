# ruff: noqa: RUF012  (attributes of contracts, which nobody changes)
"""Kernels of `wgrad` and `wgrad_pair` in bf16 on a Hopper GPU."""

import pytest
import torch

pytest.importorskip("cutlass")

from phalanx.kernels.expert_mlp.calls import Operand
from phalanx.kernels.launch_options import LaunchOptions
from phalanx.kernels.sm90.wgrad.wgrad import wgrad, wgrad_pair
from tests.kernels.sm90.gemm.gemm_problems import BF16, COUNTS, FP32, ON_HOPPER, zeros
from tests.kernels.sm90.wgrad.wgrad_contract import PairContract, WgradContract, rounded
from tests.kernels.sm90.wgrad.wgrad_problems import MODES, OF_TWO, Pair, WgradProblem

pytestmark = ON_HOPPER

GATHERED = {"rows": None, "d": "d", "v": "v"}
MANY = [(37 * e) % 150 for e in range(70)], [(53 * e) % 130 for e in range(70)]


class TestWgrad(WgradContract):
    problem, variants = WgradProblem, {k: dict(gathered=v) for k, v in GATHERED.items()}
    counts = {**COUNTS, "single rows": [1] * 9}
    counted = [*counts.values()]
    exact_counts, exact_shape = {"many": COUNTS["many"]}, (448, 320)
    schedules = [
        (256, "bf16", {}),
        (256, "fp32 +=", {}),
        (192, "fp32", {}),
        (128, "fp32 +=", dict(gathered="d")),
        (256, "bf16", dict(gathered="v")),
    ]
    schedule_shape = (448, 704)

    def test_error_is_that_of_bf16_torch(self, counts, tile, mode, variant):
        self.problem(counts, 320, 448, **variant).check(mode, tile=tile)

    @pytest.mark.parametrize(
        "shape", [(64, 64), (128, 256), (192, 2880), (2880, 64), (704, 1344), (1536, 2048)]
    )
    def test_sizes_that_do_not_divide_the_tile(self, shape, variant):
        for mode in MODES:
            self.problem(COUNTS["ragged"], *shape, **variant).check(mode)

    @pytest.mark.parametrize("rows", [63, 64, 65, 255, 256, 257, 5000])
    def test_a_long_sum_is_exact(self, rows):
        """Every stage of the ring, over and over; each element of the sum tells a row apart."""
        p = self.problem([rows, rows // 3, 1], 192, 256, integers=True)
        assert torch.equal(p.ours("fp32"), rounded(p.exact(), "fp32"))

    def test_an_expert_does_not_see_its_neighbours(self, mode, variant):
        """An expert of NaN between two others, and NaN before the first expert."""
        p = self.problem([130, 70, 65], 192, 320, before=13, **variant)
        clean = p.ours(mode)
        p.poison(1)
        ours = p.ours(mode)
        assert torch.equal(ours[[0, 2]], clean[[0, 2]])
        assert ours[1].isnan().all()

    def test_adding_leaves_experts_without_rows_alone(self):
        p = self.problem([0, 40, 0], 192, 320)
        start = p.start()
        start[[0, 2]] = float("nan")
        ours = p.ours("fp32 +=", start=start)
        assert ours[[0, 2]].isnan().all() and ours[1].isfinite().all()

    def test_added_is_what_would_be_written(self):
        p = self.problem(COUNTS["ragged"], 448, 320)
        assert torch.equal(p.ours("fp32 +=", start=torch.zeros_like(p.start())), p.ours("fp32"))
        assert torch.equal(p.ours("fp32 +="), p.start() + p.ours("fp32"))

    def test_rows_up_to_capacity(self, variant):
        p = self.problem([200, 56, 301], 448, 320, padding=0, **variant)
        p.check("bf16")
        p.check("fp32 +=")

    @pytest.mark.parametrize("rows", [0, 50])
    def test_no_rows_at_all(self, mode, rows):
        p = self.problem([0, 0], 192, 320, padding=rows)
        expected = p.start() if MODES[mode][1] else torch.zeros_like(p.start())
        assert torch.equal(p.ours(mode).float(), expected)

    def test_result_is_made_if_none_is_given(self):
        p = self.problem(COUNTS["ragged"], 192, 320)
        assert torch.equal(wgrad(**p.given), p.ours())
        assert torch.equal(wgrad(**p.given, dtype=FP32), p.ours("fp32"))

    @pytest.mark.parametrize(
        ("mode", "gathered"),
        [("bf16", None), ("fp32 +=", None), ("fp32 +=", "v"), ("bf16", "d")],
    )
    def test_a_graph_serves_every_routing(self, mode, gathered):
        p = self.problem([300, 200, 100, 400], 320, 704, padding=0, gathered=gathered)
        dtype, add = MODES[mode]
        counter = torch.zeros(1, dtype=torch.int32, device="cuda")
        order = torch.arange(4, dtype=torch.int32, device="cuda")
        out = torch.empty(4, 320, 704, dtype=dtype, device="cuda")
        options = dict(accumulate=add, counter=counter, order_L=order)
        wgrad(**p.given, out_LOI=out.zero_(), **options)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            wgrad(**p.given, out_LOI=out, **options)
        g = torch.Generator().manual_seed(0)
        for _ in range(100):
            cuts = torch.randint(0, p.d.shape[0] + 1, (4,), generator=g).sort().values
            p.offsets[1:].copy_(cuts.to(torch.int32))
            order.copy_(p.offsets.diff().argsort(descending=True))
            out.copy_(p.start() if add else torch.tensor(float("nan")))
            graph.replay()
            replayed = out.clone()
            assert torch.equal(replayed, p.ours(mode))
        assert counter.item() == 0

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"v": Operand(torch.zeros(128, 64, dtype=BF16))}, "v must be on the CUDA device"),
            ({"v": Operand(zeros(127, 64))}, r"v must be torch.bfloat16 \[128, 64\]"),
            ({"offsets": zeros(4, dtype=torch.int64)}, "offsets must be"),
            ({"d": Operand(zeros(128, 128).mT)}, "d must be contiguous"),
            ({"d": Operand(zeros(128 * 128 + 1)[1:].view(128, 128))}, "d must start at a multiple"),
            (
                {"v": Operand(zeros(9, 64), gather=True), "index_S": zeros(5, dtype=torch.int32)},
                r"index must be torch.int32 \[128\]",
            ),
            (
                {"d": Operand(zeros(9, 64), gather=True), "index_S": zeros(5, dtype=torch.int32)},
                r"index must be torch.int32 \[128\]",
            ),
            ({"order_L": zeros(2, dtype=torch.int32)}, r"order must be torch.int32 \[3\]"),
            ({"out_LOI": zeros(3, 64, 128)}, r"out must be torch.bfloat16 \[3, 128, 64\]"),
            ({"tile": 100}, "columns=100"),
        ],
    )
    def test_errors_name_the_argument(self, change, message):
        offsets = torch.tensor([0, 100, 120, 128], dtype=torch.int32, device="cuda")
        operands = {"d": Operand(zeros(128, 128)), "v": Operand(zeros(128, 64))}
        with pytest.raises(ValueError, match=message):
            wgrad(**{**operands, "offsets": offsets, **change})


class TestWgradPair(PairContract):
    kind, exact_shape = WgradProblem, (448, 320)
    counts = {**OF_TWO, "nobody": ([0, 0], [0, 0]), "many": MANY}
    modes = {mode: mode for mode in MODES if mode != "bf16 +="}  # which rounds twice
    variants = TestWgrad.variants
    schedules = [(256, MANY, {}), (192, MANY, dict(gathered="d"))]
    schedules += [(256, MANY, dict(gathered="v"))]

    @pytest.mark.parametrize("mode", MODES)
    def test_error_against_fp64(self, counts, tile, mode, variant):
        """The error is that of an fp32 sum, rounded once."""
        p = Pair(self.kind, counts, 320, 448, **variant)
        ours, exact = p.ours(mode, tile=tile).double(), p.exact(mode)
        assert ours.isfinite().all()
        bound = 2e-5 if MODES[mode][0] == FP32 else 2**-8
        if mode == "bf16 +=":  # what is added is rounded too
            bound *= 2
        assert (ours - exact).norm() <= bound * exact.norm() + 1e-12

    @pytest.mark.parametrize("shape", [(64, 64), (192, 2880), (2880, 64), (1536, 2048)])
    def test_sizes_that_do_not_divide_the_tile(self, shape, variant):
        p = Pair(self.kind, OF_TWO["ragged"], *shape, integers=True, **variant)
        assert torch.equal(p.ours("fp32 +="), rounded(p.exact("fp32 +="), "fp32"))

    @pytest.mark.parametrize("rows", [(63, 5000), (64, 64), (257, 65), (5000, 1)])
    def test_a_long_sum_is_exact(self, rows):
        """Every stage of the ring, over and over, with any stage at the border of the two."""
        first, second = rows
        counts = [first, first // 3, 1], [second, 0, second // 2]
        p = Pair(self.kind, counts, 192, 256, integers=True)
        assert torch.equal(p.ours("fp32"), rounded(p.exact("fp32"), "fp32"))

    @pytest.mark.parametrize("mode", ["fp32", "fp32 +="])
    def test_experts_without_rows(self, mode):
        """Gradients of experts without rows in both are zeroed, or left alone."""
        p = Pair(self.kind, ([0, 40, 0, 0], [0, 0, 0, 64]), 192, 320)
        start = p.start()
        start[[0, 2]] = float("nan")
        ours = p.ours(mode, start=start)
        assert ours[[1, 3]].isfinite().all()
        idle = ours[[0, 2]]
        assert idle.isnan().all() if mode == "fp32 +=" else not idle.any()
        if mode == "fp32":
            kept = torch.full_like(ours, 3)
            wgrad_pair(*p.rows, kept, zeros=False)
            assert torch.equal(kept[1::2], ours[1::2]) and (kept[::2] == 3).all()

    def test_an_expert_does_not_see_its_neighbours(self):
        p = Pair(self.kind, ([130, 70, 65], [65, 100, 30]), 192, 320)
        clean = p.ours("fp32")
        for q in p.both:
            q.poison(1)
        ours = p.ours("fp32")
        assert torch.equal(ours[[0, 2]], clean[[0, 2]]) and ours[1].isnan().all()

    def test_a_segment_without_rows_changes_no_bit(self, variant):
        """The sum of one micro-batch is that of `wgrad`."""
        counts = OF_TWO["ragged"][0]
        for both in ((counts, [0] * len(counts)), ([0] * len(counts), counts)):
            p = Pair(self.kind, both, 448, 320, **variant)
            alone = p.both[0 if any(both[0]) else 1]
            assert torch.equal(p.ours("fp32"), alone.ours("fp32"))

    def test_counter_is_left_at_zero(self):
        counter = torch.zeros(1, dtype=torch.int32, device="cuda")
        for counts in self.counts.values():
            for margin in (0, 100, 131):
                options = dict(counter=counter, options=LaunchOptions(margin))
                Pair(self.kind, counts, 448, 320).ours("fp32", **options)
                assert counter.item() == 0

    def test_no_rows_at_all(self):
        for padding in (0, 50):
            p = Pair(self.kind, ([0, 0], [0, 0]), 192, 320, padding=padding)
            assert not p.ours("fp32").any() and torch.equal(p.ours("fp32 +="), p.start())

    def test_a_graph_serves_every_routing(self, variant):
        p = Pair(self.kind, ([300, 200, 100, 400], [100, 0, 350, 50]), 320, 704, **variant)
        out = torch.empty(4, 320, 704, device="cuda")
        wgrad_pair(*p.rows, out.zero_(), accumulate=True)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            wgrad_pair(*p.rows, out, accumulate=True)
        g = torch.Generator().manual_seed(0)
        for _ in range(50):
            for q in p.both:
                begin, end = q.begins[0], q.ends[-1]
                cuts = torch.randint(begin, end + 1, (3,), generator=g).sort().values
                q.offsets[1:4].copy_(cuts.to(torch.int32))
            out.copy_(p.start())
            graph.replay()
            assert torch.equal(out.clone(), p.ours("fp32 +="))

    def test_errors_name_the_argument(self):
        p = Pair(self.kind, OF_TWO["even"], 128, 64)
        first, second = p.rows
        out = torch.zeros(3, 128, 64, device="cuda")
        for rows, to, message in (
            (second._replace(offsets=second.offsets.long()), out, "offsets must be torch.int32"),
            (second, out.to(BF16)[:2], r"out must be torch.bfloat16 \[3, 128, 64\]"),
            (second, out.half(), "out must be torch.bfloat16 or torch.float32"),
        ):
            with pytest.raises(ValueError, match=message):
                wgrad_pair(first, rows, to)
