"""Kernel `fc2_dgrad_dact` in FP8 on a Hopper GPU: that of bf16, quantised; error; ragged."""

import pytest
import torch

pytest.importorskip("cutlass")
if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.launch_options import LaunchOptions
from phalanx.kernels.sm90.gemm.mainloop import Mainloop
from tests.kernels.sm90.fp8.fp8_problems import EDGES, Fp8DgradProblem
from tests.kernels.sm90.gemm.gemm_problems import (
    check_equal,
    check_graph,
    check_host_never_waits,
    check_schedules,
)

pytestmark = pytest.mark.gpu

SWIGLU = Activation("swiglu")
ACTS = {
    "swiglu": SWIGLU,
    "gpt_oss": Activation("quick_geglu", limit=7.0, offset=1.0),
    "geglu": Activation("geglu"),
    "squared_relu": Activation("squared_relu"),
}
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LOOP = Mainloop(128, b_transposed=True)
gathered = pytest.mark.parametrize("gather", [False, True], ids=["rows", "index"])


@gathered
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("F", [64, 320, 384])
def test_integers_are_those_of_bf16_quantised(F, act, name, gather):
    """dh and a, bytes and scales, bit for bit, for short last blocks of either half as well."""
    given = dict(gather=gather, integers=True, dtype=FORMATS[name])
    p = Fp8DgradProblem(EDGES["edges"], F, 192, ACTS[act], **given)
    p.check_like_bf16(p.ours(), LOOP)


@gathered
@pytest.mark.parametrize("counts", EDGES)
def test_ragged_experts(counts, gather):
    p = Fp8DgradProblem(EDGES[counts], 320, 192, SWIGLU, gather=gather, integers=True)
    p.check_like_bf16(p.ours(), LOOP)


@gathered
@pytest.mark.parametrize(("name", "error"), [("e4m3", 0.04), ("e5m2", 0.08)])
@pytest.mark.parametrize(("F", "D"), [(64, 64), (2880, 2880), (768, 2048), (2048, 7168)])
def test_error(F, D, name, error, gather):
    given = dict(gather=gather, dtype=FORMATS[name])
    p = Fp8DgradProblem(EDGES["ragged"], F, D, SWIGLU, **given)
    p.check(p.ours(), error=error)


def test_without_probabilities():
    p = Fp8DgradProblem(EDGES["ragged"], 320, 192, SWIGLU, prob=False, integers=True)
    p.check_like_bf16(p.ours(), LOOP)


@gathered
def test_bits_do_not_depend_on_who_computes(gather):
    check_schedules(Fp8DgradProblem(EDGES["many"], 704, 320, SWIGLU, gather=gather))


def test_a_poisoned_row_reaches_no_other():
    p = Fp8DgradProblem([100, 100], 320, 192, SWIGLU, padding=0)
    clean = p.ours()
    p.dy.scale[150] = float("nan")
    ours = p.ours()
    others = torch.arange(200, device="cuda") != 150
    check_equal({k: v[others] for k, v in ours.items()}, {k: v[others] for k, v in clean.items()})
    assert ((ours["dh"][150] & 0x7F) == 0x7F).all() and ours["parts"][150].sum().isnan()


def test_counter_is_left_at_zero():
    counter = torch.zeros(1, dtype=torch.int32, device="cuda")
    p = Fp8DgradProblem(EDGES["ragged"], 320, 192, SWIGLU, gather=True)
    first = p.ours()
    for margin in (0, 100, 131):
        check_equal(p.ours(counter=counter, options=LaunchOptions(margin)), first)
        assert counter.item() == 0


def test_host_never_waits():
    check_host_never_waits(Fp8DgradProblem(EDGES["ragged"], 448, 320, SWIGLU, gather=True))


def test_a_graph_serves_every_routing():
    p = Fp8DgradProblem([300, 200, 100, 400], 704, 320, SWIGLU, padding=0, gather=True)
    check_graph(p, own_counter=True)
