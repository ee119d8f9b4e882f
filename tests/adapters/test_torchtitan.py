"""The experts in torchtitan's layer, against its own, in its precision: bf16 on fp32 parameters."""

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("torchtitan")

import spmd_types as spmd
from torchtitan.config.override import OverrideConfig, apply_overrides, parse_cli_imports
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import (
    GroupedExperts,
    MoE,
    RoutedExperts,
    TokenChoiceTopKRouter,
)
from torchtitan.models.common.moe_sharding import (
    expert_param_placement_dense,
    expert_param_placement_sparse,
)
from torchtitan.models.common.token_dispatcher import (
    AllToAllTokenDispatcher,
    LocalTokenDispatcher,
)
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts
from torchtitan.protocols.sharding import ShardingConfig

from phalanx.adapters import torchtitan

E, D, F, K = 6, 64, 48, 2
INIT = {
    "w1_EFD": partial(nn.init.normal_, std=0.1),
    "w2_EDF": partial(nn.init.constant_, val=3.0),
    "w3_EFD": partial(nn.init.normal_, std=0.01),
}


def layer(*imports: str) -> Any:
    """Routed experts whose config went through torchtitan's overrides."""
    inner = GroupedExperts.Config(dim=D, hidden_dim=F, num_experts=E, param_init=dict(INIT))
    local = LocalTokenDispatcher.Config(num_experts=E, top_k=K)
    return overridden(inner, local, *imports).build()


def overridden(inner: Any, dispatcher: Any, *tokens: str) -> Any:
    """Config of the routed experts of a layer after the overrides of a command line."""
    gate = Linear.Config(in_features=D, out_features=E)
    moe = MoE.Config(
        num_experts=E,
        routed_experts=RoutedExperts.Config(inner_experts=inner, token_dispatcher=dispatcher),
        router=TokenChoiceTopKRouter.Config(num_experts=E, gate=gate),
    )
    apply_overrides(OverrideConfig(imports=parse_cli_imports(list(tokens))), moe)
    return moe.routed_experts


