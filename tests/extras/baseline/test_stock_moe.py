"""The stock MoELayer and ours: same routing, output, gradients, statistics and checkpoints."""

import re
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.configs.knobs import get
from phalanx.configs.load import load
from tests.moe.cases import (
    DEEPSEEK,
    EXPERTS,
    GPT_OSS,
    HIDDEN,
    LOSSES,
    compare_layers,
    draw,
    fill,
    install,
    model,
    options,
    recomputing,
    transformer,
    with_loss,
)
from tests.support.advice import advised
from tests.support.distributed import RankFailed, run_distributed
from tests.support.scheduling import matrix, mostly_slow

SEQUENCE, BATCH = 8, 4

ROUTERS: dict[str, tuple[dict[str, Any], int]] = {
    "softmax": ({"normalize": True, **LOSSES}, 2),
    "softmax, not normalised": ({"normalize": False, "scale": 2.5, "aux_loss": 0.1}, 3),
    "softmax, one expert": ({"normalize": True, "z_loss": 0.1}, 1),
    "softmax over top-k": ({"softmax_over": "topk", "seq_aux_loss": 0.1, "z_loss": 0.1}, 4),
    "softmax, groups": ({"normalize": False, "groups": 4, "group_topk": 2, "aux_loss": 0.1}, 4),
    "softmax over top-k, groups": ({"softmax_over": "topk", "groups": 4, "group_topk": 2}, 4),
    "sigmoid": ({"score": "sigmoid", "scale": 2.5, **LOSSES}, 2),
    "sigmoid, one expert": ({"score": "sigmoid", "normalize": False, "aux_loss": 0.1}, 1),
    "sigmoid, bias, groups": (
        {"score": "sigmoid", "bias_rate": 1e-3, "groups": 4, "group_topk": 2, **LOSSES},
        4,
    ),
    "forced": ({"force_balance": True, **LOSSES}, 2),
    "sigmoid, bias, groups, forced": (
        {
            "score": "sigmoid",
            "bias_rate": 1e-3,
            "groups": 4,
            "group_topk": 2,
            "force_balance": True,
        },
        4,
    ),
}

MODELS: dict[str, dict[str, Any]] = {
    "deepseek": with_loss(DEEPSEEK, z_loss=0.01),
    "gpt_oss": with_loss(GPT_OSS, aux_loss=0.01),
    "geglu": dict(router={"normalize": False}, moe={"activation": "geglu", "top_k": 1}),
    "squared_relu": dict(moe={"activation": "squared_relu"}),
    "swiglu, clamped": dict(moe={"activation_limit": 0.3}),
    "forced": dict(router={"force_balance": True}),
}


# --- router ---------------------------------------------------------------------------------------


def _routers(router: dict[str, Any], top_k: int) -> None:
    install()
    from phalanx.extras.baseline.stock_moe import StockRouter
    from phalanx.moe.router.router import Router
    from phalanx.parallel.groups import create

    groups = create()
    m = model(router, moe={"top_k": top_k})
    config = transformer(m)
    common = dict(config=config, options=m.moe.router, pg_collection=groups.pg)
    ours, stock = Router(top_k=top_k, **common), StockRouter(**common)
    stock.set_layer_number(1)
    fill(ours)
    with torch.no_grad():
        stock.weight.copy_(ours.weight)
        if ours.expert_bias is not None:
            ours.expert_bias.copy_(draw(EXPERTS, seed=9, scale=0.3))
            stock.expert_bias.copy_(ours.expert_bias)
    xs = [draw(SEQUENCE, BATCH, HIDDEN, seed=50 + dist.get_rank() + 10 * i) for i in range(2)]
    for x in xs:  # two micro-batches
        idx_TK, prob_TK = ours(x)
        dense_TE, map_TE = stock(x)
        expected_TE = torch.zeros_like(dense_TE).scatter(1, idx_TK.long(), prob_TK)
        torch.testing.assert_close(expected_TE, dense_TE, rtol=1e-5, atol=1e-6)
        assert map_TE.gather(1, idx_TK.long()).all() and map_TE.sum() == idx_TK.numel()
        upstream_TE = draw(*dense_TE.shape, seed=80)
        prob_TK.backward(upstream_TE.gather(1, idx_TK.long()))
        dense_TE.backward(upstream_TE)
    torch.testing.assert_close(ours.weight.grad, stock.weight.grad, rtol=1e-4, atol=1e-5)
    for name, value in ours.statistics.named_buffers():
        other = stock.statistics.get_buffer(name)
        assert value.dtype == other.dtype
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)
    if ours.local_tokens_per_expert is not None:
        assert torch.equal(ours.local_tokens_per_expert, stock.local_tokens_per_expert)
        assert stock.local_tokens_per_expert.dtype == torch.int64


