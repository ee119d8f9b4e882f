"""`apply`: whole models of transformers in this project's kernels, against themselves before."""

import copy
import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
)
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.qwen3_moe import modeling_qwen3_moe

from phalanx.adapters.transformers import NAME, apply
from phalanx.adapters.transformers.attention import FA4
from phalanx.adapters.transformers.attention import forward as attend
from phalanx.adapters.transformers.attention import mask as causal_mask
from phalanx.adapters.transformers.rotary import Kind, rotated
from tests.adapters import hf_models
from tests.kernels.compiling import compiling
from tests.moe.hf.without_fla import without_fla

with without_fla():
    from transformers import Qwen3NextForCausalLM

SMALL: dict[str, Any] = dict(
    vocab_size=hf_models.VOCABULARY,
    hidden_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=40,
    num_experts_per_tok=2,
    max_position_embeddings=64,
)
OTHERS: dict[str, tuple[Any, Any]] = {
    "olmoe": (OlmoeForCausalLM, OlmoeConfig(**SMALL, num_experts=6)),
    "mixtral": (MixtralForCausalLM, MixtralConfig(**SMALL, num_local_experts=5)),
    "qwen3_next": (
        Qwen3NextForCausalLM,
        Qwen3NextConfig(
            **SMALL,
            head_dim=16,
            num_experts=6,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=24,
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            layer_types=["full_attention"] * 2,  # the others run in Triton where it is installed
        ),
    ),
}
NAMES = ("qwen3_moe", "gpt_oss", "deepseek_v3", "mixtral", "olmoe", "qwen3_next")


def made(name: str) -> Any:
    if name not in OTHERS:
        model = hf_models.model(name, "eager")
    else:
        kind, config = OTHERS[name]
        torch.manual_seed(0)
        model = kind._from_config(copy.deepcopy(config), experts_implementation="eager").train()
    with torch.no_grad():  # norms with weights, and routers that prefer experts
        for key, weight in model.named_parameters():
            if "norm" in key:
                weight.add_(0.1 * torch.randn_like(weight))
            elif "gate.weight" in key or "router.weight" in key:
                weight.normal_(0, 0.5)
    return model


def batch() -> dict[str, Tensor]:
    ids = hf_models.tokens()
    labels = ids.clone()
    labels[:, :3] = -100
    return dict(input_ids=ids, labels=labels)


def results(model: Any, **options: Any) -> list[Tensor]:
    loss = model(**batch(), **options).loss
    leaves = [p for p in model.parameters() if p.requires_grad]
    return [loss, *torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)]


def agree(found: list[Tensor], want: list[Tensor]) -> None:
    for got, correct in zip(found, want, strict=True):
        scale = correct.abs().max().item()
        torch.testing.assert_close(got, correct, rtol=1e-5, atol=1e-5 * max(scale, 1e-3))


@pytest.mark.parametrize("name", NAMES)
def test_losses_and_gradients_stay(name: str) -> None:
    model = made(name)
    options: list[dict[str, Any]] = [{}, dict(num_items_in_batch=torch.tensor(40))]
    if name not in ("deepseek_v3",):  # without a loss that balances
        options.append(dict(output_router_logits=True))
    want = [results(model, **given) for given in options]
    state, whole = model.state_dict(), model.eval()(**batch())
    model.train()
    report = apply(model)
    assert {"experts", "rotary", "router", "loss"} <= report.applied.keys(), str(report)
    assert "norms" in report.applied or name == "qwen3_next"
    for given, correct in zip(options, want, strict=True):
        agree(results(model, **given), correct)
    assert model(**batch()).logits is None
    assert len(model(**batch(), return_dict=False)) >= 1
    # Evaluation, calls without labels and the state are as before.
    assert list(model.state_dict()) == list(state)
    torch.testing.assert_close(model.eval()(**batch()).logits, whole.logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model(**batch()).loss, whole.loss, rtol=1e-5, atol=1e-5)
    assert model.train()(input_ids=batch()["input_ids"]).logits is not None


