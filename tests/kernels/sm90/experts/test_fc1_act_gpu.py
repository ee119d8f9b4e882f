"""Kernel `fc1_act` on a Hopper GPU: accuracy, ragged ends, gathering, determinism, capture."""

import pytest
import torch

pytest.importorskip("cutlass")
if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.sm90.experts.fc1_act import fc1_act
from phalanx.kernels.sm90.gemm.tiles import TILES, configured
from phalanx.kernels.sm90.jit.launch import counter_of
from tests.kernels.problems import ACTIVATIONS
from tests.kernels.sm90.gemm.gemm_problems import (
    BF16,
    COUNTS,
    Fc1Problem,
    check_counter,
    check_equal,
    check_graph,
    check_host_never_waits,
    check_other_stream,
    check_schedules,
)

pytestmark = pytest.mark.gpu

SWIGLU, SQUARED = Activation("swiglu"), Activation("squared_relu")
GPT_OSS = Activation("quick_geglu", limit=7.0, offset=1.0)
SIZES = [(64, 64), (192, 128), (448, 2880), (704, 64), (2880, 2880), (1408, 2048)]
gathered = pytest.mark.parametrize("gather", [False, True], ids=["rows", "gathered"])


@gathered
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("counts", COUNTS)
def test_error_is_that_of_bf16_torch(counts, tile, gather):
    p = Fc1Problem(COUNTS[counts], 448, 320, SWIGLU, gather=gather)
    p.check(p.ours(loop=configured(tile, gather=gather, transposed=False)))


@pytest.mark.parametrize("number", range(len(ACTIVATIONS)), ids=lambda n: str(ACTIVATIONS[n]))
def test_every_activation(number):
    """With every second a bias."""
    act, bias = ACTIVATIONS[number], number % 2 == 1
    for counts in ("ragged", "many", "nobody"):
        p = Fc1Problem(COUNTS[counts], 448, 320, act, bias=bias, gather=True)
        p.check(p.ours(loop=configured("pp192", gather=True, transposed=False)))


@pytest.mark.parametrize("tile", ["pp128", "co256"])
def test_one_half_without_a_gate(tile):
    for counts in COUNTS.values():
        p = Fc1Problem(counts, 448, 320, SQUARED)
        p.check(p.ours(loop=configured(tile, gather=False, transposed=False)))


def test_gpt_oss():
    p = Fc1Problem(COUNTS["ragged"], 2880, 2880, GPT_OSS, bias=True, gather=True)
    p.check(p.ours())


@pytest.mark.parametrize("act", [SWIGLU, SQUARED], ids=["swiglu", "squared_relu"])
def test_h_that_is_not_kept_is_not_missed(act):
    p = Fc1Problem(COUNTS["ragged"], 448, 320, act, gather=True)
    made = p.ours(keep_h=False)
    assert "h" not in made
    p.check(made)
    check_equal(p.ours(), made)


@pytest.mark.parametrize("tile", ["pp192", "co256"])
def test_without_prob(tile):
    loop = configured(tile, gather=False, transposed=False)
    for counts in COUNTS.values():
        p = Fc1Problem(counts, 448, 320, SWIGLU, prob=False)
        p.check(p.ours(loop=loop))


@gathered
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("F", "D"), SIZES)
def test_sizes_that_do_not_divide_the_tile(F, D, tile, gather):
    p = Fc1Problem(COUNTS["ragged"], F, D, SWIGLU, gather=gather)
    p.check(p.ours(loop=configured(tile, gather=gather, transposed=False)))


@gathered
@pytest.mark.parametrize("tile", TILES)
def test_few_rows_in_a_full_buffer(tile, gather):
    loop = configured(tile, gather=gather, transposed=False)
    for counts in ([1], [0, 5, 3], [15, 1], [17], [200, 56, 300], [128], [16, 16]):
        p = Fc1Problem(counts, 448, 320, SWIGLU, gather=gather, padding=0)
        p.check(p.ours(loop=loop))


@pytest.mark.parametrize("tile", TILES)
def test_integers_are_exact(tile):
    loop = configured(tile, gather=True, transposed=False)
    p = Fc1Problem(COUNTS["many"], 448, 128, SWIGLU, gather=True, integers=True)
    p.check_exact(p.ours(loop=loop), "h")
    p = Fc1Problem(COUNTS["many"], 448, 128, SQUARED, gather=True, integers=True)
    p.check_exact(p.ours(loop=loop), "h", "a")


@pytest.mark.parametrize("tile", TILES)
def test_an_expert_does_not_see_its_neighbours(tile):
    p = Fc1Problem([130, 70, 65], 448, 320, SWIGLU)
    loop = configured(tile, gather=False, transposed=False)
    clean = p.ours(loop=loop)
    p.x[130:200] = float("nan")
    for name, ours in p.ours(loop=loop).items():
        assert torch.equal(ours[:130], clean[name][:130])
        assert torch.equal(ours[200:], clean[name][200:])
        assert ours[130:200].isnan().all()


def test_bits_do_not_depend_on_who_computes():
    p = Fc1Problem(COUNTS["many"], 1408, 320, SWIGLU, gather=True)
    check_schedules(p, loop=configured("pp192", gather=True, transposed=False))


def test_counter_is_left_at_zero():
    for counts in COUNTS.values():
        check_counter(Fc1Problem(counts, 448, 128, SWIGLU))
    assert counter_of(torch.device("cuda", torch.cuda.current_device())).item() == 0


def test_host_never_waits():
    check_host_never_waits(Fc1Problem(COUNTS["ragged"], 448, 320, SWIGLU, gather=True))


def test_other_stream_than_the_default():
    check_other_stream(Fc1Problem(COUNTS["ragged"], 448, 320, SWIGLU, gather=True))


@pytest.mark.parametrize("own_counter", [True, False], ids=["own counter", "a counter"])
@gathered
def test_a_graph_serves_every_routing(gather, own_counter):
    p = Fc1Problem([300, 200, 100, 400], 704, 320, SWIGLU, padding=0, gather=gather)
    check_graph(p, own_counter=own_counter)


def _zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device="cuda")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w1_LHD": torch.zeros(3, 128, 128, dtype=BF16)}, "w1 must be on the CUDA device"),
        ({"w1_LHD": _zeros(3, 64, 128)}, "2 part.s. of N and 1 of K must be multiples of 64"),
        ({"w1_LHD": _zeros(3, 128, 128).mT}, "w1 must be contiguous"),
        ({"x": _zeros(128, 64)}, r"x must be torch.bfloat16 \[128, 128\]"),
        ({"offsets": _zeros(4, dtype=torch.int64)}, "offsets must be"),
        ({"index_S": _zeros(128, dtype=torch.int64)}, "index must be torch.int32"),
        ({"prob_S": _zeros(128)}, "prob must be torch.float32"),
        ({"bias_LH": _zeros(3, 64)}, r"bias must be torch.bfloat16 \[3, 128\]"),
        ({"counter": _zeros(2, dtype=torch.int32)}, r"counter must be torch.int32 \[1\]"),
    ],
)
def test_errors_name_the_argument(change, message):
    offsets = torch.tensor([0, 100, 120, 128], dtype=torch.int32, device="cuda")
    given = {"x": _zeros(128, 128), "w1_LHD": _zeros(3, 128, 128), "offsets": offsets, **change}
    with pytest.raises(ValueError, match=message):
        fc1_act(**given, act=SWIGLU)
