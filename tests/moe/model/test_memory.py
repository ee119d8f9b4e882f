"""Recomputation and offloading change no bit, and free their memory."""

import gc
from typing import Any

import pytest
import torch

from tests.moe.cases import install
from tests.moe.model.test_features import (
    MLA,
    SMALL,
    TINY_DEEPSEEK,
    TINY_GPT_OSS,
    built,
    fill,
    tokens,
)
from tests.support.distributed import run_distributed
from tests.support.scheduling import mostly_slow, slow

SIZES = ["model.hidden=32", "model.dense_ffn=48", "model.moe.ffn=24"]
DEEPSEEK = [*TINY_DEEPSEEK, "model.mtp_layers=1"]
GPT_OSS = [*TINY_GPT_OSS, *SIZES]
MODELS = {
    "gqa": SMALL,
    "gqa_norms": [*SMALL, "model.attention.qk_norm=true", "model.attention.kv_heads=2"],
    "bias_sinks_window": GPT_OSS,
    "mla": MLA,
    "mla_direct_query": [*MLA, "model.attention.q_lora_rank=0"],
    "mla_dense_shared_mtp": [*DEEPSEEK, *SIZES, "model.moe.shared_ffn=24", "model.layers=3"],
    "dense": [*SMALL, "model.moe.dense_layers=1"],
    "dense_bias": [*GPT_OSS, "model.moe.dense_layers=1", "model.layers=3"],
}
PARTS = ("norm", "attention", "mlp", "expert_h")
PLANS: dict[str, list[str]] = {
    **{name: [f"run.recompute={name}"] for name in (*PARTS, "moe", "full")},
    "parts": [f"run.recompute=[{','.join(PARTS)}]"],
    "moe_norm": ["run.recompute=[moe,norm,attention]"],
    "moe_mlp": ["run.recompute=[moe,mlp]", "run.offload=[residual,attention]"],
    "offload": ["run.offload=[residual,attention,expert_h]"],
    "full_offload": ["run.recompute=full", "run.offload=residual"],
    "both": ["run.recompute=[norm,mlp]", "run.offload=[residual,attention,expert_h]"],
    "crossed": ["run.recompute=[norm,attention]", "run.offload=[residual,expert_h]"],
}
MLA_PLANS: dict[str, list[str]] = {
    "mla_up": ["run.recompute=mla_up"],
    "mla_up_attention": ["run.recompute=[mla_up,attention]"],
    "all_parts": [f"run.recompute=[mla_up,{','.join(PARTS)}]"],
    "mla_up_offload": ["run.recompute=[mla_up,norm]", "run.offload=[residual,expert_h]"],
}
TOGETHER = ("moe_norm", "full_offload", "both", "all_parts", "mla_up_offload")
"""Plans that have all of what is computed again or moved in them."""


def _gradients(overrides: list[str], layout: dict[str, int], groups: Any) -> dict[str, Any]:
    """Losses of two micro-batches, and gradients."""
    cfg, model = built(overrides, **layout, groups=groups)
    fill(model)
    ids, labels = tokens(cfg.model.vocab_size)
    places = torch.arange(ids.shape[1]).expand(ids.shape)
    model.train()
    losses = []
    for shift in (0, 1):
        given = ids.roll(shift, 0)
        loss = model(input_ids=given, position_ids=places, attention_mask=None, labels=labels)
        loss.sum().backward()
        losses.append(loss.detach())
    made = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": torch.cat(losses), **made}


def _compare(
    overrides: list[str], plans: dict[str, list[str]], layout: dict[str, int] | None = None
) -> list[str]:
    """Names of the tensors that differ from those of the model that saves all."""
    from phalanx.parallel.groups import create

    install()
    layout = layout or {}
    groups = create(**layout)
    kept, wrong = _gradients(overrides, layout, groups), []
    for name, plan in plans.items():
        got = _gradients([*overrides, *plan], layout, groups)
        assert got.keys() == kept.keys()
        wrong += [f"{name}: {k}" for k, value in kept.items() if not torch.equal(got[k], value)]
    return wrong


def plans_of(name: str) -> dict[str, list[str]]:
    return PLANS | (MLA_PLANS if "mla" in name else {})


