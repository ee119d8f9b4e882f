"""The fused kernels inside models of other frameworks, in bf16, eagerly and in CUDA graphs."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():  # before an import of seconds
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("transformers")

from transformers import GptOssConfig, GptOssForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from phalanx.adapters.transformers import convert
from phalanx.kernels.api import LAYOUTS
from tests.parallel.dispatcher.test_symm_gpu import compare

pytestmark = pytest.mark.gpu
GPT_OSS = "transposed_interleaved"
_SIZES: dict[str, Any] = dict(
    vocab_size=512,
    hidden_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    num_experts_per_tok=2,
)
MODELS = {
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**_SIZES, moe_intermediate_size=128, num_experts=8),
    ),
    "gpt_oss": (
        GptOssForCausalLM,
        GptOssConfig(
            **_SIZES,
            intermediate_size=256,
            num_local_experts=8,
            layer_types=["full_attention"] * 2,
        ),
    ),
}


def model(name: str, implementation: str) -> Any:
    torch.manual_seed(0)
    model_class, config = MODELS[name]
    with torch.device("cuda"):
        return model_class._from_config(
            copy.deepcopy(config), dtype=torch.bfloat16, experts_implementation=implementation
        )


def gradients(made: Any, ids: Tensor) -> list[Tensor]:
    """Logits and the gradients of all parameters but those of the experts, in any layout."""
    out = made(ids, labels=ids)
    others = [p for name, p in made.named_parameters() if "experts" not in name]
    return [out.logits, *torch.autograd.grad(out.loss, others)]


def test_models_agree() -> None:
    """As exact as theirs over all: a rounding of hidden states may change a router's choice."""
    ours, theirs = model("qwen3_moe", "phalanx"), model("qwen3_moe", "eager")
    ours.load_state_dict(theirs.state_dict())
    ids = torch.randint(0, 512, (2, 256), device="cuda")
    exact = gradients(copy.deepcopy(theirs).float(), ids)

    def error(made: Any) -> float:
        pairs = zip(gradients(made, ids), exact, strict=True)
        return sum(((got - want).norm() / want.norm()).item() ** 2 for got, want in pairs)

    assert error(ours) <= 1.2 * error(theirs)


@pytest.mark.parametrize("name", MODELS)
def test_experts_are_as_exact_as_theirs(name: str) -> None:
    """Experts alone: a rounding of hidden states may change a router's choice."""
    ours, theirs = model(name, "phalanx"), model(name, "eager")
    with torch.no_grad():
        for key, parameter in theirs.named_parameters():
            if "experts" in key:
                parameter.normal_(0, 0.1)
    ours.load_state_dict(theirs.state_dict())
    exact = copy.deepcopy(theirs).float()
    x = torch.randn(300, 256, device="cuda").bfloat16()
    idx = torch.rand(300, 8, device="cuda").topk(2).indices
    prob = torch.rand(300, 2, device="cuda").bfloat16()
    want = exact.model.layers[0].mlp.experts(x.float(), idx, prob.float())
    errors = [
        (made.model.layers[0].mlp.experts(x, idx, prob).float() - want).norm() / want.norm()
        for made in (ours, theirs)
    ]
    assert errors[0] <= 1.2 * errors[1] + 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_a_captured_step_has_the_bits_of_an_eager_one(name: str) -> None:
    made = model(name, "phalanx")
    ids = torch.randint(0, 512, (2, 256), device="cuda")
    parameters = list(made.parameters())

    def step() -> tuple[Tensor, ...]:
        hidden = made.model(ids, use_cache=False)[0]
        return torch.autograd.grad(hidden.float().square().mean(), parameters, allow_unused=True)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # model and ids come from it
    with torch.cuda.stream(stream):
        want = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        got = step()
    graph.replay()
    torch.cuda.synchronize()
    experts = 0
    for (key, _), a, b in zip(made.named_parameters(), got, want, strict=True):
        if "experts" in key:
            assert torch.equal(a, b), key
            experts += 1
    assert experts >= 4


def test_converted_experts_have_the_bits_of_those_that_are_not() -> None:
    plain, made = model("gpt_oss", "phalanx"), model("gpt_oss", "phalanx")
    assert convert(made) == 2
    made.load_state_dict(plain.state_dict())
    x = torch.randn(300, 256, device="cuda").bfloat16()
    idx = torch.rand(300, 8, device="cuda").topk(2).indices
    prob = torch.rand(300, 2, device="cuda").bfloat16()
    results = []
    for whole, layout in ((plain, "halves"), (made, GPT_OSS)):
        experts = whole.model.layers[0].mlp.experts
        leaf = x.clone().requires_grad_()
        out = experts(leaf, idx, prob)
        out.float().square().sum().backward()
        results.append([out, leaf.grad, experts.down_proj_bias.grad])
        stored = LAYOUTS[layout]  # of the state dict, beside that of the gradient
        for name in ("gate_up_proj", "down_proj"):
            grad = getattr(experts, name).grad
            results[-1].append(stored.from_kernels(grad, fc1=name.startswith("gate")))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(("source", "target"), [("phalanx", "eager"), ("eager", "phalanx")])
def test_an_adapter_of_gpt_oss_goes_both_ways(source: str, target: str, tmp_path: Path) -> None:
    """Trained in bf16 with one side's experts, loaded on the other's: both as exact as theirs."""
    peft = pytest.importorskip("peft")
    base = model("gpt_oss", "eager")
    with torch.no_grad():
        for key, parameter in base.named_parameters():
            if "experts" in key:
                parameter.normal_(0, 0.1)
    base.save_pretrained(tmp_path / "model")

    def load(implementation: str, dtype: torch.dtype) -> Any:
        made = GptOssForCausalLM.from_pretrained(
            tmp_path / "model", dtype=dtype, experts_implementation=implementation
        )
        return made.cuda()

    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=[], target_parameters=names)
    made = peft.get_peft_model(load(source, torch.bfloat16), config)
    optimizer = torch.optim.AdamW([p for p in made.parameters() if p.requires_grad], lr=0.02)
    ids = torch.randint(0, 512, (2, 256), device="cuda")
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = made(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.98 * losses[0]
    made.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        without = load("eager", torch.float32)(ids).logits
        exact = peft.PeftModel.from_pretrained(load("eager", torch.float32), tmp_path / "adapter")
        want = exact(ids).logits
        sides = {name: load(name, torch.bfloat16) for name in {"eager", target}}
        sides = {
            k: peft.PeftModel.from_pretrained(m, tmp_path / "adapter") for k, m in sides.items()
        }
        errors = {k: (m(ids).logits - want).norm().item() for k, m in sides.items()}
        trained = (made(ids).logits - want).norm().item()
        effect = (without - want).norm().item()
    bound = 1.5 * errors["eager"] + 0.05 * effect
    assert bound < 0.5 * effect
    assert trained < bound and errors[target] < bound


def test_experts_over_two_gpus_are_one_model(tmp_path: Path) -> None:
    """Over `symm`, in programs of their own."""
    pytest.importorskip("accelerate")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    program = Path(__file__).with_name("transformers_ranks.py")
    out = compare(2, str(tmp_path), program=program, least=2)
    assert out.count("over symm") == 2
