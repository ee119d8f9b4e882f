"""Kernel `rows` on a Hopper GPU: accuracy, ragged experts, determinism, capture."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")
if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from kernels.sm90.launch import rows

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
UNTOUCHED = 7.0
COUNTS = {
    "even": [256, 256, 256],
    "ragged": [1, 130, 0, 333, 64, 127, 129, 0, 65],
    "one row": [0, 1, 0],
    "one has all": [0, 1000, 0, 0],
    "nobody": [0, 0],
    "idle ends": [0, 0, 300, 20, 0],
    "many": [(37 * e) % 150 for e in range(70)],
}
TILES = [(columns, cluster) for columns in (128, 192, 256) for cluster in (1, 2)]


class Problem:
    """Operands on the GPU; rows of `a` that no expert has are NaN."""

    def __init__(
        self,
        counts: list[int],
        N: int,
        K: int,
        *,
        transposed: bool = False,
        bias: bool = False,
        integers: bool = False,
        padding: int = 77,
    ) -> None:
        g = torch.Generator("cuda").manual_seed(sum(counts) + N + K)

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            if integers:
                return torch.randint(-2, 3, shape, generator=g, device="cuda").to(BF16)
            return (torch.randn(*shape, generator=g, device="cuda") * scale).to(BF16)

        self.ends = [sum(counts[: e + 1]) for e in range(len(counts))]
        self.used = self.ends[-1]
        L, S = len(counts), self.used + padding
        self.a = draw(S, K)
        self.a[self.used :] = float("nan")
        w = draw(L, K, N, scale=K**-0.5) if transposed else draw(L, N, K, scale=K**-0.5)
        self.w = w.mT if transposed else w
        self.offsets = torch.tensor([0, *self.ends], dtype=torch.int32, device="cuda")
        self.bias = draw(L, N) if bias else None
        scale = torch.rand(S, generator=g, device="cuda") + 0.5
        scale = scale.ceil() if integers else scale
        scale[self.used :] = float("nan")
        self.scale = scale if bias else None

    def ours(self, **options) -> Tensor:
        out = torch.full((self.a.shape[0], self.w.shape[1]), UNTOUCHED, dtype=BF16, device="cuda")
        given = dict(bias_LN=self.bias, scale_S=self.scale, out_SN=out)
        return rows(self.a, self.w, self.offsets, **{**given, **options})

    def expert_by_expert(self, dtype: torch.dtype) -> Tensor:
        """The same by a loop in `dtype`, rows in use only."""
        parts, begin = [], 0
        for e, end in enumerate(self.ends):
            y = self.a[begin:end].to(dtype) @ self.w[e].to(dtype).T
            if self.bias is not None:
                y = (y + self.bias[e].to(dtype) * self.scale[begin:end, None]).to(dtype)
            parts.append(y)
            begin = end
        return torch.cat(parts)

    def check(self, y: Tensor) -> None:
        """Twice the error of bf16 torch at most, and nothing written past the last row."""
        exact, plain = self.expert_by_expert(torch.float64), self.expert_by_expert(BF16)
        assert (y[self.used :] == UNTOUCHED).all()
        ours = y[: self.used]
        assert ours.isfinite().all()
        bound = 2 * (plain.double() - exact).norm() + 1e-12
        assert (ours.double() - exact).norm() <= bound
        if self.used:
            worst = 2 * (plain.double() - exact).abs().max() + 1e-2 * exact.abs().max()
            assert (ours.double() - exact).abs().max() <= worst


@pytest.mark.parametrize("transposed", [False, True], ids=["NK", "KN"])
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("counts", COUNTS)
def test_error_is_that_of_bf16_torch(counts, tile, transposed):
    for bias in (False, True):
        p = Problem(COUNTS[counts], 448, 320, transposed=transposed, bias=bias)
        p.check(p.ours(tile=tile))


@pytest.mark.parametrize("transposed", [False, True], ids=["NK", "KN"])
@pytest.mark.parametrize("N, K", [(64, 64), (2880, 2880), (2048, 768), (128, 4096), (704, 64)])
def test_sizes_that_do_not_divide_the_tile(N, K, transposed):
    p = Problem(COUNTS["ragged"], N, K, transposed=transposed, bias=True)
    p.check(p.ours())


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_integers_are_exact(tile, bias):
    p = Problem(COUNTS["many"], 448, 128, bias=bias, integers=True)
    exact = p.expert_by_expert(torch.float64)
    assert torch.equal(p.ours(tile=tile)[: p.used], exact.to(torch.float32).to(BF16))


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_bits_do_not_depend_on_who_computes(bias):
    p = Problem(COUNTS["many"], 2880, 320, bias=bias)
    for tile in TILES:
        first = p.ours(tile=tile)
        for options in (
            {"sm_margin": 8},
            {"sm_margin": 32},
            {"sm_margin": 131},
            {"dynamic": False},
            {"dynamic": False, "sm_margin": 32},
            {},
        ):
            assert torch.equal(p.ours(tile=tile, **options), first), (tile, options)


def test_counter_is_left_at_zero():
    counter = torch.zeros(1, dtype=torch.int32, device="cuda")
    for counts in COUNTS.values():
        for margin in (0, 100, 131):
            p = Problem(counts, 448, 128)
            p.check(p.ours(counter=counter, sm_margin=margin))
            assert counter.item() == 0


def test_rows_up_to_capacity():
    p = Problem([200, 56, 300], 448, 128, padding=0)
    p.check(p.ours())


def test_host_never_waits():
    p = Problem(COUNTS["ragged"], 448, 320)
    expected = p.ours()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours = p.ours()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
def test_a_graph_serves_every_routing(dynamic):
    p = Problem([300, 200, 100, 400], 704, 320, padding=0)
    counter = torch.zeros(1, dtype=torch.int32, device="cuda")
    out = torch.empty(p.a.shape[0], 704, dtype=BF16, device="cuda")
    p.ours(dynamic=dynamic)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        p.ours(out_SN=out, counter=counter, dynamic=dynamic)
    g = torch.Generator().manual_seed(0)
    for _ in range(100):
        cuts = torch.randint(0, p.a.shape[0] + 1, (4,), generator=g).sort().values
        p.offsets[1:].copy_(cuts.to(torch.int32))
        out.fill_(UNTOUCHED)
        graph.replay()
        replayed = out.clone()
        assert torch.equal(replayed, p.ours(dynamic=dynamic))
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w_LNK": torch.zeros(3, 64, 128, dtype=BF16)}, "w must be on the CUDA device"),
        ({"offsets": torch.zeros(4, dtype=torch.int64, device="cuda")}, "offsets must be"),
        (
            {"a_SK": torch.zeros(256, 64, dtype=BF16, device="cuda")[:, :64].mT},
            "a must be contiguous",
        ),
        ({"sm_margin": -1}, "sm_margin=-1"),
        ({"tile": (100, 1)}, "columns=100"),
    ],
)
def test_errors_name_the_argument(change, message):
    p = Problem([100, 20, 8], 64, 128)
    given = {"a_SK": p.a, "w_LNK": p.w, "offsets": p.offsets, **change}
    with pytest.raises(ValueError, match=message):
        rows(**given)
