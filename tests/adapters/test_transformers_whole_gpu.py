"""Whole models of transformers after `apply`, and captured steps of their Trainer, in bf16."""

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("transformers")

from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainingArguments,
)

from phalanx.adapters.transformers import apply
from phalanx.adapters.transformers.attention import fa4_refusal
from phalanx.adapters.transformers.attention import forward as attend
from phalanx.adapters.transformers.rotary import Kind, rotated
from phalanx.adapters.transformers.rotary_triton import rotate
from phalanx.adapters.transformers.routers import fuse_routers
from phalanx.adapters.transformers.trainer import UsePhalanx, captured
from phalanx.kernels.core_attention.core import visible_ST
from tests.adapters.test_adapters_gpu import MODELS as OTHERS

pytestmark = pytest.mark.gpu
MODELS = OTHERS | {
    "deepseek_v3": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config(
            vocab_size=512,
            hidden_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            num_experts_per_tok=2,
            moe_intermediate_size=128,
            n_routed_experts=8,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=0,
            intermediate_size=256,
            q_lora_rank=64,
            kv_lora_rank=64,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
        ),
    )
}


def made(name: str, dtype: torch.dtype = torch.bfloat16, top_k: int = 2) -> Any:
    torch.manual_seed(0)
    kind, config = MODELS[name]
    config = copy.deepcopy(config)
    config.num_experts_per_tok = top_k
    with torch.device("cuda"):
        return kind._from_config(config, dtype=dtype, experts_implementation="eager").train()


@pytest.mark.parametrize("kind", [Kind(False, True), Kind(False, False), Kind(True, True)])
@pytest.mark.parametrize("width", [64, 128, 192])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rotation_and_its_gradient(kind: Kind, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    B, H, S, P = 2, 5, 33, 32
    x = torch.randn(B, S, H, width, device="cuda").to(dtype).transpose(1, 2)
    angle = torch.rand(1, S, P, device="cuda").mul(6).repeat(1, 1, 1 + kind.repeated)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    exact = x.double().requires_grad_()
    want = rotated(exact, cos.double(), sin.double(), kind)
    up = torch.randn(want.shape, device="cuda").to(dtype)
    (grad,) = torch.autograd.grad(want, exact, up.double())
    options: dict[str, Any] = dict(pairs=P, neighbours=kind.neighbours)
    got = rotate(x, cos, sin, **options, inverse=False)
    back = rotate(up, cos, sin, **options, inverse=True)
    bound = 2.0**-8 if dtype == torch.bfloat16 else 1e-6
    for found, correct in ((got, want), (back, grad)):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), correct, rtol=bound, atol=max(bound / 10, 2e-6))


@pytest.mark.parametrize("name", MODELS)
def test_rotation_in_models_is_one_pass(name: str) -> None:
    """As exact as the function that it replaces."""
    model = made(name)
    apply(model, experts=False, norms=False, router=False, loss=False, attention=False)
    file = importlib.import_module(type(model).__module__)
    function = file.apply_rotary_pos_emb
    columns = 32 if name == "gpt_oss" else 64
    angle = torch.rand(1, 40, columns, device="cuda")
    if columns == 64:
        angle = angle[..., :32].repeat(1, 1, 2)
    q, k = (torch.randn(2, 40, h, 64, device="cuda").transpose(1, 2) for h in (4, 2))
    given = [x.bfloat16() for x in (q, k, angle.cos(), angle.sin())]
    exact = function.__wrapped__(*(x.double() for x in given))
    theirs, ours = function.__wrapped__(*given), function(*given)
    for got, base, want in zip(ours, theirs, exact, strict=True):
        assert (got - want).norm() <= (base - want).norm()


