"""Whole models of transformers with the kernels' experts, against its own."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

pytest.importorskip("transformers")

import phalanx.adapters.transformers  # noqa: F401  (registers)
from tests.adapters.hf_models import MODELS, close, model, tokens
from tests.kernels.compiling import compiling
from tests.support.scheduling import mostly_slow


def gradients(made: Any) -> dict[str, Tensor]:
    """Gradients by the names of parameters."""
    named = made.named_parameters()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named}


def loss(made: Any, **options: Any) -> Tensor:
    value: Tensor = made(tokens(), labels=tokens(), **options).loss
    return value


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients(name: str) -> None:
    ours, theirs = model(name, "phalanx"), model(name, "eager")
    close(ours(tokens()).logits, theirs(tokens()).logits)
    for made in (ours, theirs):
        loss(made).backward()
    want = gradients(theirs)
    assert any(value.any() for key, value in want.items() if "experts" in key)
    got = gradients(ours)
    assert got.keys() == want.keys()
    for key, value in want.items():
        close(got[key], value)


@pytest.mark.parametrize("name", MODELS)
def test_three_steps_and_a_saved_model(name: str, tmp_path: Path) -> None:
    """The saved model has transformers' keys and layout: it is loaded with its own experts too."""
    ours, theirs = model(name, "phalanx"), model(name, "eager")
    for made in (ours, theirs):
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            loss(made).backward()
            optimizer.step()
    state = ours.state_dict()
    for key, value in theirs.state_dict().items():
        close(state[key], value)
    ours.save_pretrained(tmp_path)
    want = ours(tokens()).logits
    for implementation in ("phalanx", "eager"):
        loaded = type(ours).from_pretrained(tmp_path, experts_implementation=implementation)
        for key, value in loaded.state_dict().items():
            assert torch.equal(value, state[key])
        close(loaded(tokens()).logits, want)


def test_a_config_chooses_the_experts() -> None:
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(MODELS["gpt_oss"][1])
    made = AutoModelForCausalLM.from_config(config, experts_implementation="phalanx")
    experts = made.model.layers[0].mlp.experts
    assert experts.gate_up_proj.shape == (5, 48, 80)  # as in transformers
    assert "_phalanx" in vars(experts)  # recognised


def test_experts_are_chosen_later() -> None:
    made, theirs = model("qwen3_moe", "eager"), model("qwen3_moe", "eager")
    made.set_experts_implementation("phalanx")
    close(made(tokens()).logits, theirs(tokens()).logits)


def test_autocast_and_checkpointing() -> None:
    ours, theirs = model("qwen3_moe", "phalanx"), model("qwen3_moe", "eager")
    for made in (ours, theirs):
        made.gradient_checkpointing_enable()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss(made).backward()
    want = gradients(theirs)
    for key, value in gradients(ours).items():
        scale = want[key].abs().max().item()
        torch.testing.assert_close(value, want[key], rtol=0.1, atol=0.05 * scale)


def test_weights_in_bf16_take_rows_in_fp32() -> None:
    """Norms and routers that are kept in fp32 feed experts in bf16."""
    experts = model("qwen3_moe", "phalanx").model.layers[0].mlp.experts.bfloat16()
    x, idx = torch.randn(6, 48), torch.tensor([[0, 3]] * 6)
    out = experts(x, idx, torch.full((6, 2), 0.5))
    assert out.dtype == torch.float32
    assert torch.equal(out, experts(x.bfloat16(), idx, torch.full((6, 2), 0.5)).float())


def test_sharded_parameters(process_group: None) -> None:
    ours, theirs = model("gpt_oss", "phalanx"), model("gpt_oss", "eager")
    mesh = init_device_mesh("cpu", (1,))
    for layer in ours.model.layers:
        for name, parameter in list(layer.mlp.experts.named_parameters()):
            sharded = torch.nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)]))
            setattr(layer.mlp.experts, name, sharded)
    for made in (ours, theirs):
        loss(made).backward()
    grad = ours.model.layers[0].mlp.experts.gate_up_proj.grad
    assert isinstance(grad, DTensor)
    want = theirs.model.layers[0].mlp.experts.gate_up_proj.grad
    close(grad.to_local(), want)


@pytest.fixture
def process_group(tmp_path: Path) -> Any:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@mostly_slow("name", ["qwen3_moe", "gpt_oss"], "qwen3_moe")
def test_compiles_as_one_graph(name: str) -> None:
    made = model(name, "phalanx", layers=1)
    with compiling():
        whole = torch.compile(made, backend="aot_eager", fullgraph=True)
        grads = []
        for run in (made, whole):
            made.zero_grad()
            loss(run).backward()
            grads.append([p.grad.clone() for p in made.parameters() if p.grad is not None])
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want)


def test_compiles_as_one_graph_for_any_number_of_tokens() -> None:
    block = model("gpt_oss", "phalanx").model.layers[0].mlp
    with compiling():
        whole = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=True)
        for tokens in (11, 7):
            x = torch.randn(3, tokens, 48)
            results = []
            for run in (block, whole):
                leaves = [x.clone().requires_grad_(), *block.parameters()]
                out = run(leaves[0])[0]
                results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
            for got, want in zip(*results, strict=True):
                torch.testing.assert_close(got, want)