@pytest.mark.dist
@mostly_slow("ranks", [1, 2], 2)
@pytest.mark.parametrize("name", ROUTERS)
def test_routers_agree(name: str, ranks: int) -> None:
    run_distributed(_routers, ranks, *ROUTERS[name])


def _precision() -> None:
    install()
    from megatron.core.transformer.module import Float16Module

    from phalanx.extras.baseline.stock_moe import StockRouter
    from phalanx.parallel.groups import create

    m = model({"score": "sigmoid", "bias_rate": 1e-3, "global_aux_loss": 0.1})
    config = transformer(m)
    config.bf16 = True
    router = StockRouter(config=config, options=m.moe.router, pg_collection=create().pg)
    router.set_layer_number(1)
    fill(router)
    router = Float16Module(config, router).module
    many = 2**24 + 1
    router.local_tokens_per_expert.fill_(many)
    x = draw(SEQUENCE, BATCH, HIDDEN, seed=50, dtype=torch.bfloat16)
    _, map_TE = router(x)
    with torch.no_grad():
        router(x)
    assert (router.local_tokens_per_expert - many).tolist() == map_TE.sum(0).tolist()
    assert router.expert_bias.dtype == router.global_tokens_per_expert.dtype == torch.float32


def test_stock_counts_are_exact_and_once() -> None:
    run_distributed(_precision, 1)


# --- layer ----------------------------------------------------------------------------------------


def stacked(stock: Any, name: str) -> Tensor | None:
    """A parameter of `moe.experts.Experts`, from SequentialMLP's; its gradient if it has one."""
    linear, kind = (
        {"w": "weight", "b": "bias"}[name[0]],
        {"1": "linear_fc1", "2": "linear_fc2"}[name[1]],
    )
    found = [getattr(getattr(e, kind), linear) for e in stock.experts.local_experts]
    return (
        None if found[0] is None else torch.stack([f if f.grad is None else f.grad for f in found])
    )


def pair(name: str, *, backend: str = "torch", recompute: str = "none") -> tuple[Any, Any]:
    """Our layer and the stock one with its weights, on all ranks as one expert-parallel group."""
    from phalanx.extras.baseline.stock_moe import StockMoE
    from phalanx.moe.layer import MoE
    from phalanx.parallel.groups import create

    ranks = dist.get_world_size()
    pg = create(expert=ranks).pg
    m = model(**MODELS[name])
    config = transformer(m, expert=ranks)
    again = () if recompute == "none" else (recompute,)
    stock = StockMoE(config, pg, options=replace(options(m, pg, "megatron"), recompute=again))
    ours = MoE(config, pg, options=options(m, pg, backend))
    fill(stock)
    with torch.no_grad():
        for seed, p in enumerate(stock.experts.parameters()):
            p.copy_(draw(*p.shape, seed=1000 * dist.get_rank() + seed, scale=0.3))
        for key in ("w1", "w2", "b1", "b2"):
            if (value := stacked(stock, key)) is not None:
                getattr(ours.experts, key).copy_(value)
        rest = {k: v for k, v in stock.state_dict().items() if not k.startswith("experts.")}
        if ours.router.expert_bias is not None:
            rest["router.expert_bias"].copy_(draw(EXPERTS, seed=9, scale=0.3))
        ours.load_state_dict(rest, strict=False)
    for layer in (ours, stock):
        layer.set_layer_number(1)
    return ours, stock


def _layers(name: str, backend: str, recompute: str) -> None:
    install()
    ours, stock = pair(name, backend=backend, recompute=recompute)

    def call(layer: Any, x: Tensor) -> Any:
        with recomputing(recompute) as memory:
            return layer(x, memory=memory) if layer is ours else layer(x)

    compare_layers(ours, stock, (SEQUENCE, BATCH), partial(stacked, stock), call)
    for key, value in ours.router.statistics.named_buffers():
        torch.testing.assert_close(value, stock.router.statistics.get_buffer(key))
    assert not any(p.allreduce for p in stock.experts.parameters())


@pytest.mark.dist
@matrix(("backend", "ranks"), ("reference", 1), ("torch", 2))
@pytest.mark.parametrize("name", MODELS)
def test_layers_agree(name: str, backend: str, ranks: int) -> None:
    run_distributed(_layers, ranks, name, backend, "none")


