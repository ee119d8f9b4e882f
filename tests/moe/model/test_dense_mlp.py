"""The MLP of layers without experts: by the experts' kernels as by Megatron-Core's modules."""

import pytest
import torch

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.mlp_spec import Margins, MLPSpec
from phalanx.moe.model.kernel_facts import uses_expert_kernels
from tests.moe.cases import HIDDEN, install, model, transformer
from tests.support.distributed import run_distributed


def _parts(fused: bool) -> tuple[list[torch.Tensor], list[str]]:
    install()
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules

    from phalanx.moe.model.dense_mlp import DenseMLP
    from phalanx.parallel.groups import create

    config = transformer(model(), ffn_hidden_size=24)
    submodules = get_gpt_layer_local_submodules().mlp.keywords["submodules"]
    spec = MLPSpec(Activation("swiglu"), "torch", Margins(8, 8, 8), accumulate=True)
    pg = create().pg
    module = DenseMLP(config=config, submodules=submodules, spec=spec, pg_collection=pg)
    assert not module._fused
    module._fused = fused
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3)
    arrived = []
    for linear in (module.linear_fc1, module.linear_fc2):
        linear.register_forward_pre_hook(lambda m, _: arrived.append(m))
    x = torch.randn(5, 2, HIDDEN, requires_grad=True)
    out, bias = module(x)
    assert out.shape == x.shape and bias is None
    assert arrived == [module.linear_fc1, module.linear_fc2]  # weights are waited for
    out.backward(torch.randn(5, 2, HIDDEN))
    gradients = [p.grad for p in module.parameters()]
    return [out.detach(), x.grad, *gradients], [name for name, _ in module.named_parameters()]


@pytest.mark.dist
def test_equals_megatron() -> None:
    ((parts, names),) = run_distributed(_parts, 1, True)
    ((whole, others),) = run_distributed(_parts, 1, False)
    assert names == others == ["linear_fc1.weight", "linear_fc2.weight"]
    for got, want in zip(parts, whole, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_what_the_fused_kernels_take() -> None:
    fused, other = (MLPSpec(Activation("swiglu"), backend) for backend in ("fused", "torch"))
    assert uses_expert_kernels(fused, ffn=18432, tensor=1, bias=False)
    assert not uses_expert_kernels(other, ffn=18432, tensor=1, bias=False)
    assert not uses_expert_kernels(fused, ffn=18432, tensor=2, bias=False)
    assert not uses_expert_kernels(fused, ffn=18432, tensor=1, bias=True)
    assert not uses_expert_kernels(fused, ffn=100, tensor=1, bias=False)
