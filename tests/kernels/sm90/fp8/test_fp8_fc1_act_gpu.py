"""Kernel `fc1_act` in FP8 on a Hopper GPU: bit for bit that of bf16, quantised; error; ragged."""

import pytest
import torch

pytest.importorskip("cutlass")
if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.quantize.blocks import Quantized
from phalanx.kernels.sm90.gemm.mainloop import Mainloop
from tests.kernels.sm90.fp8.fp8_problems import EDGES, Fp8Fc1Problem
from tests.kernels.sm90.gemm.gemm_problems import (
    check_counter,
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
gathered = pytest.mark.parametrize("gather", [False, True], ids=["rows", "index"])


@gathered
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("F", [64, 320, 384])
def test_integers_are_those_of_bf16_quantised(F, act, gather):
    """h and a, its bytes and scales, bit for bit, for short last blocks as well."""
    p = Fp8Fc1Problem(EDGES["edges"], F, 192, ACTS[act], gather=gather, integers=True, bias=True)
    p.check_like_bf16(p.ours(), Mainloop(256))


@gathered
@pytest.mark.parametrize("counts", EDGES)
def test_ragged_experts(counts, gather):
    p = Fp8Fc1Problem(EDGES[counts], 320, 192, SWIGLU, gather=gather, integers=True)
    p.check_like_bf16(p.ours(), Mainloop(256))


@gathered
@pytest.mark.parametrize(("F", "D"), [(64, 64), (2880, 2880), (768, 2048), (2048, 7168)])
def test_error(F, D, gather):
    p = Fp8Fc1Problem(EDGES["ragged"], F, D, SWIGLU, gather=gather)
    p.check(p.ours())


@pytest.mark.parametrize("prob", [False, True])
def test_without_h(prob):
    p = Fp8Fc1Problem(EDGES["ragged"], 320, 192, SWIGLU, gather=True, prob=prob)
    whole, ours = p.ours(), p.ours(keep_h=False)
    assert "h" not in ours
    check_equal(ours, {name: whole[name] for name in ours})


@gathered
def test_bits_do_not_depend_on_who_computes(gather):
    check_schedules(Fp8Fc1Problem(EDGES["many"], 704, 320, SWIGLU, gather=gather))


def test_infinite_activations_poison_their_block():
    """A block with an infinity has no scale, its neighbours keep theirs."""
    p = Fp8Fc1Problem([64, 64], 320, 192, SWIGLU, padding=0)
    clean = p.ours()
    p.prob[70] = float("inf")
    ours = p.ours()
    assert ours["a_scale"][70].isnan().all()
    others = torch.arange(128, device="cuda") != 70
    check_equal({k: v[others] for k, v in ours.items()}, {k: v[others] for k, v in clean.items()})


def test_scales_of_any_strides():
    p = Fp8Fc1Problem(EDGES["ragged"], 320, 192, SWIGLU, gather=True)
    clean = p.ours()
    p.x = Quantized(p.x.data, p.x.scale.T.contiguous().T)
    p.w = Quantized(p.w.data, p.w.scale.mT.contiguous().mT)
    check_equal(p.ours(), clean)


def test_counter_is_left_at_zero():
    check_counter(Fp8Fc1Problem(EDGES["ragged"], 448, 128, SWIGLU, gather=True))


def test_host_never_waits():
    check_host_never_waits(Fp8Fc1Problem(EDGES["ragged"], 448, 320, SWIGLU, gather=True))


def test_a_graph_serves_every_routing():
    p = Fp8Fc1Problem([300, 200, 100, 400], 704, 320, SWIGLU, padding=0, gather=True)
    check_graph(p, own_counter=True)
