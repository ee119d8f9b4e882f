"""Kernel of `wgrad_pair` on a Hopper GPU: accuracy, uneven experts, determinism, capture."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")
if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from phalanx.kernels.expert_mlp.calls import ExpertRows
from phalanx.kernels.launch_options import LaunchOptions
from phalanx.kernels.sm90.wgrad.wgrad import wgrad_pair
from tests.kernels.sm90.experts.test_wgrad_gpu import (
    BF16,
    FP32,
    FP64,
    GATHERED,
    GUARD,
    MODES,
    TILES,
    Problem,
)

pytestmark = pytest.mark.gpu

COUNTS = {
    "even": ([256] * 3, [256] * 3),
    "ragged": ([1, 130, 0, 333, 64, 127, 129, 0, 65], [70, 0, 0, 64, 1, 300, 63, 128, 257]),
    "the first has none": ([0, 0, 0], [100, 64, 1]),
    "the second has none": ([100, 64, 1], [0, 0, 0]),
    "nobody": ([0, 0], [0, 0]),
    "other experts": ([0, 1000, 0, 0], [5, 0, 0, 500]),
    "many": ([(37 * e) % 150 for e in range(70)], [(53 * e) % 130 for e in range(70)]),
}


class Pair:
    """Two problems of the same experts and channels; rows that no expert has are NaN."""

    def __init__(
        self,
        counts: tuple[list[int], list[int]],
        O: int,  # noqa: E741
        I: int,  # noqa: E741
        **options: Any,
    ) -> None:
        first, second = counts
        self.both = (
            Problem(first, O, I, **options),
            Problem(second, O, I, **options | dict(padding=13, before=9)),
        )

    @property
    def rows(self) -> list[ExpertRows]:
        return [ExpertRows(**p.given, offsets=p.offsets) for p in self.both]

    def start(self) -> Tensor:
        return self.both[0].start()

    def ours(self, mode: str, start: Tensor | None = None, **options: Any) -> Tensor:
        """dw, in the middle of a buffer around which nothing is written."""
        first, (dtype, add) = self.both[0], MODES[mode]
        count = first.L * first.shape[0] * first.shape[1]
        room = torch.full((count + 2 * GUARD,), 7.0, dtype=dtype, device="cuda")
        out = room[GUARD : GUARD + count].view(first.L, *first.shape)
        out.copy_((self.start() if start is None else start) if add else float("nan"))
        assert wgrad_pair(*self.rows, out, accumulate=add, **options) is out
        assert (room[:GUARD] == 7).all() and (room[GUARD + count :] == 7).all()
        return out

    def exact(self, mode: str) -> Tensor:
        first, second = (p.expert_by_expert(FP64) for p in self.both)
        return first + second + (self.start().double() if MODES[mode][1] else 0)


@pytest.mark.parametrize("gathered", GATHERED)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("counts", COUNTS)
def test_error_against_fp64(counts, tile, mode, gathered):
    """The error is that of an fp32 sum, rounded once."""
    p = Pair(COUNTS[counts], 320, 448, gathered=gathered)
    ours, exact = p.ours(mode, tile=tile).double(), p.exact(mode)
    assert ours.isfinite().all()
    bound = 2e-5 if MODES[mode][0] == FP32 else 2**-8
    if mode == "bf16 +=":  # what is added is rounded too
        bound *= 2
    assert (ours - exact).norm() <= bound * exact.norm() + 1e-12


@pytest.mark.parametrize("gathered", GATHERED)
@pytest.mark.parametrize("mode", ["bf16", "fp32", "fp32 +="])  # all but the one that rounds twice
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("counts", COUNTS)
def test_integers_are_exact(counts, tile, mode, gathered):
    p = Pair(COUNTS[counts], 448, 320, gathered=gathered, integers=True)
    assert torch.equal(p.ours(mode, tile=tile), p.exact(mode).to(FP32).to(MODES[mode][0]))


@pytest.mark.parametrize("shape", [(64, 64), (192, 2880), (2880, 64), (1536, 2048)])
@pytest.mark.parametrize("gathered", GATHERED)
def test_sizes_that_do_not_divide_the_tile(shape, gathered):
    p = Pair(COUNTS["ragged"], *shape, gathered=gathered, integers=True)
    assert torch.equal(p.ours("fp32 +="), p.exact("fp32 +=").to(FP32))


@pytest.mark.parametrize("rows", [(63, 5000), (64, 64), (257, 65), (5000, 1)])
def test_a_long_sum_is_exact(rows):
    """Every stage of the ring, over and over, with any stage at the border of the two."""
    first, second = rows
    p = Pair(([first, first // 3, 1], [second, 0, second // 2]), 192, 256, integers=True)
    assert torch.equal(p.ours("fp32"), p.exact("fp32").to(FP32))


@pytest.mark.parametrize("mode", ["fp32", "fp32 +="])
def test_experts_without_rows(mode):
    """Gradients of experts without rows in both are zeroed, or left alone."""
    p = Pair(([0, 40, 0, 0], [0, 0, 0, 64]), 192, 320)
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


def test_an_expert_does_not_see_its_neighbours():
    p = Pair(([130, 70, 65], [65, 100, 30]), 192, 320)
    clean = p.ours("fp32")
    for q in p.both:
        for name in ("d", "v"):
            matrix = q.given[name].matrix.clone()
            matrix[q.begins[1] : q.ends[1]] = float("nan")
            q.given[name] = q.given[name]._replace(matrix=matrix)
    ours = p.ours("fp32")
    assert torch.equal(ours[[0, 2]], clean[[0, 2]]) and ours[1].isnan().all()


@pytest.mark.parametrize("gathered", GATHERED)
def test_a_segment_without_rows_changes_no_bit(gathered):
    """The sum of one micro-batch is that of `wgrad`."""
    counts = COUNTS["ragged"][0]
    for both in ((counts, [0] * len(counts)), ([0] * len(counts), counts)):
        p = Pair(both, 448, 320, gathered=gathered)
        alone = p.both[0 if any(both[0]) else 1]
        assert torch.equal(p.ours("fp32"), alone.ours("fp32"))


@pytest.mark.parametrize(("tile", "gathered"), [(256, None), (192, "d"), (256, "v")])
def test_bits_do_not_depend_on_who_computes(tile, gathered):
    p = Pair(COUNTS["many"], 448, 704, gathered=gathered)
    order = torch.randperm(70, device="cuda").to(torch.int32)
    first = p.ours("fp32 +=", tile=tile)
    for options in (
        *[{"options": LaunchOptions(margin)} for margin in (8, 32, 131)],
        {"order_L": order},
        {"order_L": order.flip(0), "options": LaunchOptions(3)},
        *[{}] * 5,
    ):
        assert torch.equal(p.ours("fp32 +=", tile=tile, **options), first), options


def test_counter_is_left_at_zero():
    counter = torch.zeros(1, dtype=torch.int32, device="cuda")
    for counts in COUNTS.values():
        for margin in (0, 100, 131):
            p = Pair(counts, 448, 320)
            p.ours("fp32", counter=counter, options=LaunchOptions(margin))
            assert counter.item() == 0


def test_no_rows_at_all():
    for padding in (0, 50):
        p = Pair(([0, 0], [0, 0]), 192, 320, padding=padding)
        assert not p.ours("fp32").any() and torch.equal(p.ours("fp32 +="), p.start())


@pytest.mark.parametrize("gathered", GATHERED)
def test_a_graph_serves_every_routing(gathered):
    p = Pair(([300, 200, 100, 400], [100, 0, 350, 50]), 320, 704, gathered=gathered)
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


def test_errors_name_the_argument():
    p = Pair(COUNTS["even"], 128, 64)
    first, second = p.rows
    out = torch.zeros(3, 128, 64, device="cuda")
    for rows, to, message in (
        (second._replace(offsets=second.offsets.long()), out, "offsets must be torch.int32"),
        (second, out.to(BF16)[:2], r"out must be torch.bfloat16 \[3, 128, 64\]"),
        (second, out.half(), "out must be torch.bfloat16 or torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            wgrad_pair(first, rows, to)