@pytest.mark.parametrize("name", MODELS)
def test_routers_choose_the_same(name: str) -> None:
    plain, model = made(name, torch.float32), made(name, torch.float32)
    assert fuse_routers(model) == (2, [])
    block = plain.model.layers[0].mlp
    router = "router" if hasattr(block, "router") else "gate"
    theirs, ours = (getattr(m.model.layers[0].mlp, router) for m in (plain, model))
    for r in (theirs, ours):
        torch.nn.init.normal_(r.weight, std=0.06, generator=torch.Generator("cuda").manual_seed(1))
    x = torch.randn(300, 256, device="cuda")
    dense = [
        torch.zeros(300, 8, device="cuda").scatter_(1, idx, prob)
        for _, prob, idx in (theirs(x), ours(x))
    ]
    torch.testing.assert_close(*dense, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_models_are_as_exact_as_theirs(name: str) -> None:
    """Losses and gradients against fp32; all experts are chosen, as roundings change choices."""
    ids = torch.randint(0, 512, (2, 256), device="cuda")
    exact, theirs, ours = made(name, top_k=8).float(), made(name, top_k=8), made(name, top_k=8)
    report = apply(ours)
    assert {"experts", "norms", "rotary", "router", "loss"} <= report.applied.keys(), str(report)

    def results(model: Any) -> list[Tensor]:
        loss = model(input_ids=ids, labels=ids).loss
        leaves = list(model.parameters())
        options: dict[str, Any] = dict(allow_unused=True, materialize_grads=True)
        return [loss, *torch.autograd.grad(loss, leaves, **options)]

    want = results(exact)

    def error(model: Any) -> float:
        pairs = zip(results(model), want, strict=True)
        return sum(
            ((got - right).norm() / right.norm()).item() ** 2 for got, right in pairs if right.any()
        )

    assert error(ours) <= 1.3 * error(theirs)


@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("sinks", [False, True])
def test_attention_is_as_exact_as_theirs(window: int | None, *, sinks: bool) -> None:
    model = made("gpt_oss")
    if why := fa4_refusal(model):
        pytest.skip(why)
    module = model.model.layers[0].self_attn
    q, k, v = (torch.randn(2, h, 256, 64, device="cuda").bfloat16() for h in (4, 2, 2))
    logits = torch.randn(4, device="cuda").bfloat16() if sinks else None
    up = torch.randn(2, 256, 4, 64, device="cuda").bfloat16()
    seen = visible_ST(256, 256, window or 0, "cuda")[None, None]

    def results(dtype: torch.dtype, mask: Tensor | None) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v, logits) if x is not None]
        options = dict(s_aux=leaves[3]) if sinks else {}
        out = attend(module, *leaves[:3], mask, scaling=0.2, sliding_window=window, **options)[0]
        return [out, *torch.autograd.grad(out, leaves[:3], up.to(dtype))]

    if sinks:  # the eager function reads those of its module
        module.sinks.data = logits
    exact = results(torch.float32, seen)
    ours, theirs = results(torch.bfloat16, None), results(torch.bfloat16, seen)
    for got, base, want in zip(ours, theirs, exact, strict=True):
        assert (got - want).norm() <= 1.2 * (base - want).norm() + 1e-3 * want.norm()


def trained(folder: Path, *, graphs: bool) -> tuple[list[float], dict[str, Tensor], Any]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 512, (64, 128), generator=generator)
    torch.manual_seed(0)
    trainer = Trainer(
        Qwen3MoeForCausalLM(copy.deepcopy(MODELS["qwen3_moe"][1])).bfloat16(),
        TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_steps=6,
            learning_rate=0.1,
            optim="sgd",
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            bf16=True,
            disable_tqdm=True,
        ),
        train_dataset=[dict(input_ids=row, labels=row) for row in ids],
        callbacks=[UsePhalanx(attention=False)],
    )
    steps = captured(trainer) if graphs else None
    trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return losses, {k: v.float() for k, v in trainer.model.state_dict().items()}, steps


def test_a_trainer_with_captured_steps_trains_as_an_eager_one(tmp_path: Path) -> None:
    eager, want, _ = trained(tmp_path, graphs=False)
    losses, state, steps = trained(tmp_path, graphs=True)
    assert steps.reasons == [] and steps.replays == 10  # of 12, the first of two kinds are eager
    assert losses == pytest.approx(eager, rel=1e-3)
    for key, value in want.items():
        assert (state[key] - value).norm() <= 0.01 * value.norm(), key
