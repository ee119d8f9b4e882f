"""Kernel `rows` in FP8 on a Hopper GPU: exact integers, error, ragged experts, determinism."""

import pytest
import torch

pytest.importorskip("cutlass")
if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from phalanx.kernels.quantize.blocks import Quantized
from phalanx.kernels.sm90.experts.grouped_gemm import grouped_gemm
from phalanx.kernels.sm90.fp8.mainloop import Fp8Mainloop
from tests.kernels.sm90.fp8.fp8_problems import EDGES, Fp8RowsProblem, exact_in_bf16
from tests.kernels.sm90.gemm.gemm_problems import (
    check_counter,
    check_graph,
    check_host_never_waits,
    check_schedules,
)

pytestmark = pytest.mark.gpu

TILES = [128, 192, 256]
SIZES = [(64, 64), (192, 128), (448, 2880), (704, 64), (2880, 2880), (2048, 768), (128, 4096)]
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
tiles = pytest.mark.parametrize("tile", TILES)


def _check_exact(p: Fp8RowsProblem, **options) -> None:
    made = p.ours(**options)
    assert torch.equal(made["y"][: p.used], exact_in_bf16(p.exact()["y"]))
    p.check_padding(made)


@tiles
@pytest.mark.parametrize("counts", EDGES)
def test_integers_are_exact(counts, tile):
    p = Fp8RowsProblem(EDGES[counts], 448, 320, integers=True, bias=True)
    _check_exact(p, loop=Fp8Mainloop(tile))


@tiles
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("each", "parts"), [(192, 1), (192, 2), (64, 2), (256, 2)])
def test_the_data_gradient_of_fc1_is_exact(each, parts, name, tile):
    """Blocks start anew at the linear half, whose last one is short."""
    given = dict(parts=parts, dgrad=True, integers=True, dtype=FORMATS[name])
    p = Fp8RowsProblem(EDGES["edges"], 320, parts * each, **given)
    _check_exact(p, loop=Fp8Mainloop(tile, rows_format=name))


@tiles
@pytest.mark.parametrize(("N", "K"), SIZES)
def test_error_is_that_of_rounding(N, K, tile):
    p = Fp8RowsProblem(EDGES["ragged"], N, K, bias=True)
    p.check(p.ours(loop=Fp8Mainloop(tile)))


@pytest.mark.parametrize("name", FORMATS)
def test_error_at_the_sizes_of_gpt_oss(name):
    p = Fp8RowsProblem(EDGES["ragged"], 2880, 5760, parts=2, dgrad=True, dtype=FORMATS[name])
    p.check(p.ours())


@tiles
def test_sums_are_promoted(tile):
    """wgmma keeps some 14 bits of a sum: without promotion a long one of positive products comes
    out too small."""
    p = Fp8RowsProblem([256, 200], 256, 7168, padding=0)
    a, w = (t.data.float().abs().to(t.data.dtype) for t in (p.a, p.w))
    made = grouped_gemm(
        Quantized(a, p.a.scale), Quantized(w, p.w.scale), p.offsets, loop=Fp8Mainloop(tile)
    )
    exact = p.product(p.dense.abs(), p.w_LNK.abs(), torch.float64)
    assert abs(float(((made.double() - exact) / exact).mean())) < 1e-3


@tiles
def test_bits_do_not_depend_on_who_computes(tile):
    check_schedules(Fp8RowsProblem(EDGES["many"], 2880, 320), loop=Fp8Mainloop(tile))


def test_an_expert_does_not_see_its_neighbours():
    p = Fp8RowsProblem([130, 70, 65], 448, 320)
    clean = p.ours()["y"]
    p.a.data.view(torch.uint8)[130:200] = 0x7F
    p.a.scale[130:200] = float("nan")
    ours = p.ours()["y"]
    assert torch.equal(ours[:130], clean[:130]) and torch.equal(ours[200:], clean[200:])
    assert ours[130:200].isnan().all()


def test_scales_of_any_strides():
    p = Fp8RowsProblem(EDGES["ragged"], 448, 320, integers=True)
    clean = p.ours()["y"][: p.used]
    blocks_first = p.a.scale.T.contiguous().T
    wide = torch.full((p.L, 5, 7), float("nan"), device="cuda")
    wide[:, :4, :3] = p.w.scale
    given = (Quantized(p.a.data, blocks_first), Quantized(p.w.data, wide[:, :4, :3]), p.offsets)
    assert torch.equal(grouped_gemm(*given)[: p.used], clean)


def test_a_poisoned_block_reaches_its_row_only():
    p = Fp8RowsProblem([100, 100], 448, 320, padding=0)
    clean = p.ours()["y"]
    p.a.scale[150, 1] = float("nan")
    ours = p.ours()["y"]
    assert ours[150].isnan().all()
    others = torch.arange(200, device="cuda") != 150
    assert torch.equal(ours[others], clean[others])


def test_counter_is_left_at_zero():
    for counts in EDGES.values():
        check_counter(Fp8RowsProblem(counts, 448, 128))


def test_host_never_waits():
    check_host_never_waits(Fp8RowsProblem(EDGES["ragged"], 448, 320))


def test_a_graph_serves_every_routing():
    check_graph(Fp8RowsProblem([300, 200, 100, 400], 704, 320, padding=0), own_counter=True)
