"""Training with weight gradients that go straight to Megatron-Core's buffers, and without."""

import copy
from typing import Any
from unittest import mock

import pytest
import torch

from phalanx.configs.knobs import put
from phalanx.configs.load import load
from phalanx.configs.schema import Config
from phalanx.configs.validate import validate
from tests.support.distributed import run_distributed
from tests.support.training import _Rank, _train, joined

SMALL = [
    "run.device=cpu",
    "run.save_interval=-1",
    "data=synthetic",
    "run.steps=2",
    "data.sequence_length=16",
    "data.micro_batch=1",
    "data.global_batch=4",
    "model.vocab_size=64",
    "model.hidden=32",
    "model.dense_ffn=48",
    "model.layers=2",
    "model.moe.ffn=16",
    "model.attention.head_dim=8",
    "model.init_std=0.1",
    "optim.lr=3e-2",
    "optim.warmup_steps=0",
    "optim.eps=1e-2",
]


def _run(cfg: Config) -> tuple[_Rank, tuple[int, int]]:
    """The run of a rank; how often a gradient went straight to its buffer, and replaced it."""
    from phalanx.kernels.expert_mlp import main_grad

    calls, added = [], main_grad.added

    def counted(parameter: torch.Tensor) -> Any:
        calls.append(not main_grad.buffer(parameter).add)
        return added(parameter)

    with mock.patch.object(main_grad, "added", counted):
        return _train(cfg), (len(calls), sum(calls))


def run(world: int, model: str, changes: dict[str, Any]) -> tuple[list, dict, tuple[int, int]]:
    cfg = copy.deepcopy(load([f"model={model}", *SMALL]))
    for path, value in changes.items():
        put(cfg, path, value)
    validate(cfg, world)
    ranks = run_distributed(_run, world, cfg, timeout=300)
    (calls,) = {calls for _, calls in ranks}
    steps = [r for r in ranks[0][0].records if "grad_norm" in r]
    return steps, joined([rank.after for rank, _ in ranks]), calls


def both(world: int, model: str, changes: dict[str, Any]) -> tuple[list, list]:
    """[losses and norms, weights] with fusion and without it, and that it took place."""
    results = []
    for fused in (True, False):
        knob = {"kernels.gradient_accumulation_fusion": fused}
        steps, after, calls = run(world, model, {**changes, **knob})
        parameters = 4 if model == "tiny_gpt_oss" else 2
        first = 2 * 2 * parameters  # of both steps and layers
        assert calls == ((4 // world * first, first) if fused else (0, 0))
        series = torch.tensor([[step["loss"], step["grad_norm"]] for step in steps])
        results.append([series, after])
    return results[0], results[1]


CASES = {
    "one rank": (1, {}),
    "expert parallel": (2, {"parallel.expert": 2}),
    "replicated experts": (2, {"parallel.expert": 1}),
    "no overlap": (2, {"parallel.expert": 1, "parallel.overlap": False}),
    "whole optimizer": (2, {"parallel.expert": 1, "parallel.distributed_optimizer": False}),
    "recomputed": (2, {"parallel.expert": 2, "run.recompute": ["moe"]}),
}


@pytest.mark.dist
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(name, marks=pytest.mark.slow) if name == "replicated experts" else name
        for name in CASES
    ],
)
def test_bf16_weights_are_bitwise_the_same(case: str) -> None:
    """Gradients of the torch backend, which rounds to bf16 and adds in fp32 in both ways."""
    world, changes = CASES[case]
    fused, plain = both(world, "tiny", {**changes, "kernels.backend": "torch"})
    assert torch.equal(fused[0], plain[0])
    assert fused[1].keys() == plain[1].keys()
    for key, value in plain[1].items():
        assert torch.equal(fused[1][key], value), key


@pytest.mark.dist
@pytest.mark.parametrize("backend", ["torch", pytest.param("reference", marks=pytest.mark.slow)])
def test_biases_are_the_same_within_rounding(backend: str) -> None:
    changes = {"kernels.backend": backend, "precision.recipe": "fp32", "parallel.expert": 2}
    fused, plain = both(2, "tiny_gpt_oss", changes)
    torch.testing.assert_close(fused[0], plain[0], rtol=2e-5, atol=0)
    for key, value in plain[1].items():
        torch.testing.assert_close(fused[1][key], value, rtol=1e-5, atol=1e-6)


@pytest.mark.dist
def test_stages_of_a_pipeline() -> None:
    changes = {"kernels.backend": "torch", "parallel.pipeline": 2}
    results = []
    for fused in (True, False):
        knob = {"kernels.gradient_accumulation_fusion": fused}
        results.append(run(2, "tiny", {**changes, **knob}))
    assert results[0][2] == (2 * 4 * 2, 2 * 2)  # steps, micro-batches, w1 and w2
    assert results[1][2] == (0, 0)
    for key, value in results[1][1].items():
        assert torch.equal(results[0][1][key], value), key


@pytest.mark.dist
def test_bf16_buffers_take_the_same_bits() -> None:
    changes = {"kernels.backend": "torch", "parallel.grad_dtype": "bf16"}
    (series, after), (others, theirs) = both(1, "tiny", changes)
    assert torch.equal(series, others) and (series > 0).all()
    for key, value in theirs.items():
        assert torch.equal(after[key], value), key


def _fuses(overrides: list[str]) -> bool:
    from phalanx.parallel.megatron import cpu

    cpu.install()
    from phalanx.moe.model.megatron_config import Layout, transformer_config

    return transformer_config(load(overrides), Layout(), on_cpu=False).gradient_accumulation_fusion


@pytest.mark.parametrize("kernels", ["torch", "megatron"])
def test_on_a_gpu_the_baseline_adds_to_buffers_like_all_others(kernels: str) -> None:
    for value in (True, False):
        knob = f"kernels.gradient_accumulation_fusion={str(value).lower()}"
        assert run_distributed(_fuses, 1, [f"kernels={kernels}", knob]) == [value]
