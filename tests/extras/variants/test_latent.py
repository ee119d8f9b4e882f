"""Latent experts against a loop over tokens and experts in fp64, on one rank and on two."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.moe.cases import EXPERTS, FFN, HIDDEN, draw, install, model, options, transformer
from tests.moe.test_layer import Result, close, fill_global, tokens, upstream, whole
from tests.support.distributed import run_distributed

pytestmark = pytest.mark.dist

LATENT, SHARED = 8, 12
MOE: dict[str, Any] = {"shared_ffn": SHARED, "top_k": 3}


def build(pg: Any, *, expert: int, backend: str) -> Any:
    from phalanx.extras.variants.latent import LatentMoE

    m = model(moe=MOE, variants=[f"latent:{LATENT}"])
    config = transformer(m, expert=expert)
    assert config.moe_latent_size == LATENT
    return LatentMoE(config, pg, options=options(m, pg, backend))


def _run(backend: str, adds: bool | None) -> tuple[Result, dict[str, Tensor]]:
    install()
    from phalanx.parallel.groups import create

    ranks, rank = dist.get_world_size(), dist.get_rank()
    pg = create(expert=ranks).pg
    layer = build(pg, expert=ranks, backend=backend)
    fill_global(layer, rank, ranks)
    if adds is not None:
        layer._combine_in_experts = adds  # as with the fused experts
    x = tokens().chunk(ranks, 1)[rank].contiguous().requires_grad_()
    residual = tokens().chunk(ranks, 1)[rank] / 2
    out, bias = layer(x, residual=residual)
    assert bias is None
    out.backward(upstream().chunk(ranks, 1)[rank])
    weights = {}
    for key, p in layer.named_parameters():
        grads = [torch.empty_like(p) for _ in range(ranks)]
        dist.all_gather(grads, p.grad)
        weights[key] = torch.cat(grads) if key.startswith("experts.") else sum(grads)
    counts = layer.router.statistics.tokens_per_expert
    dist.all_reduce(counts)
    values = {k: v.detach() for k, v in layer.named_parameters()}
    return Result(out.detach(), x.grad, weights, counts.tolist()), values


def expected(values: dict[str, Tensor]) -> Result:
    p = {k: v.double().requires_grad_() for k, v in values.items()}
    x = tokens().double().requires_grad_()
    residual_TD = tokens().double().flatten(0, 1) / 2
    counts, rows = [0] * EXPERTS, []
    for t, x_D in enumerate(x.flatten(0, 1)):
        scores_E = (p["router.weight"] @ x_D).softmax(-1)
        chosen = scores_E.topk(MOE["top_k"]).indices.tolist()
        latent_L = p["latent_in_proj.weight"] @ x_D
        total_L = torch.zeros(LATENT, dtype=torch.float64)
        for e in chosen:
            h = p["experts.w1"][e] @ latent_L
            y_L = p["experts.w2"][e] @ (F.silu(h[:FFN]) * h[FFN:])
            total_L = total_L + scores_E[e] / scores_E[chosen].sum() * y_L
            counts[e] += 1
        h = p["shared_experts.linear_fc1.weight"] @ x_D
        shared_D = p["shared_experts.linear_fc2.weight"] @ (F.silu(h[:SHARED]) * h[SHARED:])
        rows.append(p["latent_out_proj.weight"] @ total_L + shared_D + residual_TD[t])
    out = torch.stack(rows).view_as(x)
    out.backward(upstream().double())
    grads = {k: v.grad.float() for k, v in p.items()}  # type: ignore[union-attr]
    return Result(out.detach().float(), x.grad.float(), grads, counts)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("backend", "adds"), [("reference", None), ("torch", True), ("torch", False)]
)
def test_a_layer_is_its_statement(backend: str, adds: bool | None) -> None:
    ((result, values),) = run_distributed(_run, 1, backend, adds)
    assert values["experts.w1"].shape == (EXPERTS, 2 * FFN, LATENT)
    assert values["experts.w2"].shape == (EXPERTS, LATENT, FFN)
    assert values["router.weight"].shape == (EXPERTS, HIDDEN)
    close(result, expected(values))


def test_experts_of_two_ranks_are_those_of_one() -> None:
    both = run_distributed(_run, 2, "torch", None)
    ((_, values),) = run_distributed(_run, 1, "torch", None)
    close(whole([result for result, _ in both]), expected(values))


def _rows_sent() -> int:
    """Channels of what the transport is given."""
    install()
    from phalanx.parallel.groups import create

    layer, widths = build(create(expert=2).pg, expert=2, backend="torch"), []
    send = layer.dispatcher.send_tokens
    layer.dispatcher.send_tokens = lambda x, *a: (widths.append(x.shape[1]), send(x, *a))[1]
    fill_global(layer, dist.get_rank(), 2)
    layer(draw(2, 2, HIDDEN, seed=1))
    (channels,) = widths
    return int(channels)


def test_ranks_exchange_latent_channels() -> None:
    assert run_distributed(_rows_sent, 2) == [LATENT, LATENT]
