"""Kernel `rows` on a Hopper GPU: accuracy, ragged experts, determinism, capture."""

import pytest
import torch

pytest.importorskip("cutlass")
if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from phalanx.kernels.sm90.experts.grouped_gemm import grouped_gemm
from phalanx.kernels.sm90.gemm.mainloop import Mainloop
from phalanx.kernels.sm90.gemm.tiles import TILES, configured
from phalanx.kernels.sm90.jit import launch as device
from phalanx.kernels.sm90.jit.launch import counter_of
from tests.kernels.sm90.gemm.gemm_problems import (
    BF16,
    COUNTS,
    RowsProblem,
    check_counter,
    check_equal,
    check_graph,
    check_host_never_waits,
    check_other_stream,
    check_schedules,
)

pytestmark = pytest.mark.gpu

SIZES = [(64, 64), (192, 128), (448, 2880), (704, 64), (2880, 2880), (2048, 768), (128, 4096)]
OTHER_LOOPS = [
    Mainloop(128),
    Mainloop(192),
]
"""Tiles that no table has."""
stored = pytest.mark.parametrize("transposed", [False, True], ids=["NK", "KN"])


@stored
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("counts", COUNTS)
def test_error_is_that_of_bf16_torch(counts, tile, transposed):
    loop = configured(tile, transposed=transposed)
    kind = dict(transposed=transposed, bias=not transposed)
    p = RowsProblem(COUNTS[counts], 448, 320, **kind)
    p.check(p.ours(loop=loop))


@pytest.mark.parametrize("loop", OTHER_LOOPS, ids=str)
@pytest.mark.parametrize("counts", COUNTS)
def test_other_tiles(counts, loop):
    p = RowsProblem(COUNTS[counts], 448, 320, transposed=loop.b_transposed)
    p.check(p.ours(loop=loop))


@stored
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("N", "K"), SIZES)
def test_sizes_that_do_not_divide_the_tile(N, K, tile, transposed):
    kind = dict(transposed=transposed, bias=not transposed)
    p = RowsProblem(COUNTS["ragged"], N, K, **kind)
    p.check(p.ours(loop=configured(tile, transposed=transposed)))


@pytest.mark.parametrize("tile", TILES)
def test_few_rows_in_a_full_buffer(tile):
    loop = configured(tile, transposed=False)
    for counts in ([1], [0, 5, 3], [15, 1], [17], [200, 56, 300], [128], [16, 16]):
        p = RowsProblem(counts, 448, 320, bias=True, padding=0)
        p.check(p.ours(loop=loop))


@stored
@pytest.mark.parametrize("tile", TILES)
def test_integers_are_exact(tile, transposed):
    kind = dict(transposed=transposed, bias=not transposed)
    p = RowsProblem(COUNTS["many"], 448, 128, integers=True, **kind)
    p.check_exact(p.ours(loop=configured(tile, transposed=transposed)), "y")


@pytest.mark.parametrize("tile", TILES)
def test_bits_do_not_depend_on_who_computes(tile):
    p = RowsProblem(COUNTS["many"], 2880, 320)
    check_schedules(p, loop=configured(tile, transposed=False))


@pytest.mark.parametrize("tile", TILES)
def test_an_expert_does_not_see_its_neighbours(tile):
    p = RowsProblem([130, 70, 65], 448, 320)
    loop = configured(tile, transposed=False)
    clean = p.ours(loop=loop)["y"]
    p.a[130:200] = float("nan")
    ours = p.ours(loop=loop)["y"]
    assert torch.equal(ours[:130], clean[:130]) and torch.equal(ours[200:], clean[200:])
    assert ours[130:200].isnan().all()


def test_counter_is_left_at_zero():
    for counts in COUNTS.values():
        check_counter(RowsProblem(counts, 448, 128))
    assert counter_of(torch.device("cuda", torch.cuda.current_device())).item() == 0


def test_writes_where_it_is_told():
    p = RowsProblem(COUNTS["ragged"], 448, 320)
    whole = torch.full((p.S + 2, 448), 3.0, dtype=BF16, device="cuda")
    y = grouped_gemm(p.a, p.w, p.offsets, out_SN=whole[1:-1])
    assert y.data_ptr() == whole[1:].data_ptr()
    assert torch.equal(y[: p.used], p.ours()["y"][: p.used])
    assert (whole[0] == 3).all() and (whole[p.used + 1 :] == 3).all()


def test_host_never_waits():
    check_host_never_waits(RowsProblem(COUNTS["ragged"], 448, 320))


def test_other_stream_than_the_default():
    check_other_stream(RowsProblem(COUNTS["ragged"], 448, 320))


@pytest.mark.parametrize("own_counter", [True, False], ids=["own counter", "a counter"])
def test_a_graph_serves_every_routing(own_counter):
    p = RowsProblem([300, 200, 100, 400], 704, 320, padding=0)
    check_graph(p, own_counter=own_counter)


def test_a_capture_may_be_the_first_to_need_a_counter(monkeypatch):
    p = RowsProblem(COUNTS["ragged"], 448, 320)
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


def test_counters_of_a_graph_are_its_own_after_many_captures():
    """10,800 captured launches, dropped as a step is whose sizes grow; then others use memory."""
    p = RowsProblem(COUNTS["ragged"], 448, 320)
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


def _zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device="cuda")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w_LNK": torch.zeros(3, 64, 128, dtype=BF16)}, "w must be on the CUDA device"),
        ({"a": _zeros(128, 64)}, r"a must be torch.bfloat16 \[128, 128\]"),
        ({"a": _zeros(128, 128).mT}, "a must be contiguous"),
        ({"a": _zeros(128 * 128 + 1)[1:].view(128, 128)}, "a must start at a multiple of 16"),
        ({"offsets": _zeros(4, dtype=torch.int64)}, "offsets must be"),
        ({"bias_LN": _zeros(3, 64)}, "bias and scale"),
        ({"out_SN": _zeros(128, 128)}, r"out must be torch.bfloat16 \[128, 64\]"),
        ({"counter": _zeros(2, dtype=torch.int32)}, r"counter must be torch.int32 \[1\]"),
    ],
)
def test_errors_name_the_argument(change, message):
    offsets = torch.tensor([0, 100, 120, 128], dtype=torch.int32, device="cuda")
    given = {"a": _zeros(128, 128), "w_LNK": _zeros(3, 64, 128), "offsets": offsets, **change}
    with pytest.raises(ValueError, match=message):
        grouped_gemm(**given)
