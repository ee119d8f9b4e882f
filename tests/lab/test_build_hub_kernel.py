"""`scripts/lab/release/build_hub_kernel.py`: a copy of the kernels that is imported by any name."""

import ast
import importlib
import importlib.util
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.kernels import api, custom_op
from phalanx.kernels.cache import Cache
from phalanx.scripts.lab.release import build_hub_kernel

ALONE = """
import importlib.util, sys
class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("phalanx", "megatron", "transformers", "cutlass", "hydra"):
            raise ImportError(f"a copy imports {name}")
sys.meta_path.insert(0, Refuses())
spec = importlib.util.spec_from_file_location("any_name_3", sys.argv[1] + "/__init__.py")
hub = sys.modules["any_name_3"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hub)

import torch
torch.manual_seed(0)
x, w1, w2 = torch.randn(16, 64), torch.randn(8, 256, 64) / 8, torch.randn(8, 64, 128) / 8
prob, idx = torch.randn(16, 8).softmax(-1).topk(2)
ours, plain = ([t.clone().requires_grad_() for t in (x, prob, w1, w2)] for _ in range(2))
def reference(x, prob, w1, w2):
    gate, up = torch.einsum("td,tkfd->tkf", x, w1[idx]).chunk(2, -1)
    return torch.einsum("tk,tkf,tkdf->td", prob, torch.nn.functional.silu(gate) * up, w2[idx])
for backend in ("torch", "reference"):
    out = hub.grouped_experts(ours[0], idx, *ours[1:], backend=backend)
    want = reference(*plain)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
    weight = torch.randn_like(out)
    grads = torch.autograd.grad((out * weight).sum(), ours)
    for got, right in zip(grads, torch.autograd.grad((want * weight).sum(), plain)):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-4)
layer = hub.MoE(hidden=64, ffn=32, num_experts=8, top_k=2, aux_coef=0.01, shared_ffn=32)
out, losses = layer(x)
(out.square().mean() + losses["aux"]).backward()
assert layer.router.weight.grad.abs().sum() > 0
counts = torch.bincount(idx.flatten(), minlength=8)
rows = hub.SortedRows(counts)
assert hub.experts(torch.randn(32, 64), rows, (w1, w2)).shape == (32, 64)
chosen, _ = hub.router_topk(torch.eye(8), 2)
assert chosen[:, 0].tolist() == [*range(8)]
for recipe in ("fp8_block", "mxfp8"):
    size = dict(experts=4, hidden=128, ffn=128, top_k=2, dtype=torch.bfloat16)
    module = hub.GroupedMLP(**size, recipe=recipe)
    assert module(torch.randn(9, 128).bfloat16(), idx[:9] % 4, prob[:9]).isfinite().all()
print(sorted({name.partition(".")[0] for name in sys.modules} & {"triton", "numpy"}))
"""
"""Loads the copy that is its argument where nothing else of this project is, and uses it."""


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return build_hub_kernel.build(tmp_path_factory.mktemp("hub"))


def loaded(variant: Path, name: str) -> Any:
    """Import a copy as `kernels` does: by its path, under a name of its own."""
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    assert spec and spec.loader
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_repository_has_a_card_and_a_variant_for_each_backend(variants: list[Path]) -> None:
    card = (variants[0].parents[1] / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: kernels\n") and "\n- kernel\n" in card
    assert "`grouped_experts`" in card and "nvidia-cutlass-dsl" in card
    known = {path.name: json.loads((path / "metadata.json").read_text()) for path in variants}
    assert {name: entry["backend"]["type"] for name, entry in known.items()} == {
        "torch-cuda": "cuda",
        "torch-cpu": "cpu",
    }
    assert len({entry["id"] for entry in known.values()}) == 2


def test_no_import_and_no_path_in_a_copy_begins_with_this_package(variants: list[Path]) -> None:
    for path in variants[0].rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.ImportFrom):
                names = [] if node.level else [str(node.module)]
            else:
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            assert not {n.partition(".")[0] for n in names} & {"phalanx", "megatron"}, path
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not build_hub_kernel._PATH.fullmatch(node.value), (path, node.value)


def test_every_relative_import_of_a_copy_is_in_it(variants: list[Path]) -> None:
    root = variants[0]
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.ImportFrom) and node.level:
                folder = path.parents[node.level - 1]
                target = folder.joinpath(*(node.module or "").split("."))
                assert folder.is_relative_to(root), (path, node.lineno)
                assert target.is_dir() or target.with_suffix(".py").is_file(), (path, node.lineno)


