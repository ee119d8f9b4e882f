"""The MoE layer against a loop over tokens and experts, on any expert-parallel size and backend."""

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.moe.cases import (
    DEEPSEEK,
    EXPERTS,
    FFN,
    GPT_OSS,
    HIDDEN,
    draw,
    fill,
    install,
    model,
    options,
    recomputing,
    transformer,
    with_loss,
)
from tests.support.distributed import run_distributed
from tests.support.scheduling import matrix
from tests.support.sync_free import sync_free

SEQUENCE, BATCH = 8, 4

SQUARED = dict(router={"normalize": False}, moe={"activation": "squared_relu", "top_k": 3})
MODELS = {"plain": dict(router={}), "deepseek": DEEPSEEK, "squared_relu": SQUARED}
MODELS |= {"gpt_oss": with_loss(GPT_OSS, z_loss=0.01)}


class Result(NamedTuple):
    """Output and gradients of the whole model: all tokens, all experts."""

    out: Tensor
    dx: Tensor
    weights: dict[str, Tensor]
    counts: list[int]


def build(name: str, pg: Any, *, backend: str = "torch", expert: int = 1, **changes: Any) -> Any:
    from phalanx.moe.layer import MoE

    m = model(**MODELS[name])
    config = transformer(m, expert=expert, **changes)
    layer = MoE(config, pg, options=options(m, pg, backend))
    layer.set_layer_number(1)
    if layer.router.expert_bias is not None:
        layer.router.expert_bias.copy_(draw(EXPERTS, seed=9, scale=0.3))
    return layer


@torch.no_grad()
def fill_global(layer: Any, rank: int, ranks: int) -> None:
    """The same model on every expert-parallel size."""
    for seed, (name, p) in enumerate(sorted(layer.named_parameters())):
        split = name.startswith("experts.")
        whole = draw(*((EXPERTS, *p.shape[1:]) if split else p.shape), seed=seed, scale=0.4)
        p.copy_(whole.chunk(ranks)[rank] if split else whole)


def tokens() -> Tensor:
    return draw(SEQUENCE, BATCH, HIDDEN, seed=70)


def upstream() -> Tensor:
    return draw(SEQUENCE, BATCH, HIDDEN, seed=71)


def _run(name: str, backend: str, recompute: str = "none") -> Result:
    install()
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    from phalanx.parallel.groups import create

    ranks, rank = dist.get_world_size(), dist.get_rank()
    pg = create(expert=ranks).pg
    layer = build(name, pg, backend=backend, expert=ranks)
    fill_global(layer, rank, ranks)
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor([1 / ranks]))  # replicas are averaged
    x = tokens().chunk(ranks, 1)[rank].contiguous().requires_grad_()
    with recomputing(recompute) as memory:
        out, bias = layer(x, memory=memory)
    assert bias is None
    out.backward(upstream().chunk(ranks, 1)[rank])
    weights = {}
    for key, p in layer.named_parameters():
        grads = [torch.empty_like(p) for _ in range(ranks)]
        dist.all_gather(grads, p.grad)
        weights[key] = torch.cat(grads) if key.startswith("experts.") else sum(grads)
    counts = layer.router.statistics.tokens_per_expert
    dist.all_reduce(counts)
    return Result(out.detach(), x.grad, weights, counts.tolist())


def whole(results: list[Result]) -> Result:
    out, dx = (torch.cat([getattr(r, part) for r in results], 1) for part in ("out", "dx"))
    return results[0]._replace(out=out, dx=dx)


