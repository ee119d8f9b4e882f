"""Shared experts in two parts against Megatron-Core's module."""

import pytest
import torch

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec
from tests.moe.cases import HIDDEN, install, model, transformer
from tests.support.distributed import run_distributed

SPEC = MLPSpec(Activation("swiglu"), "torch")


def _both(splits: bool, gate: bool, early: bool = True) -> tuple[list[torch.Tensor], list[str]]:
    install()
    config = transformer(model(moe={"shared_ffn": 12, "shared_gate": gate}))
    from phalanx.moe.shared_experts import SharedExperts
    from phalanx.parallel.groups import create

    torch.manual_seed(0)
    module = SharedExperts(config=config, pg_collection=create().pg, gate=gate, spec=SPEC)
    module._splits = splits
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3)
    x = torch.randn(5, 2, HIDDEN, requires_grad=True)
    first, second = module.halves(x)
    if early:
        first()
    out = second()
    assert out.shape == (10, HIDDEN)
    out.backward(torch.randn(10, HIDDEN))
    gradients = [p.grad for p in module.parameters()]
    return [out.detach(), x.grad, *gradients], list(module.state_dict())


@pytest.mark.dist
@pytest.mark.parametrize("gate", [False, True])
def test_halves_are_megatrons_whole(gate: bool) -> None:
    ((parts, names),) = run_distributed(_both, 1, True, gate)
    ((whole, others),) = run_distributed(_both, 1, False, gate)
    assert names == others and ("gate_weight" in names) == gate
    for got, want in zip(parts, whole, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.dist
def test_the_second_half_computes_a_first_that_was_not() -> None:
    ((early, _),) = run_distributed(_both, 1, True, True)
    ((late, _),) = run_distributed(_both, 1, True, True, False)
    assert all(map(torch.equal, late, early))
