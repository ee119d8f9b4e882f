"""Parameters of GPT-OSS's experts are transformers': adapters and optimizer states go both ways."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from transformers import GptOssConfig, GptOssForCausalLM

from phalanx.adapters.transformers import convert
from tests.adapters.hf_models import VOCABULARY, close, tokens

CONFIG = GptOssConfig(
    vocab_size=VOCABULARY,
    hidden_size=40,
    intermediate_size=40,  # square: another layout would be no error of shapes
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=12,
    num_local_experts=5,
    num_experts_per_tok=2,
    max_position_embeddings=64,
    layer_types=["full_attention"] * 2,
)
BOTH_WAYS = [("phalanx", "eager"), ("eager", "phalanx")]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model with random experts."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    made = GptOssForCausalLM(copy.deepcopy(CONFIG))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "experts" in name:
                parameter.normal_(0, 0.1)
    made.save_pretrained(folder)
    return folder


def load(folder: Path, implementation: str) -> Any:
    return GptOssForCausalLM.from_pretrained(folder, experts_implementation=implementation)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(tokens()).logits
    return out


def with_lora(model: Any) -> Any:
    """LoRA on both layers of the experts, with factors that are not 0."""
    from peft import LoraConfig, get_peft_model

    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(r=3, lora_alpha=6, target_modules=[], target_parameters=names)
    made = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in (p for p in made.parameters() if p.requires_grad):
            parameter.normal_(0, 0.1, generator=generator)
    return made


def train(model: Any, optimizer: Any, steps: int) -> None:
    for seed in range(steps):
        optimizer.zero_grad()
        model(tokens(seed), labels=tokens(seed)).loss.backward()
        optimizer.step()


def adam(model: Any) -> Any:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, eps=1e-4)


@pytest.mark.parametrize(("source", "target"), BOTH_WAYS)
def test_an_adapter_goes_both_ways(source: str, target: str, saved: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    made = with_lora(load(saved, source))
    train(made, adam(made), 2)
    want = logits(made)
    assert (want - logits(load(saved, source))).abs().max() > 0.02  # the adapter's effect
    made.save_pretrained(tmp_path / "adapter")
    other = peft.PeftModel.from_pretrained(load(saved, target), tmp_path / "adapter")
    torch.testing.assert_close(logits(other), want, rtol=0, atol=1e-5)

    merged = other.merge_and_unload()
    torch.testing.assert_close(logits(merged), want, rtol=0, atol=1e-5)
    merged.save_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(load(tmp_path / "merged", source)), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("source", "target"), BOTH_WAYS)
def test_an_optimizer_state_goes_both_ways(source: str, target: str, saved: Path) -> None:
    made, other, whole = load(saved, source), load(saved, target), load(saved, target)
    first, second, reference = map(adam, (made, other, whole))
    train(made, first, 3)
    other.load_state_dict(made.state_dict())
    second.load_state_dict(first.state_dict())
    train(other, second, 2)
    train(whole, reference, 3)
    train(whole, reference, 2)
    state = whole.state_dict()
    for key, value in other.state_dict().items():
        torch.testing.assert_close(value, state[key], rtol=0, atol=1e-5)
    for got, want in zip(other.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(
            second.state[got]["exp_avg"], reference.state[want]["exp_avg"], rtol=1e-3, atol=1e-6
        )


def test_converted_experts_compute_and_save_the_same(saved: Path, tmp_path: Path) -> None:
    made, theirs = load(saved, "phalanx"), load(saved, "eager")
    assert convert(made) == 2 and convert(made) == 0
    assert convert(theirs) == 0
    close(logits(made), logits(theirs))
    for model in (made, theirs):
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    state = theirs.state_dict()
    for key, value in copy.deepcopy(made).state_dict().items():
        close(value, state[key])
    made.save_pretrained(tmp_path)
    close(logits(load(tmp_path, "eager")), logits(theirs))


def test_converted_experts_refuse_adapters(saved: Path) -> None:
    pytest.importorskip("peft")
    made = load(saved, "phalanx")
    convert(made)
    with pytest.raises(ValueError, match="^the weights of these experts are in the layout of expe"):
        with_lora(made)
    adapted = with_lora(load(saved, "phalanx"))
    with pytest.raises(ValueError, match="^GptOssExperts: these experts have an adapter: use the"):
        convert(adapted)
    close(logits(adapted), logits(with_lora(load(saved, "eager"))))  # nothing was converted


def test_converted_experts_refuse_parametrizations_and_optimizers(saved: Path) -> None:
    made = load(saved, "phalanx")
    optimizer = adam(made)
    with pytest.raises(ValueError, match="convert parameters before an optimizer is created"):
        convert(made)
    del optimizer
    convert(made)
    torch.nn.utils.parametrize.register_parametrization(
        made.model.layers[1].mlp.experts, "down_proj", torch.nn.Identity()
    )
    with pytest.raises(ValueError, match="GptOssExperts: converted experts have an adapter"):
        logits(made)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_other_implementations_refuse_converted_experts(saved: Path, implementation: str) -> None:
    made = load(saved, "phalanx")
    convert(made)
    made.set_experts_implementation(implementation)
    with pytest.raises((ValueError, RuntimeError)):
        logits(made)