def close(got: Result, expected: Result, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    torch.testing.assert_close(got.out, expected.out, rtol=rtol, atol=atol)
    torch.testing.assert_close(got.dx, expected.dx, rtol=rtol, atol=atol)
    assert got.weights.keys() == expected.weights.keys()
    for key, value in expected.weights.items():
        torch.testing.assert_close(
            got.weights[key], value, rtol=rtol, atol=atol, msg=lambda m, k=key: f"{k}: {m}"
        )
    assert got.counts == expected.counts


# --- one rank against a dense statement -----------------------------------------------------------


def expert(x_D: Tensor, w1: Tensor, w2: Tensor, b1: Any, b2: Any, e: Any) -> Tensor:
    h = w1 @ x_D + (0 if b1 is None else b1)
    if e.activation == "squared_relu":
        a = F.relu(h) ** 2
    else:
        gate, up = h[:FFN], h[FFN:]
        if e.activation_limit:
            gate = gate.clamp(max=e.activation_limit)
            up = up.clamp(-e.activation_limit, e.activation_limit)
        assert e.activation in ("swiglu", "quick_geglu")
        slope = e.activation_alpha if e.activation == "quick_geglu" else 1.0
        a = gate * torch.sigmoid(slope * gate) * (up + e.activation_offset)
    return w2 @ a + (0 if b2 is None else b2)


def _statement(name: str) -> None:
    """fp64, token by token; experts are as the router chose, which has a statement of its own."""
    install()
    from phalanx.kernels.routing.balance import balance_loss, count_choices_per_sequence
    from phalanx.moe.router.router import choose, loss_scores, probabilities
    from phalanx.parallel.groups import create

    layer = build(name, create().pg)
    fill_global(layer, 0, 1)
    m = model(**MODELS[name])
    o, e = m.moe.router, m.moe
    idx_TK, _ = layer.router(tokens())
    p = {k: v.detach().double().requires_grad_() for k, v in layer.named_parameters()}
    x = tokens().double().requires_grad_()
    x_TD = x.flatten(0, 1)
    logits = x_TD @ p["router.weight"].T + p.get("router.bias", 0)
    prob_TK = probabilities(logits, idx_TK.long(), o)
    rows = []
    for t, row in enumerate(idx_TK.tolist()):
        total = torch.zeros(HIDDEN, dtype=torch.float64)
        for k, i in enumerate(row):
            biases = [p[f"experts.{b}"][i] if f"experts.{b}" in p else None for b in ("b1", "b2")]
            y = expert(x_TD[t], p["experts.w1"][i], p["experts.w2"][i], *biases, e)
            total = total + prob_TK[t, k] * y
        if e.shared_ffn:
            h = p["shared_experts.linear_fc1.weight"] @ x_TD[t]
            a = F.silu(h[: e.shared_ffn]) * h[e.shared_ffn :]
            total = total + p["shared_experts.linear_fc2.weight"] @ a
        rows.append(total)
    out = torch.stack(rows).view_as(x)
    loss = (out * upstream().double()).sum()
    if o.seq_aux_loss:
        count_BE = count_choices_per_sequence(choose(logits.detach(), e.top_k), EXPERTS, BATCH)
        scores_TE = loss_scores(logits, o.score)
        loss = loss + o.seq_aux_loss * balance_loss(scores_TE, count_BE, ranks=1)
    loss = loss + o.z_loss * logits.logsumexp(-1).square().mean()
    loss.backward()
    expected = Result(
        out.detach().float(),
        x.grad.float(),
        {k: v.grad.float() for k, v in p.items()},
        torch.bincount(idx_TK.flatten(), minlength=EXPERTS).tolist(),
    )
    for backend in ("reference", "torch"):
        close(_run(name, backend), expected)


@pytest.mark.parametrize("name", MODELS)
def test_layer_is_the_weighted_sum_of_its_experts(name: str) -> None:
    run_distributed(_statement, 1, name)


def _bf16(name: str) -> None:
    install()
    from phalanx.parallel.groups import create

    pg = create().pg
    layer = build(name, pg, dtype=torch.bfloat16)
    fill_global(layer, 0, 1)
    wide = build(name, pg)
    wide.load_state_dict(layer.state_dict())
    x = tokens().bfloat16().requires_grad_()
    out, _ = layer(x)
    out.backward(upstream().bfloat16())
    x32 = x.detach().float().requires_grad_()
    expected, _ = wide(x32)
    expected.backward(upstream())
    assert out.dtype == x.grad.dtype == layer.experts.w1.grad.dtype == torch.bfloat16
    assert layer.router.statistics.tokens_per_expert.equal(wide.router.statistics.tokens_per_expert)
    pairs = [(out, expected), (x.grad, x32.grad), (layer.experts.w1.grad, wide.experts.w1.grad)]
    for got, want in pairs:
        assert (got.float() - want).norm() < 0.02 * want.norm()


@pytest.mark.parametrize("name", ["deepseek", "gpt_oss"])
def test_bf16_chooses_alike_and_stays_close(name: str) -> None:
    run_distributed(_bf16, 1, name)


# --- any layout, recomputation --------------------------------------------------------------------


@pytest.mark.dist
@pytest.mark.parametrize("name", MODELS)
@matrix(("ranks", "backend"), (2, "reference"), (4, "torch"))
def test_expert_parallel_sizes_agree(ranks: int, name: str, backend: str) -> None:
    one = whole(run_distributed(_run, 1, name, backend))
    many = whole(run_distributed(_run, ranks, name, backend))
    close(many, one)


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["deepseek", "gpt_oss"])
def test_recomputation_changes_nothing(name: str, ranks: int) -> None:
    kept, recomputed = (
        whole(run_distributed(_run, ranks, name, "torch", mode)) for mode in ("none", "moe")
    )
    close(recomputed, kept, rtol=0, atol=0)


# --- the layer inside Megatron-Core ---------------------------------------------------------------