def run(
    module: Any, tokens: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, list[Tensor]]:
    """Output, and gradients of x and of the scores."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(1, tokens, D, generator=generator).to(dtype).requires_grad_()
    order = torch.rand(1, tokens, E - 1, generator=generator).argsort(-1)[..., :K]
    idx = order + (order > 0)  # expert 1 has no rows
    scores = torch.rand(1, tokens, K, generator=generator).requires_grad_()
    counts = torch.bincount(idx.flatten(), minlength=E)
    out = module(x, scores, idx, counts)
    out.square().sum().backward()
    return out, [x.grad, scores.grad]


def close(got: Tensor, want: Tensor) -> None:
    """Equal in bf16, whose rounding is 2^-9."""
    scale = want.abs().max().item()
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.01 * scale)


@pytest.mark.parametrize("name", ["experts", "routed_experts"])
def test_the_same_layer(name: str) -> None:
    ours, theirs = layer(f"phalanx.adapters.torchtitan.{name}"), layer()
    assert isinstance(ours.inner_experts, torchtitan.Experts)
    assert isinstance(ours, torchtitan.Routed) == (name == "routed_experts")
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0, 0.1)
    ours.load_state_dict(theirs.state_dict())
    for made in (ours, theirs):
        for tokens in (1, 37):
            made.zero_grad()
            out, grads = run(made, tokens)
            made.results = [out, *grads, *weight_gradients(made.inner_experts)]
    for got, want in zip(ours.results, theirs.results, strict=True):
        close(got, want)


def weight_gradients(module: Any) -> list[Tensor]:
    if isinstance(module, torchtitan.Experts):
        (gate, up), down = module.w13_E2FD.grad.unbind(1), module.w2_EDF.grad
        return [gate, down, up]
    return [module.w1_EFD.grad, module.w2_EDF.grad, module.w3_EFD.grad]


@pytest.mark.parametrize("name", ["experts", "routed_experts"])
@pytest.mark.parametrize("limit", [0.4, 50.0])
def test_the_same_layer_of_gpt_oss(limit: float, name: str) -> None:
    stock = GptOssGroupedExperts.Config(dim=D, hidden_dim=F, num_experts=E, swiglu_limit=limit)
    local = LocalTokenDispatcher.Config(num_experts=E, top_k=K)
    theirs = overridden(stock, local).build()
    ours = overridden(stock, local, f"phalanx.adapters.torchtitan.{name}").build()
    assert isinstance(ours.inner_experts, torchtitan.GptOssExperts)
    assert isinstance(ours, torchtitan.Routed) == (name == "routed_experts")
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0, 0.2)
    assert ours.load_state_dict(theirs.state_dict()).unexpected_keys == []
    results = []
    for made in (ours, theirs):
        out, grads = run(made, 37, torch.bfloat16)
        results.append([out, *grads, *(p.grad for p in made.inner_experts.parameters())])
    # A slope at the clamp is one or the other, by a rounding: gradients without clamped values.
    kept = 1 if limit < 1 else len(results[0])
    for got, want in zip(results[0][:kept], results[1][:kept], strict=True):
        assert (got - want).norm() < 0.02 * want.norm()


def test_checkpoints_and_initial_values_are_torchtitans() -> None:
    ours = layer("phalanx.adapters.torchtitan.experts")
    ours.inner_experts.init_states()
    state = ours.state_dict()
    assert {key: value.shape for key, value in state.items()} == {
        key: value.shape for key, value in layer().state_dict().items()
    }
    prefix = "inner_experts."
    assert (state[f"{prefix}w2_EDF"] == 3).all()
    assert state[f"{prefix}w1_EFD"].std() > 5 * state[f"{prefix}w3_EFD"].std()
    again = layer("phalanx.adapters.torchtitan.experts")
    assert again.load_state_dict(copy.deepcopy(state)).missing_keys == []
    assert torch.equal(again.inner_experts.w13_E2FD, ours.inner_experts.w13_E2FD)


@pytest.mark.parametrize(
    ("w1", "axis"),
    [
        (expert_param_placement_sparse(), 0),
        (expert_param_placement_dense(tp_placement=spmd.S(1)), 2),
    ],
)
def test_halves_are_sharded_as_the_gate_is(w1: Any, axis: int) -> None:
    layouts = {"w1_EFD": w1, "w2_EDF": w1, "w3_EFD": w1}
    config = GroupedExperts.Config(dim=D, hidden_dim=F, num_experts=E)
    config.sharding_config = ShardingConfig(state_shardings=layouts)
    made = torchtitan.experts(config).sharding_config.state_shardings
    assert made.keys() == {"w13_E2FD", "w2_EDF"}
    assert spmd.S(axis) in made["w13_E2FD"].axis_types.values()
    assert made["w13_E2FD"].axes() == w1.axes()


def test_other_experts_and_dispatchers_stay() -> None:
    class Other(GroupedExperts):
        @dataclass(kw_only=True, slots=True)
        class Config(GroupedExperts.Config):
            pass

    sizes = dict(dim=D, hidden_dim=F, num_experts=E)
    local = LocalTokenDispatcher.Config(num_experts=E, top_k=K)
    for name in ("experts", "routed_experts"):
        made = overridden(Other.Config(**sizes), local, f"phalanx.adapters.torchtitan.{name}")
        assert type(made.inner_experts) is Other.Config and type(made) is RoutedExperts.Config
    exchange = AllToAllTokenDispatcher.Config(num_experts=E, top_k=K)
    stock = GroupedExperts.Config(**sizes)
    made = overridden(stock, exchange, "phalanx.adapters.torchtitan.routed_experts")
    assert type(made) is RoutedExperts.Config
    assert type(made.inner_experts) is torchtitan.Experts.Config


def test_kernels_are_chosen_on_the_command_line() -> None:
    stock = GroupedExperts.Config(dim=D, hidden_dim=F, num_experts=E)
    local = LocalTokenDispatcher.Config(num_experts=E, top_k=K)
    for name in ("experts", "routed_experts"):
        token = f'phalanx.adapters.torchtitan.{name}={{"backend": "reference"}}'
        assert overridden(stock, local, token).inner_experts.backend == "reference"
