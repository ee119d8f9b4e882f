"""The adapter over cuDNN's grouped GEMMs, as the fake computes them, against exact statements."""

from dataclasses import replace
from unittest import mock

import pytest
import torch

from phalanx.extras.blackwell.backend import CuDNN
from phalanx.extras.blackwell.interleave import Interleaved
from phalanx.extras.blackwell.operands import ends, gathered, real
from phalanx.kernels.expert_mlp import main_grad
from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.calls import Operand
from phalanx.kernels.expert_mlp.expert_plan import PlanSize
from phalanx.kernels.expert_mlp.mlp_spec import Margins
from phalanx.kernels.functional import choice
from phalanx.kernels.functional.module import GroupedMLP
from phalanx.kernels.launch_options import DEFAULT
from tests.extras.blackwell.problems import padded
from tests.kernels.problems import (
    composition,
    dense,
    error,
    forward,
    gradients,
    leaves_of,
    run,
)
from tests.support.fake_cudnn.training import experts_on_cpu
from tests.support.sync_free import sync_free

SWIGLU = Activation("swiglu")
GPT_OSS = Activation("quick_geglu", alpha=1.702, limit=7.0, offset=1.0)
ROUTINGS = {
    "an expert without rows": [[0, 2], [2, 0], [0, -1]],
    "one expert has all": [[1, -1]] * 30,
    "more than one block": [[2, 0]] * 300,
    "nothing here": [[-1, -1]] * 5,
}


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("act", [SWIGLU, GPT_OSS], ids=["swiglu", "gpt-oss"])
def test_error_is_that_of_plain_torch(fake, act, bias):
    p = padded(act, bias=bias, room=512)
    exact, ours = dense(p), run(p, "cudnn")
    plain = composition_of(p)
    assert ours.keys() == exact.keys()
    for name in exact:
        assert error(ours[name], exact[name]) <= 2 * error(plain[name], exact[name]), name
    assert fake.CALLS["grouped_gemm_glu_wrapper_sm100"] == 1
    assert fake.CALLS["grouped_gemm_dglu_wrapper_sm100"] == 1
    assert fake.CALLS["grouped_gemm_wrapper_sm100"] == 2
    assert fake.CALLS["grouped_gemm_wgrad_wrapper_sm100"] == 2


def composition_of(p):
    """torch's statement without index -1, with which it would read the last row of x."""
    return composition(replace(p, index=p.index.clamp(min=0)))


@pytest.mark.parametrize("choice", ROUTINGS.values(), ids=ROUTINGS)
def test_any_routing(fake, choice):
    p = padded(GPT_OSS, choice=choice)
    exact, ours, plain = dense(p), run(p, "cudnn"), composition_of(p)
    for name in exact:
        assert torch.isfinite(ours[name]).all(), name
        assert error(ours[name], exact[name]) <= 2 * error(plain[name], exact[name]), name


def test_rows_of_no_token_are_zeros(fake):
    """A NaN in the first token reaches the experts that read it, and no others."""
    p = padded(SWIGLU, choice=[[0], [1], [2]])
    p.x[0] = torch.nan
    made = run(p, "cudnn")
    assert made["dw1"][0].isnan().any()
    for name in ("dw1", "dw2", "db1", "db2"):
        assert torch.isfinite(made[name][1:]).all(), name
    assert torch.isfinite(made["out"][1:]).all()
    assert (made["dprob"][p.index < 0] == 0).all()