@pytest.mark.dist
@pytest.mark.parametrize("module", ["moe", "shared_experts"])
def test_layers_agree_when_recomputed(module: str) -> None:
    run_distributed(_layers, 2, "deepseek", "torch", module)


@pytest.mark.dist
@pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="it is here")
def test_activations_of_experts_need_transformer_engine_to_be_computed_again() -> None:
    with pytest.raises(RankFailed, match="moe_act needs Transformer Engine; set moe instead"):
        run_distributed(_layers, 1, "deepseek", "torch", "moe_act")


# --- checkpoints ----------------------------------------------------------------------------------


def _save(folder: str, name: str, stock_writes: bool) -> Any:
    install()
    from megatron.core import dist_checkpointing

    from phalanx.parallel.groups import create

    layers = pair(name)
    metadata = {"dp_cp_group": create(expert=dist.get_world_size()).pg.dp_cp}
    writer = layers[stock_writes]
    state = writer.sharded_state_dict("mlp.", (), metadata)
    dist_checkpointing.save({"model": state}, folder)
    x = draw(SEQUENCE, BATCH, HIDDEN, seed=70)
    return writer(x)[0].detach()


def _load(folder: str, name: str, stock_reads: bool) -> Any:
    install()
    from megatron.core import dist_checkpointing

    from phalanx.parallel.checkpoint.model_state import without_extra_states
    from phalanx.parallel.groups import create

    reader = pair(name)[stock_reads]
    with torch.no_grad():
        for p in reader.parameters():
            p.zero_()
    metadata = {"dp_cp_group": create(expert=dist.get_world_size()).pg.dp_cp}
    wanted = without_extra_states({"model": reader.sharded_state_dict("mlp.", (), metadata)})
    state = dist_checkpointing.load(wanted, folder)["model"]
    state = {key.removeprefix("mlp."): value for key, value in state.items()}
    left = reader.load_state_dict(state, strict=False)
    assert not [k for k in left.missing_keys if "extra_state" not in k] and not left.unexpected_keys
    x = draw(SEQUENCE, BATCH, HIDDEN, seed=70)
    return reader(x)[0].detach()


@pytest.mark.dist
@matrix(("name", "stock_writes"), ("deepseek", False), ("gpt_oss", True))
def test_checkpoints_are_interchangeable(name: str, stock_writes: bool, tmp_path: Path) -> None:
    written = run_distributed(_save, 2, str(tmp_path), name, stock_writes)
    read = run_distributed(_load, 1, str(tmp_path), name, not stock_writes)
    torch.testing.assert_close(read[0], written[0], rtol=1e-4, atol=1e-5)


# --- what it cannot do ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("router", "moe", "match"),
    [
        ({"score": "sigmoid", "normalize": False}, {}, "set model.moe.router.normalize=true or"),
        (
            {"groups": 4, "group_topk": 2},
            {"top_k": 4},
            "set model.moe.router.softmax_over=topk or model.moe.router.normalize=false or",
        ),
        (
            {"score": "sigmoid", "groups": 4, "group_topk": 2},
            {"top_k": 1},
            "set model.moe.router.group_topk=1",
        ),
        (
            {},
            {"activation": "quick_geglu", "activation_alpha": 1.5},
            "set model.moe.activation_alpha=1.702",
        ),
        (
            {},
            {"activation": "squared_relu", "activation_limit": 1.0},
            "set model.moe.activation_limit=0",
        ),
    ],
)
def test_refuses_what_the_stock_layer_would_compute_otherwise(
    router: dict[str, Any], moe: dict[str, Any], match: str
) -> None:
    run_distributed(_refused, 1, router, moe, match)


def _refused(router: dict[str, Any], moe: dict[str, Any], match: str) -> None:
    install()
    from phalanx.extras.baseline.stock_moe import StockMoE
    from phalanx.parallel.groups import create

    m, pg = model(router, moe=moe), create().pg
    with pytest.raises(ValueError, match=re.escape(match)) as error:
        StockMoE(transformer(m), pg, options=options(m, pg, "megatron"))
    for (word,) in advised(str(error.value)):
        knob, _, _value = word.partition("=")
        if knob != "kernels.backend":
            name = knob.rpartition(".")[2]
            part = {name: get(load([word]), knob)}
            of_router = knob.startswith("model.moe.router.")
            helped = model(
                router | part if of_router else router, moe=moe if of_router else moe | part
            )
            StockMoE(transformer(helped), pg, options=options(helped, pg, "megatron"))
