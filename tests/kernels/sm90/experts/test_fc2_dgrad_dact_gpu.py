"""Kernel `fc2_dgrad_dact` on a Hopper GPU: accuracy, ragged ends, determinism, capture."""

import pytest
import torch

pytest.importorskip("cutlass")
if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.sm90.experts.fc2_dgrad_dact import fc2_dgrad_dact
from phalanx.kernels.sm90.gemm.tiles import configured
from phalanx.kernels.sm90.jit.launch import counter_of
from tests.kernels.problems import ACTIVATIONS
from tests.kernels.sm90.gemm.gemm_problems import (
    BF16,
    COUNTS,
    DgradProblem,
    check_counter,
    check_graph,
    check_host_never_waits,
    check_other_stream,
    check_schedules,
)

pytestmark = pytest.mark.gpu

SWIGLU, SQUARED = Activation("swiglu"), Activation("squared_relu")
GPT_OSS = Activation("quick_geglu", limit=7.0, offset=1.0)
TILES = ["pp128", "co256"]
SIZES = [(64, 64), (192, 128), (448, 2880), (704, 64), (2880, 2880), (1408, 2048)]
gathered = pytest.mark.parametrize("gather", [False, True], ids=["rows", "gathered"])


@gathered
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("counts", COUNTS)
def test_error_is_that_of_bf16_torch(counts, tile, gather):
    p = DgradProblem(COUNTS[counts], 448, 320, SWIGLU, gather=gather)
    p.check(p.ours(loop=configured(tile, gather=gather, transposed=True)))


@pytest.mark.parametrize("act", ACTIVATIONS, ids=str)
def test_every_activation(act):
    for counts in ("ragged", "many", "nobody"):
        p = DgradProblem(COUNTS[counts], 448, 320, act, gather=True)
        p.check(p.ours(loop=configured("pp128", gather=True, transposed=True)))


def test_gpt_oss():
    p = DgradProblem(COUNTS["ragged"], 2880, 2880, GPT_OSS, gather=True)
    p.check(p.ours())


def test_gradients_at_the_limits():
    """Up to and with a limit a clamp passes the gradient, beyond it does not."""
    act = Activation("quick_geglu", alpha=1.3, limit=0.625, offset=1.0)
    p = DgradProblem([300], 448, 320, act, gather=True)
    values = torch.tensor([-0.63, -0.625, -0.62, 0.0, 0.62, 0.625, 0.63, 7.0], device="cuda")
    p.h[: p.used] = values.to(BF16).repeat(p.used, p.h.shape[1] // 8)
    p.h[: p.used, 448:] = p.h[: p.used, 448:].roll(1, 1)
    p.check(p.ours(loop=configured("pp128", gather=True, transposed=True)))


@pytest.mark.parametrize("act", [SWIGLU, SQUARED], ids=["swiglu", "squared_relu"])
def test_without_prob(act):
    for counts in COUNTS.values():
        p = DgradProblem(counts, 448, 320, act, prob=False)
        p.check(p.ours(loop=configured("pp128", gather=False, transposed=True)))


@gathered
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("F", "D"), SIZES)
def test_sizes_that_do_not_divide_the_tile(F, D, tile, gather):
    p = DgradProblem(COUNTS["ragged"], F, D, SWIGLU, gather=gather)
    p.check(p.ours(loop=configured(tile, gather=gather, transposed=True)))


@gathered
@pytest.mark.parametrize("tile", TILES)
def test_few_rows_in_a_full_buffer(tile, gather):
    loop = configured(tile, gather=gather, transposed=True)
    for counts in ([1], [0, 5, 3], [15, 1], [17], [200, 56, 300], [128], [16, 16]):
        p = DgradProblem(counts, 448, 320, SWIGLU, gather=gather, padding=0)
        p.check(p.ours(loop=loop))


@pytest.mark.parametrize("tile", TILES)
def test_integers_are_exact(tile):
    p = DgradProblem(COUNTS["many"], 192, 128, SQUARED, gather=True, integers=True)
    made = p.ours(loop=configured(tile, gather=True, transposed=True))
    p.check_exact(made, "dh", "a", "dprob")


@pytest.mark.parametrize("tile", TILES)
def test_an_expert_does_not_see_its_neighbours(tile):
    p = DgradProblem([130, 70, 65], 448, 320, SWIGLU)
    loop = configured(tile, gather=False, transposed=True)
    clean = p.ours(loop=loop)
    p.dy[130:200] = p.h[130:200] = p.prob[130:200] = float("nan")
    for name, ours in p.ours(loop=loop).items():
        assert torch.equal(ours[:130], clean[name][:130]), name
        assert torch.equal(ours[200:], clean[name][200:]), name
        assert ours[130:200].isnan().all(), name


def test_h_is_left_alone():
    p = DgradProblem(COUNTS["ragged"], 448, 320, SWIGLU)
    before = p.h.clone()
    p.ours()
    assert torch.equal(p.h.view(torch.int16), before.view(torch.int16))


@pytest.mark.parametrize("tile", TILES)
def test_bits_do_not_depend_on_who_computes(tile):
    p = DgradProblem(COUNTS["many"], 1408, 320, SWIGLU, gather=True)
    check_schedules(p, loop=configured(tile, gather=True, transposed=True))


def test_counter_is_left_at_zero():
    for counts in COUNTS.values():
        check_counter(DgradProblem(counts, 448, 128, SWIGLU))
    assert counter_of(torch.device("cuda", torch.cuda.current_device())).item() == 0


def test_host_never_waits():
    check_host_never_waits(DgradProblem(COUNTS["ragged"], 448, 320, SWIGLU, gather=True))


def test_other_stream_than_the_default():
    check_other_stream(DgradProblem(COUNTS["ragged"], 448, 320, SWIGLU, gather=True))


@pytest.mark.parametrize("own_counter", [True, False], ids=["own counter", "a counter"])
@gathered
def test_a_graph_serves_every_routing(gather, own_counter):
    p = DgradProblem([300, 200, 100, 400], 704, 320, SWIGLU, padding=0, gather=gather)
    check_graph(p, own_counter=own_counter)


def _zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device="cuda")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w2_LFD": torch.zeros(3, 128, 64, dtype=BF16).mT}, "w2 must be on the CUDA device"),
        ({"w2_LFD": _zeros(3, 128, 96).mT}, "w2 is .* multiples of 64"),
        ({"w2_LFD": _zeros(3, 64, 128)}, "w2 must be the transpose of contiguous weights"),
        ({"dy": _zeros(100, 128)}, r"dy must be torch.bfloat16 \[128, 128\]"),
        ({"h_SH": _zeros(128, 64)}, r"h must be torch.bfloat16 \[128, 128\]"),
        ({"offsets": _zeros(4, dtype=torch.int64)}, "offsets must be"),
        ({"index_S": _zeros(128, dtype=torch.int64)}, "index must be torch.int32"),
        ({"prob_S": _zeros(128)}, "prob must be torch.float32"),
        ({"counter": _zeros(2, dtype=torch.int32)}, r"counter must be torch.int32 \[1\]"),
    ],
)
def test_errors_name_the_argument(change, message):
    offsets = torch.tensor([0, 100, 120, 128], dtype=torch.int32, device="cuda")
    given = {"dy": _zeros(128, 128), "w2_LFD": _zeros(3, 128, 64).mT, "h_SH": _zeros(128, 128)}
    with pytest.raises(ValueError, match=message):
        fc2_dgrad_dact(**{**given, "offsets": offsets, **change}, act=SWIGLU)