def _sync_free(name: str, recompute: str) -> None:
    install()
    from phalanx.parallel.groups import create

    ranks, rank = dist.get_world_size(), dist.get_rank()
    layer = build(name, create(expert=ranks).pg, expert=ranks)
    fill_global(layer, rank, ranks)
    x = tokens().chunk(ranks, 1)[rank].contiguous().requires_grad_()
    with sync_free():
        with recomputing(recompute) as memory:
            out, _ = layer(x, memory=memory)
        out.square().sum().backward()


@pytest.mark.dist
@pytest.mark.parametrize("recompute", ["none", "moe"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["deepseek", "gpt_oss"])
def test_the_host_learns_no_count(name: str, ranks: int, recompute: str) -> None:
    run_distributed(_sync_free, ranks, name, recompute)


def _ranges() -> None:
    install()
    from phalanx.parallel.groups import create

    layer = build("deepseek", create().pg)
    fill(layer)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        layer(tokens())
    names = [e.name for e in profile.events() if e.name.startswith("moe/")]
    assert names == ["moe/route", "moe/dispatch", "moe/experts", "moe/combine", "moe/shared"]


def test_profiles_name_the_steps() -> None:
    run_distributed(_ranges, 1)


def _masks() -> None:
    install()
    from phalanx.parallel.groups import create

    layer = build("plain", create().pg)
    with pytest.raises(ValueError, match="pad with tokens"):
        layer(tokens(), padding_mask=torch.zeros(BATCH, SEQUENCE, dtype=torch.bool))


def test_a_padding_mask_is_refused() -> None:
    run_distributed(_masks, 1)


def _checkpoint() -> dict[str, Any]:
    install()
    from phalanx.parallel.groups import create

    groups = create(expert=2)
    layer = build("gpt_oss", groups.pg, expert=2)
    fill_global(layer, groups.pg.ep.rank(), 2)
    metadata = {"dp_cp_group": groups.pg.dp_cp}
    state = layer.sharded_state_dict("mlp.", ((0, 3, 5),), metadata)  # layer 3 of 5
    parameters = {id(p) for p in layer.parameters()}
    shards = {}
    for key, shard in state.items():
        assert id(shard.data) in parameters, key
        assert key.removeprefix("mlp.") in layer.state_dict()
        shards[shard.key] = (shard.global_shape, shard.global_offset, shard.replica_id[-1])
    assert all(p.allreduce is False for p in layer.experts.parameters())
    assert all(getattr(p, "allreduce", True) for p in layer.router.parameters())
    with pytest.raises(ValueError, match="singleton_local_shards"):
        layer.experts.sharded_state_dict("", (), {"singleton_local_shards": True})
    return shards


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [2, 4])
def test_checkpoint_layout(ranks: int) -> None:
    for rank, shards in enumerate(run_distributed(_checkpoint, ranks)):
        first, replica = rank % 2 * EXPERTS // 2, rank // 2
        shapes = {
            "linear_fc1.weight": (2 * FFN, HIDDEN),
            "linear_fc1.bias": (2 * FFN,),
            "linear_fc2.weight": (HIDDEN, FFN),
            "linear_fc2.bias": (HIDDEN,),
        }
        for name, shape in shapes.items():
            got = shards.pop(f"mlp.experts.experts.{name}")
            assert got[0] == (5, EXPERTS, *shape)
            assert got[1] == (3, first, *[0] * len(shape))
            assert got[2] == replica
        assert shards.keys() == {"mlp.router.weight", "mlp.router.bias"}


def _drawn() -> Tensor:
    install()
    from phalanx.parallel.groups import create

    layer = build("gpt_oss", create(expert=2).pg, expert=2, perform_initialization=True)
    experts = layer.experts
    assert not experts.b1.any() and not experts.b2.any()
    assert experts.w2.std().item() == pytest.approx(0.02 / 2**0.5, rel=0.2)
    return experts.w1.detach()


@pytest.mark.dist
def test_experts_are_drawn_apart() -> None:
    w1 = torch.cat(run_distributed(_drawn, 2))
    assert w1.std().item() == pytest.approx(0.02, rel=0.1)
    assert len({float(x) for x in w1.flatten(1).sum(1)}) == EXPERTS


def _meta() -> int:
    install()
    from phalanx.parallel.groups import create
    from tests.moe.on_meta import OnMeta

    pg = create().pg
    with OnMeta():
        layer = build("deepseek", pg, perform_initialization=True)
    assert all(t.is_meta for t in [*layer.parameters(), *layer.buffers()])
    return sum(p.numel() for p in layer.parameters())


def test_builds_without_memory() -> None:
    (count,) = run_distributed(_meta, 1)
    assert count == HIDDEN * (EXPERTS + 3 * FFN * EXPERTS + 3 * 12)
