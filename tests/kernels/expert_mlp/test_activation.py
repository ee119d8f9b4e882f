"""Activations against their papers' formulas, and the hand-written derivatives against autograd."""

import dataclasses

import pytest
import torch

from phalanx.configs.bounds import choices
from phalanx.configs.docs import field_docs
from phalanx.configs.tables import activations as table
from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.calls import Fc1Call, Fc2DgradCall, Linear, Operand
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.reference import Reference, activation
from phalanx.kernels.expert_mlp.torch_grouped import Grouped
from phalanx.kernels.registry import Facts, KernelUnavailable, resolve
from tests.kernels.problems import ACTIVATIONS, formula


@pytest.mark.parametrize("act", ACTIVATIONS, ids=str)
def test_definition(act):
    h = torch.randn(64, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
    torch.testing.assert_close(activation(h, act), formula(h, act), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("act", ACTIVATIONS, ids=str)
def test_derivative_up_to_the_edges(act):
    """Each h alone, through identity weights: large values, zeros and the clamp's own corners."""
    edges = torch.tensor([-80.0, -6.0, -0.625, -1e-4, 0.0, 1e-4, 0.3, 0.625, 0.7, 6.0, 80.0])
    gate, up = torch.meshgrid(edges, edges, indexing="ij")
    h = torch.stack([gate.flatten(), up.flatten()], 1)
    h = h.repeat_interleave(4, 1) if act.gated else h[:, :1].repeat(1, 4)  # [gate x 4, up x 4]
    S, width = len(h), act.width(4)
    index, prob = torch.arange(S).int(), torch.full((S,), 0.75)
    plan = ExpertPlan(index, prob, torch.tensor([0, S]).int(), index[:, None])
    fc1, fc2 = Linear(torch.eye(width)[None]), Linear(torch.eye(4)[None])
    dy = Operand(torch.ones(S, 4))
    for ops in (Grouped(), Reference()):
        saved, _ = ops.fc1_act(Fc1Call(h, fc1, plan, act))
        dh, a, dprob, *_ = ops.fc2_dgrad_dact(Fc2DgradCall(dy, fc2, saved, plan, act))
        exact = h.double().requires_grad_()
        value = formula(exact, act) if act.limit == 0 else activation(exact, act)
        (slope,) = torch.autograd.grad(value.sum(), exact)
        torch.testing.assert_close(dh.double(), slope * 0.75, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(a.double(), value.detach() * 0.75, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(dprob.double(), value.detach().sum(1), rtol=1e-5, atol=1e-5)


def test_every_kind_is_tested_and_can_be_chosen():
    kinds = set(table.ACTIVATIONS)
    assert kinds == {act.kind for act in ACTIVATIONS} == set(choices()["model.moe.activation"])
    assert {act.kind for act in ACTIVATIONS if act.limit} == kinds
    assert all(f"`{kind}`:" in field_docs()["model.moe.activation"] for kind in kinds)


def test_an_entry_without_a_function_on_registers_is_refused_by_the_fused_kernels(monkeypatch):
    facts = dataclasses.replace(table.ACTIVATIONS["swiglu"], cute="")
    monkeypatch.setitem(table.ACTIVATIONS, "plain", facts)
    hopper = Facts("cuda", (9, 0), torch.bfloat16, packages=frozenset({"nvidia_cutlass_dsl"}))
    assert resolve("grouped_mlp", "fused", hopper).backend == "fused"
    with pytest.raises(KernelUnavailable, match="has no epilogue of plain; use kernels."):
        resolve("grouped_mlp", "fused", dataclasses.replace(hopper, activation="plain"))


def test_no_kernel_is_traced_without_a_function_on_registers(monkeypatch):
    pytest.importorskip("cutlass")
    from phalanx.kernels.sm90.gemm.activate import forward

    facts = dataclasses.replace(table.ACTIVATIONS["swiglu"], cute="")
    monkeypatch.setitem(table.ACTIVATIONS, "plain", facts)
    with pytest.raises(ValueError, match="'plain' has no `cute` function"):
        forward(Activation("plain"), 1.0, 1.0)


def test_width_and_gate():
    assert Activation("swiglu").width(24) == 48
    assert Activation("squared_relu").width(24) == 24
    assert not Activation("squared_relu").gated


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gelu",), "unknown activation 'gelu': use one of"),
        (("swiglu", 1.0, -1.0), "clamped to limit=-1.0: use"),
        (("swiglu", 1.0, float("nan")), "clamped to limit=nan: use"),
    ],
)
def test_bad_constants(arguments, message):
    with pytest.raises(ValueError, match=message):
        Activation(*arguments)