def test_copies_and_saved_models_are_their_own(tmp_path: Path) -> None:
    model = made("qwen3_moe")
    apply(model)
    first = results(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(0.5)
    agree(results(model), first)
    assert (results(other)[0] - first[0]).abs() > 1e-4
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    agree(results(torch.load(file, weights_only=False)), first)
    model.save_pretrained(tmp_path)
    loaded = Qwen3MoeForCausalLM.from_pretrained(tmp_path).train()
    assert loaded.config._attn_implementation != FA4
    agree(results(loaded), first)
    assert (tmp_path / "config.json").read_text().count("phalanx") == 0


def test_checkpointing_generation_and_another_head() -> None:
    model, plain = made("qwen3_moe"), made("qwen3_moe")
    apply(model)
    model.gradient_checkpointing_enable()
    agree(results(model), results(plain))
    ids = batch()["input_ids"]
    options = dict(max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert torch.equal(model.eval().generate(ids, **options), plain.eval().generate(ids, **options))
    for each in (model, plain):
        torch.manual_seed(3)
        each.resize_token_embeddings(hf_models.VOCABULARY + 2)
    plain.load_state_dict(model.state_dict())
    agree(results(model.train()), results(plain.train()))
    assert model(**batch()).logits is None


def test_a_compiled_model_is_one_graph_without_labels() -> None:
    model = made("qwen3_moe").eval()
    ids = batch()["input_ids"]
    with torch.no_grad(), compiling():
        want = model(ids).logits
        apply(model)
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        for got in (compiled(ids), compiled(input_ids=ids)):
            torch.testing.assert_close(got.logits, want, rtol=1e-4, atol=1e-5)


def test_adapters_train_over_it_and_under_it() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    found = []
    for before in (True, False, None):
        model = made("qwen3_moe")
        if before:
            apply(model)
        torch.manual_seed(1)
        model = peft.get_peft_model(model, config)
        if before is False:
            assert "loss" in apply(model).applied
        found.append(results(model))
        assert (model(**batch()).logits is None) == (before is not None)
    agree(found[0], found[2])
    agree(found[1], found[2])


def test_a_class_applies_to_each_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Own(Qwen3MoeForCausalLM):
        pass

    config = copy.deepcopy(hf_models.MODELS["qwen3_moe"][1])
    report = apply(Own, attention=False)
    assert "each new Own" in str(report) and "attention" not in str(report)
    model = Own(config).train()
    assert model.config._experts_implementation == NAME and model(**batch()).logits is None
    model.save_pretrained(tmp_path)

    class Later(Own):
        pass

    assert Later(config).train()(**batch()).logits is None
    assert Own.from_pretrained(tmp_path).train()(**batch()).logits is None
    assert Qwen3MoeForCausalLM(config).train()(**batch()).logits is not None


def test_what_is_impossible_is_left_or_refused_by_name() -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(**{k: v for k, v in SMALL.items() if "expert" not in k}, head_dim=12)
    model = Gemma2ForCausalLM(config).train()
    want = results(model)
    report = apply(model)
    assert report.left["experts"] == "it has no experts that transformers dispatches"
    assert "router" in report.left and "attention" in report.left
    with pytest.warns(UserWarning, match="changes its logits before their loss"):
        agree(results(model), want)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agree(results(model), want)
    assert model(**batch()).logits is not None
    for switch in ("experts", "router", "attention"):
        with pytest.raises(ValueError, match=f"Gemma2ForCausalLM: {switch}=True is impossible: "):
            apply(model, **{switch: True})
    with pytest.raises(ValueError, match="Linear is no model of transformers"):
        apply(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="loss='maybe' is unknown"):
        apply(model, loss="maybe")


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (modeling_qwen3_moe.apply_rotary_pos_emb, Kind(False, True)),
        (modeling_gpt_oss.apply_rotary_pos_emb, Kind(False, False)),
        (modeling_deepseek_v3.apply_rotary_pos_emb_interleave, Kind(True, True)),
    ],
)
def test_rotations_are_those_of_transformers(function: Any, kind: Kind) -> None:
    q, k = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 5, 16)
    angle = torch.rand(1, 5, 8).repeat(1, 1, 1 + kind.repeated)
    want = getattr(function, "__wrapped__", function)(q, k, angle.cos(), angle.sin())
    for x, rotation in zip((q, k), want, strict=True):
        torch.testing.assert_close(rotated(x, angle.cos(), angle.sin(), kind), rotation)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_attention_elsewhere_is_that_of_transformers(name: str) -> None:
    """Padding and packed rows, which flash-attn-4 does not take, as nothing on a CPU."""
    plain, model = made(name), made(name)
    model.set_attn_implementation(FA4)
    ids = batch()["input_ids"]
    padding = torch.ones_like(ids)
    padding[0, :4] = 0
    packed = torch.cat([torch.arange(5), torch.arange(6)]).expand(3, -1)
    for given in ({}, dict(attention_mask=padding), dict(position_ids=packed)):
        got, want = (m(ids, **given).logits[1:] for m in (model, plain))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    options = dict(max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(model.eval().generate(ids, **options), plain.eval().generate(ids, **options))


def test_a_window_without_a_mask_is_a_window() -> None:
    module = made("qwen3_moe").model.layers[0].self_attn
    q, k, v = (torch.randn(1, heads, 9, 12) for heads in (4, 2, 2))
    assert causal_mask(batch_size=1, q_length=9, kv_length=9, local_size=3) is None
    got = attend(module, q, k, v, None, scaling=0.3, sliding_window=3)[0]
    i = torch.arange(9)
    seen = (i[None] <= i[:, None]) & (i[None] > i[:, None] - 3)
    logits = q @ k.repeat_interleave(2, 1).mT * 0.3
    want = logits.masked_fill(~seen, -torch.inf).softmax(-1) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(got, want.transpose(1, 2))
