"""`combine` on a Hopper GPU: the bits of the tensor code, only named rows read, capture."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")
if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from phalanx.kernels.sm90.experts.combine import combine
from tests.kernels.sm90.timing import microseconds

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16


def in_order(y_SD: Tensor, inverse_NK: Tensor, addends: Sequence[Tensor] = ()) -> Tensor:
    """Slot after slot and addend after addend, in fp32."""
    out_ND = torch.zeros(inverse_NK.shape[0], y_SD.shape[1], device="cuda")
    for row_N in inverse_NK.unbind(1):
        picked = y_SD.index_select(0, row_N.clamp(min=0)).float()
        out_ND += picked.masked_fill(row_N[:, None] < 0, 0)
    for addend in addends:
        out_ND += addend.float()
    return out_ND.to(BF16)


class Problem:
    """Rows of y that no slot names are NaN; `absent` of the slots have no row."""

    def __init__(self, N: int, K: int, D: int, absent: float = 0.2, seed: int = 0) -> None:
        g = torch.Generator("cuda").manual_seed(seed)
        S = N * K + 5
        inverse = torch.randperm(S, generator=g, device="cuda")[: N * K].to(torch.int32)
        inverse[torch.rand(N * K, generator=g, device="cuda") < absent] = -1
        self.inverse = inverse.view(N, K)
        self.y = torch.randn(S, D, generator=g, device="cuda").to(BF16)
        named = torch.zeros(S + 1, dtype=torch.bool, device="cuda")
        named[inverse.long()] = True  # -1 is the additional one
        self.y[~named[:S]] = float("nan")

    def expected(self, addends: Sequence[Tensor] = ()) -> Tensor:
        return in_order(self.y.nan_to_num(), self.inverse, addends)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


@pytest.mark.parametrize("K", range(1, 17))
def test_every_number_of_slots(K):
    for N, D in ((1, 8), (7, 16), (333, 264), (1000, 768)):
        for absent in (0.0, 0.3, 1.0):
            p = Problem(N, K, D, absent, seed=K)
            assert same_bits(combine(p.y, p.inverse), p.expected())
            more = [torch.randn(N, D, device="cuda").to(BF16) for _ in range(2)]
            for addends in (more[:1], more):
                assert same_bits(combine(p.y, p.inverse, addends=addends), p.expected(addends))


@pytest.mark.parametrize("addends", [0, 1, 2])
def test_error_is_one_rounding(addends):
    """Against fp64: no more than half a unit of the result, as the fp32 sum is far finer."""
    p = Problem(513, 8, 2880)
    more = [torch.randn(513, 2880, device="cuda").to(BF16) for _ in range(addends)]
    exact = torch.zeros(513, 2880, dtype=torch.float64, device="cuda")
    for row in p.inverse.unbind(1):
        picked = p.y.nan_to_num().index_select(0, row.clamp(min=0)).double()
        exact += picked.masked_fill(row[:, None] < 0, 0)
    for addend in more:
        exact += addend.double()
    got = combine(p.y, p.inverse, addends=more).double()
    assert ((got - exact).abs() <= exact.abs() * 2**-8 + 1e-5).all()


def test_more_addends_than_there_are_is_an_error():
    p = Problem(4, 2, 16)
    more = [torch.zeros(4, 16, dtype=BF16, device="cuda")] * 3
    with pytest.raises(ValueError, match="addends=3: must be 0 to 2"):
        combine(p.y, p.inverse, addends=more)
    with pytest.raises(ValueError, match="addend 1 must be"):
        combine(p.y, p.inverse, addends=[more[0], more[0].float()])


@pytest.mark.parametrize("D", [8, 24, 1000, 1536, 2048, 2880, 4096, 7168, 16384])
def test_every_width(D):
    for K in (2, 8):
        p = Problem(257, K, D, seed=D)
        assert same_bits(combine(p.y, p.inverse), p.expected())


def test_negative_zeros_become_positive():
    p = Problem(64, 4, 64)
    p.y.fill_(-0.0)
    assert same_bits(combine(p.y, p.inverse), torch.zeros(64, 64, dtype=BF16, device="cuda"))


def test_writes_where_it_is_told():
    p = Problem(100, 8, 256)
    whole = torch.full((102, 256), 7.0, dtype=BF16, device="cuda")
    out = combine(p.y, p.inverse, whole[1:-1])
    assert out.data_ptr() == whole[1:].data_ptr()
    assert same_bits(out, p.expected())
    assert (whole[0] == 7).all() and (whole[-1] == 7).all()


def test_no_tokens():
    out = combine(torch.zeros(4, 64, dtype=BF16, device="cuda"), Problem(1, 4, 64).inverse[:0])
    assert out.shape == (0, 64)


@pytest.mark.slow
def test_more_elements_than_31_bits_count():
    """Rows of y and of out beyond 2^31 elements."""
    N, D = 140_000, 16384
    y = torch.zeros(N, D, dtype=BF16, device="cuda")
    y.view(torch.int16)[:, :8] = (torch.arange(N, device="cuda") % 997).to(torch.int16)[:, None]
    inverse = torch.arange(N - 1, -1, -1, device="cuda", dtype=torch.int32)[:, None]
    out = combine(y, inverse)
    assert torch.equal(out[:, :16].view(torch.int16), y[:, :16].flip(0).view(torch.int16))
    assert not out[:, 16:].any()


def test_repeats_are_equal_and_the_host_never_waits():
    p = Problem(4096, 8, 2048)
    expected = combine(p.y, p.inverse)
    torch.cuda.set_sync_debug_mode("error")
    try:
        repeats = [combine(p.y, p.inverse) for _ in range(20)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(same_bits(r, expected) for r in repeats)


def test_a_graph_serves_every_routing():
    p = Problem(500, 8, 768)
    out = torch.empty(500, 768, dtype=BF16, device="cuda")
    combine(p.y, p.inverse, out)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        combine(p.y, p.inverse, out)
    for seed in range(100):
        new = Problem(500, 8, 768, absent=seed / 100, seed=seed)
        p.y.copy_(new.y)
        p.inverse.copy_(new.inverse)
        out.fill_(7)
        graph.replay()
        assert same_bits(out, new.expected())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y_SD": torch.zeros(9, 16, device="cuda")}, "y must be torch.bfloat16"),
        ({"y_SD": torch.zeros(9, 12, dtype=BF16, device="cuda")}, "12 columns"),
        ({"inverse_NK": torch.zeros(3, 2, device="cuda")}, "inverse must be torch.int32"),
        ({"out_ND": torch.zeros(2, 16, dtype=BF16, device="cuda")}, r"out must be .* \[3, 16\]"),
        (
            {"y_SD": torch.zeros(200, dtype=BF16, device="cuda")[1:161].view(10, 16)},
            "y must start at a multiple of 16 bytes",
        ),
    ],
)
def test_errors_name_the_argument(change, message):
    given = dict(
        y_SD=torch.zeros(9, 16, dtype=BF16, device="cuda"),
        inverse_NK=torch.zeros(3, 2, dtype=torch.int32, device="cuda"),
    )
    with pytest.raises(ValueError, match=message):
        combine(**{**given, **change})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("N", "K", "D"),
    [(32768, 8, 2048), (32768, 16, 4096), (24576, 8, 1536), (8192, 8, 7168), (32768, 4, 2880)],
)
@pytest.mark.parametrize("addends", [0, 1, 2])
def test_speed(N, K, D, addends):
    p = Problem(N, K, D, absent=0.0)
    out = torch.empty(N, D, dtype=BF16, device="cuda")
    more = [torch.randn(N, D, device="cuda").to(BF16) for _ in range(addends)]
    time = microseconds(lambda: combine(p.y, p.inverse, out, addends=more), calls=5)
    rate = 2e-6 * N * (K + 1 + addends) * D / time
    print(f"combine of {N} x {K} rows of {D} and {addends}: {time:.1f} us, {rate:.2f} TB/s")
    assert rate >= 3.5
