"""Activations against their papers' formulas, and the hand-written derivatives against autograd."""

import pytest
import torch

from phalanx.configs.bounds import CHOICES
from phalanx.configs.docs import field_docs
from phalanx.configs.schema import MoEConfig
from phalanx.kernels.expert_mlp import activation as table
from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.backend import Linear, Operand
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.reference import Reference, activation, activation_backward
from phalanx.kernels.expert_mlp.torch_grouped import Grouped, _activate
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
        saved, _ = ops.fc1_act(h, fc1, plan, act)
        dh, a, dprob, _ = ops.fc2_dgrad_dact(dy, fc2, saved, plan, act)
        exact = h.double().requires_grad_()
        value = formula(exact, act) if act.limit == 0 else activation(exact, act)
        (slope,) = torch.autograd.grad(value.sum(), exact)
        torch.testing.assert_close(dh.double(), slope * 0.75, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(a.double(), value.detach() * 0.75, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(dprob.double(), value.detach().sum(1), rtol=1e-5, atol=1e-5)


def test_every_kind_is_tested_and_can_be_chosen():
    kinds = set(table.KINDS)
    assert kinds == {act.kind for act in ACTIVATIONS} == set(CHOICES["model.moe.activation"])
    assert {act.kind for act in ACTIVATIONS if act.limit} == kinds
    assert all(f"`{kind}`" in field_docs()["model.moe.activation"] for kind in kinds)
    assert all(f"`{kind}`:" in Activation.__doc__ for kind in kinds)
    assert {act.kind for act in ACTIVATIONS if act.gated} == set(table.GATED)


@pytest.fixture
def nameless(monkeypatch):
    """A kind that has a name and no formula."""
    for name in ("KINDS", "GATED"):
        monkeypatch.setattr(table, name, (*getattr(table, name), "nameless"))
    return Activation("nameless")


def in_sm90(act, h):
    pytest.importorskip("cutlass")
    from phalanx.kernels.sm90.gemm.activate import forward

    return forward(act, 1.0, 1.0)


def in_model(act, h):
    from phalanx.moe.model.gpt import _activation

    return _activation(MoEConfig(activation=act.kind))


FORMULAS = {
    "kernels/expert_mlp/reference.py": activation,
    "kernels/expert_mlp/reference.py, backward": lambda act, h: activation_backward(
        h[:, :2], h, act
    ),
    "kernels/expert_mlp/torch_grouped.py": lambda act, h: _activate(h, act),
    "sm90/gemm/activate.py": in_sm90,
    "moe/model/gpt.py": in_model,
    "tests/kernels/problems.py": lambda act, h: formula(h, act),
}


@pytest.mark.parametrize("file", FORMULAS)
def test_a_kind_without_a_formula_is_no_other_kind(nameless, file):
    h = torch.ones(2, 4)
    call = FORMULAS[file]
    with pytest.raises(ValueError) as error:
        call(h, nameless) if call is activation else call(nameless, h)
    named = file.partition(",")[0]
    assert str(error.value) == f"{named} has no formula for activation 'nameless': add it there"


def test_width_and_gate():
    assert Activation("swiglu").width(24) == 48
    assert Activation("squared_relu").width(24) == 24
    assert not Activation("squared_relu").gated


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gelu",), "unknown activation 'gelu': set model.moe.activation to one of"),
        (("swiglu", 1.0, -1.0), "model.moe.activation_limit"),
        (("swiglu", 1.0, float("nan")), "model.moe.activation_limit"),
    ],
)
def test_bad_constants(arguments, message):
    with pytest.raises(ValueError, match=message):
        Activation(*arguments)