def test_stored_in_the_order_of_the_kernels(fake):
    """w1, b1 and their gradients lie in memory as the kernels want them: the same values."""
    p, order = padded(SWIGLU), Interleaved()
    wanted = run(p, "cudnn")
    leaves = leaves_of(p)
    for name in ("w1", "b1"):
        leaves[name] = order.store(leaves[name].detach(), 1).requires_grad_()
    got = gradients(forward(p, leaves, "cudnn", channel_order=order), p.dout, leaves)
    for name in ("dw1", "db1"):
        got[name] = order.canonical(got[name], 1)
    for name in wanted:
        assert torch.equal(got[name], wanted[name]), name


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_added_to_main_grad(fake, dtype, interleaved):
    p, order = padded(SWIGLU), Interleaved()
    leaves = leaves_of(p)
    if interleaved:
        for name in ("w1", "b1"):
            leaves[name] = order.store(leaves[name].detach(), 1).requires_grad_()
    kept = order if interleaved else None
    fresh = gradients(forward(p, leaves, "cudnn", channel_order=kept), p.dout, leaves)
    parameters = {name: leaves[name] for name in ("w1", "w2", "b1", "b2")}
    for q in parameters.values():
        q.main_grad = torch.ones_like(q, dtype=dtype)
        q.grad_added_to_main_grad = False
    main_grad.replace_next([leaves["w2"]])
    out = forward(p, leaves, "cudnn", accumulate=True, channel_order=kept)
    out.backward(p.dout)
    for name, q in parameters.items():
        assert q.grad_added_to_main_grad
        wanted = fresh[f"d{name}"].float() + (name != "w2")
        assert error(q.main_grad, wanted) < 1e-2, name


def test_margins_are_of_each_pass(fake, monkeypatch):
    monkeypatch.setenv("CUDNNFE_CLUSTER_OVERLAP_MARGIN", "1")
    p = padded(SWIGLU)
    leaves = leaves_of(p)
    out = forward(p, leaves, "cudnn", margins=Margins(forward=7, dgrad=20, wgrad=8))
    out.backward(p.dout)
    calls = fake.CALLS
    assert calls["grouped_gemm_glu_wrapper_sm100", "4"] == 1  # clusters of two SMs
    assert calls["grouped_gemm_dglu_wrapper_sm100", "10"] == 1
    assert calls["grouped_gemm_wrapper_sm100", "4"] == 1
    assert calls["grouped_gemm_wrapper_sm100", "10"] == 1
    assert calls["grouped_gemm_wgrad_wrapper_sm100", "0"] == 2


def test_an_activation_without_an_epilogue_is_refused(fake):
    with pytest.raises(ValueError, match="kernels=cudnn has in bf16 epilogues of swiglu without"):
        run(padded(Activation("swiglu", limit=2.0)), "cudnn")


def test_nothing_is_read_on_the_host():
    """The adapter itself never reads the host; only the fake's loops over experts do."""
    ops = CuDNN(DEFAULT, True)
    idx, prob = torch.randint(0, 4, (50, 2)).int(), torch.rand(50, 2)
    x = torch.randn(50, 8)
    with sync_free():
        plan = ops.plan(idx, prob, PlanSize(0, 4, 1024))
        rows = gathered(Operand(x, gather=True), plan)
        ops.combine(rows, plan.inverse_NK)
        ops.plan_backward(real(plan.row_prob_S, plan), plan.inverse_NK)
        assert ends(plan).data_ptr() == plan.offsets[1:].data_ptr()


def test_the_module_for_any_model():
    """Its weights are canonical in memory too; rows are those of whole blocks."""
    torch.manual_seed(0)
    ours = GroupedMLP(4, 64, 64, 2, bias=True, dtype=torch.bfloat16)
    plain = GroupedMLP(4, 64, 64, 2, bias=True, dtype=torch.bfloat16, backend="reference")
    plain.load_state_dict(ours.state_dict())
    x, dout = torch.randn(2, 10, 64).bfloat16(), torch.randn(2, 10, 64).bfloat16()
    prob, idx = torch.rand(20, 4).softmax(-1).view(2, 10, 4).topk(2)
    made, backends, specification = [], [], choice.specification

    def chosen(*args):
        found = specification(*args)
        backends.append(found.backend)
        return found

    for module in (ours, plain):
        given = x.clone().requires_grad_()
        choice._chosen.cache_clear()  # choices of this process are those of a CPU
        specification.cache_clear()
        with experts_on_cpu(), mock.patch.object(choice, "specification", chosen):
            out = module(given, idx, prob)
            out.backward(dout)
        made.append([out, given.grad, *(p.grad for p in module.parameters())])
    choice._chosen.cache_clear()
    specification.cache_clear()
    assert backends == ["cudnn", "reference"]
    for got, wanted in zip(*made, strict=True):
        assert error(got, wanted) < 1e-2
