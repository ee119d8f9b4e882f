"""Kernel `bias_grad` on a GPU: accuracy, ragged experts, index and scale, determinism, capture."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")
if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

import itertools

from phalanx.kernels.quantize.quantize import dequantize_rows, quantize_rows, row_bytes, unpack_rows
from phalanx.kernels.sm90.experts.bias_grad import bias_grad

pytestmark = pytest.mark.gpu

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
COUNTS = {
    "ragged": [1, 130, 0, 333, 255, 256, 257, 0, 65],
    "one has all": [0, 3000, 0],
    "nobody": [0, 0],
    "many": [(37 * e) % 600 for e in range(70)],
}


class Problem:
    """Operands on the GPU; rows that no expert has are NaN, in index and scale as well."""

    def __init__(
        self,
        counts: list[int],
        O: int,  # noqa: E741
        *,
        scaled: bool = False,
        indexed: bool = False,
        integers: bool = False,
        padding: int = 77,
    ) -> None:
        g = torch.Generator("cuda").manual_seed(sum(counts) + O)
        self.L, self.O, used = len(counts), O, sum(counts)
        ends = [sum(counts[:e]) for e in range(self.L + 1)]
        self.rows = [slice(a, b) for a, b in itertools.pairwise(ends)]
        S = used + padding
        self.offsets = torch.tensor(ends, dtype=torch.int32, device="cuda")
        table = torch.randn(S + 50, O, generator=g, device="cuda")
        table = (table * 2).round() if integers else table
        scale = torch.rand(S, generator=g, device="cuda") + 0.5
        scale = (scale * 2).round() if integers else scale
        index = torch.randint(0, S + 50, (S,), generator=g, device="cuda").to(torch.int32)
        d = table.to(BF16) if indexed else table[:S].to(BF16)
        self.dense = d[index.long()] if indexed else d.clone()
        self.factor = scale.clone() if scaled else torch.ones_like(scale)
        if not indexed:
            d[used:] = float("nan")
        scale[used:], index[used:] = float("nan"), 2**31 - 1
        self.given: dict[str, Tensor] = {"d": d, "offsets": self.offsets}
        if scaled:
            self.given["scale_S"] = scale
        if indexed:
            self.given["index_S"] = index

    def expert_by_expert(self, dtype: torch.dtype) -> Tensor:
        scaled = self.dense.to(dtype) * self.factor[:, None].to(dtype)
        return torch.stack([scaled[rows].sum(0) for rows in self.rows])


@pytest.mark.parametrize("indexed", [False, True], ids=["dense", "indexed"])
@pytest.mark.parametrize("first", [2, 4, 6])
def test_rows_before_the_first_expert_are_not_read(first, indexed):
    p = Problem(COUNTS["ragged"], 320, scaled=True, indexed=indexed)
    want = bias_grad(**p.given, dtype=FP32)[first:]
    before = int(p.offsets[first])
    p.given["scale_S"][:before] = float("nan")
    if indexed:
        p.given["index_S"][:before] = 2**31 - 1
    p.given["offsets"] = p.offsets[first:]
    assert torch.equal(bias_grad(**p.given, dtype=FP32, behind=True), want)


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("indexed", [False, True], ids=["dense", "indexed"])
@pytest.mark.parametrize("O", [64, 320, 2880])
@pytest.mark.parametrize("counts", COUNTS)
def test_error_is_that_of_bf16_torch(counts, O, indexed, scaled):  # noqa: E741
    p = Problem(COUNTS[counts], O, scaled=scaled, indexed=indexed)
    exact, plain = p.expert_by_expert(FP64), p.expert_by_expert(BF16).double()
    bound = 2 * (plain - exact).norm() + 1e-2
    assert (bias_grad(**p.given).double() - exact).norm() <= bound
    wide = bias_grad(**p.given, dtype=FP32).double()
    assert (wide - exact).norm() <= 1e-5 * exact.norm() + 1e-12


@pytest.mark.parametrize("indexed", [False, True], ids=["dense", "indexed"])
@pytest.mark.parametrize("accumulate", [False, True], ids=["written", "added"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_integers_are_exact(dtype, accumulate, indexed):
    p = Problem(COUNTS["many"], 448, scaled=True, indexed=indexed, integers=True)
    start = torch.arange(p.L * p.O, device="cuda").view(p.L, p.O).remainder(13).to(dtype)
    out = start.clone() if accumulate else torch.full_like(start, float("nan"))
    made = bias_grad(**p.given, out_LO=out, accumulate=accumulate)
    exact = p.expert_by_expert(FP64) + (start.double() if accumulate else 0)
    assert made is out and torch.equal(out, exact.to(FP32).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("indexed", [False, True], ids=["dense", "indexed"])
@pytest.mark.parametrize(
    ("O", "parts", "packed"),
    [(64, 1, False), (2880, 1, True), (2880, 1, False), (5760, 2, False), (448, 7, False)],
)
def test_rows_in_fp8_have_the_bits_of_their_values(O, parts, packed, indexed, dtype):  # noqa: E741
    p = Problem(COUNTS["ragged"], O, scaled=indexed, indexed=indexed)
    q = quantize_rows(p.given["d"], parts, dtype)
    want = bias_grad(**p.given | {"d": dequantize_rows(q, parts, BF16)}, dtype=FP32)
    if packed:  # as they travel, with scales behind each row
        room = torch.full((len(q.data), row_bytes(O)), 0x7F, device="cuda").byte()
        to = unpack_rows(room, O, dtype)
        to.data.view(torch.uint8).copy_(q.data.view(torch.uint8))
        to.scale.copy_(q.scale)
        q = to
    got = bias_grad(**p.given | {"d": q}, parts=parts, dtype=FP32)
    assert torch.equal(got, want) and bool(want.any())


def test_runs_repeat_bit_for_bit():
    p = Problem(COUNTS["many"], 2880, scaled=True, indexed=True)
    first = bias_grad(**p.given, dtype=FP32)
    for _ in range(10):
        assert torch.equal(bias_grad(**p.given, dtype=FP32), first)


def test_no_rows_at_all():
    p = Problem([0, 0], 320, padding=0)
    assert not bias_grad(**p.given).any()
    out = torch.ones(2, 320, device="cuda")
    assert (bias_grad(**p.given, out_LO=out, accumulate=True) == 1).all()


def test_an_expert_does_not_see_its_neighbours():
    p = Problem([300, 70, 300], 320)
    clean = bias_grad(**p.given)
    p.given["d"][p.rows[1]] = float("nan")
    ours = bias_grad(**p.given)
    assert torch.equal(ours[[0, 2]], clean[[0, 2]]) and ours[1].isnan().all()


def test_a_graph_serves_every_routing():
    p = Problem([300, 700, 0, 400], 704, scaled=True, indexed=True, padding=0)
    bias_grad(**p.given)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        bias_grad(**p.given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    out = torch.empty(4, 704, dtype=BF16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bias_grad(**p.given, out_LO=out)
    g = torch.Generator().manual_seed(0)
    for _ in range(100):
        cuts = torch.randint(0, 1401, (4,), generator=g).sort().values
        p.offsets[1:].copy_(cuts.to(torch.int32))
        out.fill_(float("nan"))
        graph.replay()
        replayed = out.clone()
        assert torch.equal(replayed, bias_grad(**p.given))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale_S": torch.zeros(5)}, "scale must be on the CUDA device"),
        ({"index_S": torch.zeros(8, dtype=torch.int32)}, "index must be on the CUDA device"),
        ({"offsets": torch.zeros(3, dtype=torch.int64, device="cuda")}, "offsets must be"),
        ({"out_LO": torch.zeros(2, 65, device="cuda")}, r"out must be torch.float32 \[2, 64\]"),
    ],
)
def test_errors_name_the_argument(change, message):
    offsets = torch.tensor([0, 4, 8], dtype=torch.int32, device="cuda")
    given = {"d": torch.zeros(8, 64, dtype=BF16, device="cuda"), "offsets": offsets, **change}
    with pytest.raises(ValueError, match=message):
        bias_grad(**given)