@pytest.mark.dist
@mostly_slow(
    "name",
    MODELS,
    *("mla_direct_query", "mla_dense_shared_mtp", "dense_bias"),
)
def test_no_bit_changes(name: str) -> None:
    (wrong,) = run_distributed(_compare, 1, MODELS[name], plans_of(name))
    assert wrong == []


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("mla", {"tensor": 2, "expert": 2}),
        *slow(("mla_dense_shared_mtp", {"tensor": 2, "expert": 2}), ("gqa_norms", {"tensor": 2})),
        ("mla", {"context": 2}),
        ("gqa", {"expert": 2}),
    ],
)
def test_no_bit_changes_over_ranks(name: str, layout: dict[str, int]) -> None:
    plans = {plan: how for plan, how in plans_of(name).items() if plan in TOGETHER}
    for wrong in run_distributed(_compare, 2, MODELS[name], plans, layout):
        assert wrong == []


# --- memory ---------------------------------------------------------------------------------------


def _kept_bytes(overrides: list[str]) -> int:
    """Bytes of tensors that a forward pass leaves."""
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode

    refs: dict[int, Any] = {}

    class Record(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            made = func(*args, **(kwargs or {}))
            for x in made if isinstance(made, (tuple, list)) else (made,):
                if isinstance(x, torch.Tensor):
                    storage = x.untyped_storage()
                    refs[storage._cdata] = StorageWeakRef(storage)
            return made

    cfg, model = built(overrides)
    fill(model)
    ids, labels = tokens(cfg.model.vocab_size)
    places = torch.arange(ids.shape[1]).expand(ids.shape)
    gc.collect()
    with Record():
        loss = model(input_ids=ids, position_ids=places, attention_mask=None, labels=labels)
    gc.collect()
    found = [ref for ref in refs.values() if not ref.expired()]
    sizes = [torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in found]
    total = sum(storage.nbytes() for storage in sizes if storage is not None)
    del loss
    return total


def _freed(overrides: list[str], plans: dict[str, list[str]]) -> dict[str, int]:
    """Bytes of tensors on the device that a forward pass leaves fewer than one that keeps all."""
    from phalanx.parallel.memory.offload import offloader

    kept = _kept_bytes(overrides)
    host = offloader(torch.device("cpu")).host
    found = {}
    for name, plan in plans.items():
        before = host.used
        found[name] = kept - (_kept_bytes([*overrides, *plan]) - (host.used - before))
    return found


@pytest.mark.dist
def test_memory_is_given_back() -> None:
    """Memory of 96 tokens in fp32 and five layers of width 128, one dense and one of prediction."""
    others = ("moe_mlp", "both", "crossed", "mla_up_offload")
    plans = {name: plan for name, plan in (PLANS | MLA_PLANS).items() if name not in others}
    (freed,) = run_distributed(_freed, 1, DEEPSEEK, plans)
    row = 96 * 4
    assert freed["norm"] == row * 5 * 2 * 128
    assert freed["attention"] >= row * 5 * 4 * 32  # the result, and what reference kernels save
    queries_keys_values = 4 * (2 * (32 + 16) + 32)
    assert freed["mla_up"] >= row * 5 * queries_keys_values
    assert freed["mla_up_attention"] == freed["mla_up"] + freed["attention"]
    rows = 4 * 96 * 4  # of a budget of four times the balanced load
    assert freed["expert_h"] == 4 * min(rows, 96 * 4) * 2 * 128 * 4
    assert freed["mlp"] >= row * (2 * 512 + 4 * 2 * 128)
    parts = sum(freed[name] for name in PARTS)
    assert parts == freed["parts"] and freed["all_parts"] == parts + freed["mla_up"]
    assert freed["moe_norm"] > freed["moe"] > freed["expert_h"]
    # The last layer's is still there when the backward pass begins, as is that of the prediction.
    moved = row * (2 * 128 + queries_keys_values + 4 * 32) + freed["expert_h"] // 4
    assert 3 * moved - freed["expert_h"] // 4 <= freed["offload"] < 4 * moved
    assert freed["full_offload"] >= freed["full"] + 3 * row * 128
