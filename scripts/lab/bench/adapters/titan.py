"""Routed experts of torchtitan on a rank that has all of them, with its experts and with ours."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher
from torchtitan.overrides.fused_swiglu import fused_grouped_experts

from phalanx.adapters import torchtitan
from phalanx.scripts.lab.bench.adapters.compared import OURS, Comparison
from phalanx.scripts.lab.bench.timing import Bench


class Sizes(NamedTuple):
    """Sizes of a layer: tokens, model, hidden, experts, experts per token."""

    T: int
    D: int
    F: int
    E: int
    K: int


QWEN3 = Sizes(8192, 2048, 768, 128, 8)
TINY = Sizes(64, 64, 64, 16, 8)


def layer(bench: Bench, sizes: Sizes) -> Comparison:
    """One layer: ours with and without the routing, torchtitan's own and its fused experts."""
    T, D, F, E, K = sizes
    device = bench.clock.device
    torch.manual_seed(0)
    x = torch.randn(1, T, D, device=device, dtype=torch.bfloat16, requires_grad=True)
    scores, idx = torch.rand(1, T, E, device=device).topk(K)
    scores.requires_grad_()
    counts = torch.histc(idx.float(), bins=E, min=0, max=E - 1).to(torch.int64)
    stock = GroupedExperts.Config(dim=D, hidden_dim=F, num_experts=E)
    routed = RoutedExperts.Config(
        inner_experts=stock, token_dispatcher=LocalTokenDispatcher.Config(num_experts=E, top_k=K)
    )
    compared = Comparison(bench, "torchtitan", T)
    state: dict[str, Any] | None = None
    for side, config in (
        (OURS, torchtitan.routed_experts(routed)),
        (f"{OURS}, experts alone", _with(routed, torchtitan.experts(stock))),
        ("torchtitan", routed),
        ("torchtitan, fused", _with(routed, fused_grouped_experts(stock))),
    ):
        with torch.device(device):
            module = config.build().bfloat16()
        if state is None:
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.normal_(0, 0.02)
            state = module.state_dict()
        module.load_state_dict(dict(state))
        compared.add(
            side,
            partial(module, x, scores, idx, counts),
            [x, scores, *module.parameters()],
        )
    return compared


def _with(routed: RoutedExperts.Config, inner: GroupedExperts.Config) -> RoutedExperts.Config:
    return RoutedExperts.Config(inner_experts=inner, token_dispatcher=routed.token_dispatcher)
