"""Kernel `wgrad` on a Hopper GPU: accuracy, ragged experts, gathered rows, determinism, capture."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")
if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from phalanx.kernels.expert_mlp.calls import Operand
from phalanx.kernels.launch_options import LaunchOptions
from phalanx.kernels.sm90.wgrad.wgrad import wgrad

pytestmark = pytest.mark.gpu

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
COUNTS = {
    "even": [256, 256, 256],
    "ragged": [1, 130, 0, 333, 64, 127, 129, 0, 65],
    "one row": [0, 1, 0],
    "single rows": [1] * 9,
    "one has all": [0, 1000, 0, 0],
    "nobody": [0, 0],
    "idle ends": [0, 0, 300, 20, 0],
    "many": [(37 * e) % 150 for e in range(70)],
}
TILES = [128, 192, 256]
MODES = {
    "bf16": (BF16, False),
    "bf16 +=": (BF16, True),
    "fp32": (FP32, False),
    "fp32 +=": (FP32, True),
}
GATHERED = [None, "d", "v"]
GUARD = 64
"""Elements before and after the result that must not be written."""


class Problem:
    """Operands on the GPU; rows that no expert has are NaN, and their index is no row at all."""

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
        g = torch.Generator("cuda").manual_seed(sum(counts) + O + I)
        self.L, self.shape, self.integers, self.generator = len(counts), (O, I), integers, g
        self.ends = [before + sum(counts[: e + 1]) for e in range(self.L)]
        self.begins = [before, *self.ends[:-1]]
        S = self.ends[-1] + padding
        self.d, self.v = self.draw(S, O), self.draw(S, I)
        for t in (self.d, self.v):
            t[self.ends[-1] :] = float("nan")
            t[:before] = float("nan")
        self.offsets = torch.tensor([before, *self.ends], dtype=torch.int32, device="cuda")
        self.given: dict[str, Any] = {"d": Operand(self.d), "v": Operand(self.v)}
        if gathered:
            used, rows = slice(before, self.ends[-1]), S + 100
            index = torch.randint(0, rows, (S,), generator=g, device="cuda").to(torch.int32)
            picked = index[used].long()
            dense = self.given[gathered].matrix
            table = torch.full_like(self.draw(rows, dense.shape[1]), float("nan"))
            table[picked] = self.draw(rows, dense.shape[1])[picked]
            dense[used] = table[picked]
            index[: used.start], index[used.stop :] = -(2**31), 2**31 - 1
            self.given |= {gathered: Operand(table, gather=True), "index_S": index}

    def draw(self, *shape: int) -> Tensor:
        if self.integers:
            return torch.randint(-2, 3, shape, generator=self.generator, device="cuda").to(BF16)
        return torch.randn(*shape, generator=self.generator, device="cuda").to(BF16)

    def ours(self, mode: str = "bf16", start: Tensor | None = None, **options) -> Tensor:
        """dw; nothing around it is written. `start`: what is added to, default a fixed draw."""
        dtype, add = MODES[mode]
        count = self.L * self.shape[0] * self.shape[1]
        room = torch.full((count + 2 * GUARD,), 7.0, dtype=dtype, device="cuda")
        out = room[GUARD : GUARD + count].view(self.L, *self.shape)
        out.copy_((self.start() if start is None else start) if add else float("nan"))
        made = wgrad(**{**self.given, **options}, offsets=self.offsets, out_LOI=out, accumulate=add)
        assert made is out
        assert (room[:GUARD] == 7).all() and (room[GUARD + count :] == 7).all()
        return out

    def start(self) -> Tensor:
        g = torch.Generator("cuda").manual_seed(1)
        return torch.randint(-50, 51, (self.L, *self.shape), generator=g, device="cuda").to(FP32)

    def expert_by_expert(self, dtype: torch.dtype) -> Tensor:
        """The same by a loop in `dtype`."""
        parts = zip(self.begins, self.ends, strict=True)
        return torch.stack([self.d[b:e].to(dtype).T @ self.v[b:e].to(dtype) for b, e in parts])

    def check(self, mode: str, **options) -> None:
        """In bf16 at most twice the error of bf16 torch; in fp32 that of an fp32 sum."""
        ours, exact = self.ours(mode, **options).double(), self.expert_by_expert(FP64)
        if MODES[mode][1]:
            exact = exact + self.start().double()
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


@pytest.mark.parametrize("gathered", GATHERED)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("counts", COUNTS)
def test_error_is_that_of_bf16_torch(counts, tile, mode, gathered):
    Problem(COUNTS[counts], 320, 448, gathered=gathered).check(mode, tile=tile)


@pytest.mark.parametrize("gathered", GATHERED)
@pytest.mark.parametrize(
    "shape", [(64, 64), (128, 256), (192, 2880), (2880, 64), (704, 1344), (1536, 2048)]
)
def test_sizes_that_do_not_divide_the_tile(shape, gathered):
    for mode in MODES:
        Problem(COUNTS["ragged"], *shape, gathered=gathered).check(mode)


@pytest.mark.parametrize("gathered", GATHERED)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tile", TILES)
def test_integers_are_exact(tile, mode, gathered):
    p = Problem(COUNTS["many"], 448, 320, gathered=gathered, integers=True)
    exact = p.expert_by_expert(FP64)
    if MODES[mode][1]:
        exact = exact + p.start().double()
    assert torch.equal(p.ours(mode, tile=tile), exact.to(FP32).to(MODES[mode][0]))


@pytest.mark.parametrize("rows", [63, 64, 65, 255, 256, 257, 5000])
def test_a_long_sum_is_exact(rows):
    """Every stage of the ring, over and over; each element of the sum tells a row apart."""
    p = Problem([rows, rows // 3, 1], 192, 256, integers=True)
    assert torch.equal(p.ours("fp32"), p.expert_by_expert(FP64).to(FP32))


@pytest.mark.parametrize("gathered", GATHERED)
@pytest.mark.parametrize("mode", MODES)
def test_an_expert_does_not_see_its_neighbours(mode, gathered):
    """An expert of NaN between two others, and NaN before the first expert."""
    p = Problem([130, 70, 65], 192, 320, gathered=gathered, before=13)
    clean = p.ours(mode)
    for name in ("d", "v"):
        matrix = p.given[name].matrix.clone()
        p.given[name] = p.given[name]._replace(matrix=matrix)
        if name == gathered:
            rows = p.given["index_S"]
            others = torch.cat([rows[p.begins[0] : p.ends[0]], rows[p.begins[2] : p.ends[2]]])
            mine = rows[p.begins[1] : p.ends[1]].long()
            matrix[mine[~torch.isin(mine, others.long())]] = float("nan")
        else:
            matrix[p.begins[1] : p.ends[1]] = float("nan")
    ours = p.ours(mode)
    assert torch.equal(ours[[0, 2]], clean[[0, 2]])
    assert ours[1].isnan().all()


def test_adding_leaves_experts_without_rows_alone():
    p = Problem([0, 40, 0], 192, 320)
    start = p.start()
    start[[0, 2]] = float("nan")
    ours = p.ours("fp32 +=", start=start)
    assert ours[[0, 2]].isnan().all() and ours[1].isfinite().all()


def test_added_is_what_would_be_written():
    p = Problem(COUNTS["ragged"], 448, 320)
    assert torch.equal(p.ours("fp32 +=", start=torch.zeros_like(p.start())), p.ours("fp32"))
    assert torch.equal(p.ours("fp32 +="), p.start() + p.ours("fp32"))


@pytest.mark.parametrize(
    ("tile", "mode", "gathered"),
    [
        (256, "bf16", None),
        (256, "fp32 +=", None),
        (192, "fp32", None),
        (128, "fp32 +=", "d"),
        (256, "bf16", "v"),
    ],
)
def test_bits_do_not_depend_on_who_computes(tile, mode, gathered):
    p = Problem(COUNTS["many"], 448, 704, gathered=gathered)
    order = torch.randperm(p.L, device="cuda").to(torch.int32)
    first = p.ours(mode, tile=tile)
    for options in (
        {"options": LaunchOptions(8)},
        {"options": LaunchOptions(32)},
        {"options": LaunchOptions(131)},
        {"options": LaunchOptions(32)},
        {"order_L": order},
        {"order_L": order.flip(0), "options": LaunchOptions(3)},
        *[{}] * 5,
    ):
        assert torch.equal(p.ours(mode, tile=tile, **options), first), options


def test_counter_is_left_at_zero():
    counter = torch.zeros(1, dtype=torch.int32, device="cuda")
    for counts in COUNTS.values():
        for margin in (0, 100, 131):
            p = Problem(counts, 448, 320)
            p.check("bf16", counter=counter, options=LaunchOptions(margin))
            assert counter.item() == 0


@pytest.mark.parametrize("gathered", GATHERED)
def test_rows_up_to_capacity(gathered):
    p = Problem([200, 56, 301], 448, 320, padding=0, gathered=gathered)
    p.check("bf16")
    p.check("fp32 +=")


@pytest.mark.parametrize("rows", [0, 50])
@pytest.mark.parametrize("mode", MODES)
def test_no_rows_at_all(mode, rows):
    p = Problem([0, 0], 192, 320, padding=rows)
    expected = p.start() if MODES[mode][1] else torch.zeros_like(p.start())
    assert torch.equal(p.ours(mode).float(), expected)


@pytest.mark.parametrize("gathered", GATHERED)
def test_experts_without_rows_may_be_left_alone(gathered):
    p = Problem([130, 0, 64, 0], 192, 320, gathered=gathered)
    want = p.ours("fp32")
    got = torch.full_like(want, 3)
    wgrad(**p.given, offsets=p.offsets, out_LOI=got, zeros=False)
    assert torch.equal(got[::2], want[::2]) and (got[1::2] == 3).all()


def test_result_is_made_if_none_is_given():
    p = Problem(COUNTS["ragged"], 192, 320)
    given = Operand(p.d), Operand(p.v), p.offsets
    assert torch.equal(wgrad(*given), p.ours())
    assert torch.equal(wgrad(*given, dtype=FP32), p.ours("fp32"))


@pytest.mark.parametrize("gathered", GATHERED)
def test_host_never_waits(gathered):
    p = Problem(COUNTS["ragged"], 448, 320, gathered=gathered)
    expected = p.ours()
    out = torch.empty_like(expected)
    torch.cuda.set_sync_debug_mode("error")
    try:
        wgrad(**p.given, offsets=p.offsets, out_LOI=out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("mode", "gathered"),
    [("bf16", None), ("fp32 +=", None), ("fp32 +=", "v"), ("bf16", "d")],
)
def test_a_graph_serves_every_routing(mode, gathered):
    p = Problem([300, 200, 100, 400], 320, 704, padding=0, gathered=gathered)
    dtype, add = MODES[mode]
    counter = torch.zeros(1, dtype=torch.int32, device="cuda")
    order = torch.arange(4, dtype=torch.int32, device="cuda")
    out = torch.empty(4, 320, 704, dtype=dtype, device="cuda")
    options = dict(accumulate=add, counter=counter, order_L=order)
    wgrad(**p.given, offsets=p.offsets, out_LOI=out.zero_(), **options)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wgrad(**p.given, offsets=p.offsets, out_LOI=out, **options)
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


def test_other_stream_than_the_default():
    p = Problem(COUNTS["ragged"], 448, 320)
    expected = p.ours()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        ours = p.ours()
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(ours, expected)


def _zeros(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device="cuda")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": Operand(torch.zeros(128, 64, dtype=BF16))}, "v must be on the CUDA device"),
        ({"v": Operand(_zeros(127, 64))}, r"v must be torch.bfloat16 \[128, 64\]"),
        ({"offsets": _zeros(4, dtype=torch.int64)}, "offsets must be"),
        ({"d": Operand(_zeros(128, 128).mT)}, "d must be contiguous"),
        ({"d": Operand(_zeros(128 * 128 + 1)[1:].view(128, 128))}, "d must start at a multiple"),
        (
            {"v": Operand(_zeros(9, 64), gather=True), "index_S": _zeros(5, dtype=torch.int32)},
            r"index must be torch.int32 \[128\]",
        ),
        (
            {"d": Operand(_zeros(9, 64), gather=True), "index_S": _zeros(5, dtype=torch.int32)},
            r"index must be torch.int32 \[128\]",
        ),
        ({"order_L": _zeros(2, dtype=torch.int32)}, r"order must be torch.int32 \[3\]"),
        ({"out_LOI": _zeros(3, 64, 128)}, r"out must be torch.bfloat16 \[3, 128, 64\]"),
        ({"tile": 100}, "columns=100"),
    ],
)
def test_errors_name_the_argument(change, message):
    offsets = torch.tensor([0, 100, 120, 128], dtype=torch.int32, device="cuda")
    operands = {"d": Operand(_zeros(128, 128)), "v": Operand(_zeros(128, 64))}
    given = {**operands, "offsets": offsets, **change}
    with pytest.raises(ValueError, match=message):
        wgrad(**given)