def test_a_copy_computes_where_nothing_else_of_this_project_is(variants: list[Path]) -> None:
    command = [sys.executable, "-P", "-c", ALONE, variants[1]]
    done = subprocess.run(command, cwd=variants[1].anchor, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_imports_are_rewritten_by_place_and_strings_by_value() -> None:
    source = b'''"""phalanx.kernels"""
from phalanx.kernels import api  # from phalanx.kernels
from phalanx.kernels.api import (
    grouped_experts,
)
TABLE = {"a": "phalanx.kernels.api:MoE", "b": "phalanx knows"}
'''
    text = build_hub_kernel.portable(source, "kernels/sm90/file.py").decode()
    assert "from ...kernels import api  # from phalanx.kernels\n" in text
    assert "from ...kernels.api import (\n    grouped_experts,\n)" in text
    namespace = {"__name__": "other.kernels.sm90.file"}
    exec(text.rpartition("TABLE")[1] + text.rpartition("TABLE")[2], namespace)
    assert namespace["TABLE"] == {"a": "other.kernels.api:MoE", "b": "phalanx knows"}
    with pytest.raises(ValueError, match="^a.py:1: write `from phalanx... import`$"):
        build_hub_kernel.portable(b"import phalanx.kernels.api", "a.py")


def test_copies_and_the_package_work_in_one_process(variants: list[Path]) -> None:
    hubs = [loaded(path, f"hub_copy_{number}") for number, path in enumerate(variants)]
    x, w1, w2 = torch.randn(16, 64), torch.randn(8, 256, 64), torch.randn(8, 64, 128)
    prob, idx = torch.randn(16, 8).softmax(-1).topk(2)
    want = api.grouped_experts(x, idx, prob, w1, w2)
    for number, hub in enumerate(hubs):
        assert torch.equal(hub.grouped_experts(x, idx, prob, w1, w2), want)
        name = f"hub_copy_{number}"
        ops = sys.modules[f"{name}.kernels.custom_op"].OPS
        # The package may have those of modules that a copy has not imported.
        assert ops.keys() == {
            op.replace("phalanx::", f"{name}::")
            for op, own in custom_op.OPS.items()
            if own.compute.__module__.replace("phalanx.", f"{name}.", 1) in sys.modules
        }
        assert f"{name}::plan" in ops
        assert hub.grouped_experts is not api.grouped_experts
    with pytest.raises(hubs[0].KernelUnavailable, match="backend=fused"):
        hubs[0].grouped_experts(x, idx, prob, w1, w2, backend="fused")


def test_a_copy_compiles_kernels_under_names_of_its_own(
    variants: list[Path], tmp_path: Path
) -> None:
    pytest.importorskip("cutlass")
    from phalanx.kernels.sm90.jit import launch
    from phalanx.kernels.sm90.routing.plan import GatherConfig, GatherKernel

    loaded(variants[0], "hub_compiles")
    own = importlib.import_module("hub_compiles.kernels.sm90.jit.launch")
    plan = importlib.import_module("hub_compiles.kernels.sm90.routing.plan")
    names = {
        launch.entry_name(GatherKernel, GatherConfig()),
        own.entry_name(plan.GatherKernel, plan.GatherConfig()),
    }
    assert len(names) == 2
    machine_code = own.build(plan.GatherKernel, plan.GatherConfig(), Cache(tmp_path))
    assert machine_code.startswith(b"\x7fELF") and b"sm_90a" in machine_code
    assert {path.name for path in tmp_path.iterdir()} < names


def test_kernels_loads_a_copy_and_kernelizes_models(variants: list[Path]) -> None:
    try:
        metadata.version("kernels")
    except metadata.PackageNotFoundError:
        pytest.skip("needs kernels, which scripts/lab/test_adapters.sh installs")
    from transformers import GptOssConfig, Qwen3MoeConfig
    from transformers.models.gpt_oss import modeling_gpt_oss
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    hf = importlib.import_module("kernels")

    repository = variants[0].parents[1]
    hub = hf.get_local_kernel(repository)
    assert hub.__name__.startswith("phalanx_moe_")
    sizes = dict(hidden_size=64, intermediate_size=32, num_experts_per_tok=2)
    sizes |= dict(num_hidden_layers=1, vocab_size=64, num_attention_heads=2, num_key_value_heads=1)
    oss = GptOssConfig(**sizes, num_local_experts=4, head_dim=32)
    qwen = Qwen3MoeConfig(**sizes, num_experts=4, moe_intermediate_size=32, head_dim=32)
    mapping = {
        name: {device: hf.LocalLayerRepository(repository, layer_name=name) for device in DEVICES}
        for name in ("MegaBlocksMoeMLP", "Experts")
    }
    hf.replace_kernel_forward_from_hub(modeling_gpt_oss.GptOssMLP, "MegaBlocksMoeMLP")
    hf.replace_kernel_forward_from_hub(modeling_qwen3_moe.Qwen3MoeExperts, "Experts")
    for kind, config in (
        (modeling_gpt_oss.GptOssMLP, oss),
        (modeling_qwen3_moe.Qwen3MoeSparseMoeBlock, qwen),
    ):
        block = kind(config).double()
        for parameter in block.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        x = torch.randn(2, 8, 64, dtype=torch.float64)
        want = results(block, x)
        with hf.use_kernel_mapping(mapping):
            block = hf.kernelize(block, mode=hf.Mode.TRAINING | hf.Mode.TORCH_COMPILE, device="cpu")
        replaced = [m for m in block.modules() if "forward" in vars(m)]
        assert [m.forward.__module__ for m in replaced] == [f"{hub.__name__}.adapters.hub_layers"]
        for got, right in zip(results(block, x), want, strict=True):
            assert (got - right).norm() <= 1e-6 * right.norm()  # weights of experts are fp32


DEVICES = ("cuda", "cpu")


def results(block: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Outputs of a block, and gradients of its parameters."""
    block.zero_grad()
    out = block(x)
    outputs = list(out) if isinstance(out, tuple) else [out]
    outputs[0].square().sum().backward()
    grads = [p.grad for p in block.parameters() if p.grad is not None]
    assert len(grads) > 2
    return [t.detach().clone() for t in (*outputs, *grads)]
