"""Bytes of parameters, gradients and optimizer against models that are really built."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from phalanx.configs.formats import in_bf16
from phalanx.configs.layout import pipeline_chunks
from phalanx.configs.load import load
from phalanx.configs.schema import Config
from phalanx.configs.validate import validate
from phalanx.moe.plan.cost.weights import checkpoint_bytes, stage_weights
from phalanx.parallel.checkpoint import commit
from tests.extras.planner.pages import PUBLISHED_V3
from tests.support import runs
from tests.support.distributed import run_distributed

SIZES = "run.device=cpu model.hidden=32 model.dense_ffn=48 model.moe.ffn=16 data.sequence_length=16"


def configured(overrides: str, world: int) -> Config:
    cfg = load([*SIZES.split(), *overrides.split()])
    validate(cfg, world)
    return cfg


def built(cfgs: list[Config]) -> list[dict[str, int]]:
    """(stage, bytes) of this rank for each configuration, after a step of the optimizer."""
    from phalanx.parallel.runtime import start

    runtime = start(seed=1, timeout=60, deterministic=False)
    return [_built(cfg, runtime) for cfg in cfgs]


def _built(cfg: Config, runtime: Any) -> dict[str, int]:
    import torch

    from phalanx.moe.run.setup import setup
    from phalanx.parallel.megatron.updated import parts

    job = setup(cfg, runtime)
    params = [p for chunk in job.engine.modules for p in chunk.parameters()]
    state = 0
    for part in parts(job.engine.optimizer):
        for group in part.optimizer.param_groups:
            for p in group["params"]:
                p.decoupled_grad = torch.zeros_like(p)
                p.grad = p.decoupled_grad
        part.optimizer.step()
        for group in part.optimizer.param_groups:
            for p in group["params"]:
                # Parameters are not held twice in fp32, nor where they are half of a master copy.
                own = in_bf16(cfg) and p.dtype != torch.bfloat16
                state += p.numel() * p.element_size() * own
                state += sum(
                    t.numel() * t.element_size()
                    for t in part.optimizer.state[p].values()
                    if torch.is_tensor(t)
                )
    return {
        "stage": job.groups.pg.pp.rank(),
        "parameters": sum(p.numel() * p.element_size() for p in params),
        "gradients": sum(p.main_grad.numel() * p.main_grad.element_size() for p in params),
        "optimizer": state,
        "buffers": sum(
            data.numel() * data.element_size()
            for chunk in job.engine.chunks
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
            for data in (buffer.param_data, buffer.grad_data)
            if data is not None
        ),
    }


MUON = []
if importlib.util.find_spec("emerging_optimizers"):
    MUON = [
        "model=tiny_gpt_oss optim.kind=muon",
        "model=tiny_deepseek optim.kind=muon optim.moments=bf16",
        "model=tiny_qwen3_next optim.kind=muon",
        "model=tiny_dense optim.kind=muon",
    ]
ONE = [
    "model=tiny",
    "model=tiny_dense model.mtp_layers=1",
    "model=tiny_gpt_oss",
    "model=tiny_deepseek",
    "model=tiny_qwen3_next",
    "model=tiny_deepseek model.tie_embeddings=true",
    "model=tiny model.attention.qk_norm=true parallel.grad_dtype=bf16 optim.moments=bf16",
    "model=tiny_gpt_oss model.moe.dense_layers=1 parallel.distributed_optimizer=false",
    "model=tiny parallel.distributed_optimizer=false optim.moments=bf16",
    "model=tiny precision=fp32",
    "model=tiny precision=fp32 optim.moments=bf16",
    *MUON,
]
TWO = [
    "model=tiny_deepseek",
    "model=tiny_dense parallel.pipeline=2 model.mtp_layers=1",
    "model=tiny_dense parallel.tensor=2",
    "model=tiny_qwen3_next",
    "model=tiny parallel.expert=1",
    "model=tiny_gpt_oss model.moe.dense_layers=1 parallel.tensor=2",
    "model=tiny_deepseek parallel.tensor=2",
    "model=tiny_deepseek parallel.pipeline=2 model.tie_embeddings=true",
    "model=tiny_gpt_oss parallel.pipeline=2 parallel.virtual_pipeline=2",
    "model=tiny parallel.context=2 optim.moments=bf16",
    "model=tiny parallel.distributed_optimizer=false",
    *(f"{name} parallel.tensor=2" for name in MUON),
]


def check(overrides: str, cfg: Config, ranks: list[dict[str, int]]) -> None:
    stages = stage_weights(cfg, len(ranks))
    for rank in ranks:
        expected = stages[rank["stage"]]
        assert rank["parameters"] == expected.parameter_bytes, overrides
        assert rank["gradients"] == expected.gradient_bytes, overrides
    # Shards end anywhere; all of them together hold every element once.
    held = sum(rank["optimizer"] for rank in ranks)
    estimated = sum(stages[rank["stage"]].optimizer_bytes for rank in ranks)
    assert 0 <= estimated - held <= 2 * 12 * len(ranks), overrides


@pytest.mark.parametrize("world", [1, 2])
def test_bytes_are_those_of_the_built_model(world: int) -> None:
    names = ONE if world == 1 else TWO
    cfgs = [configured(name, world) for name in names]
    by_rank = run_distributed(built, world, cfgs)
    for i, (name, cfg) in enumerate(zip(names, cfgs, strict=True)):
        check(name, cfg, [rank[i] for rank in by_rank])


def test_stages_hold_what_the_layout_says() -> None:
    cfg = load(PUBLISHED_V3)
    chunks = pipeline_chunks(cfg)
    assert (chunks[0], chunks[1], chunks[-1]) == ("Et", "tt", "mL") and len(chunks) == 32
    assert "".join(chunks).count("t") == 61
    once = ["experiment=gpt_oss_120b_64gpu", "parallel.virtual_pipeline=1"]
    assert pipeline_chunks(load(once)) == [
        "E" + 10 * "t",
        10 * "t",
        10 * "t",
        6 * "t" + "L",  # an output layer of 201,088 words is as much work as three layers
    ]


def test_all_ranks_together_hold_the_model_once() -> None:
    """DeepSeek-V3 on 1024 ranks: parameters of experts over all stages, and state over replicas."""
    from phalanx.configs.arithmetic.accounting import parameters

    cfg, world = load(PUBLISHED_V3), 1024
    stages, total = stage_weights(cfg, world), parameters(cfg.model)
    assert sum(w.expert for w in stages) * 64 == total.routed_experts
    # The embedding is held again by the stage of the prediction layer, and tensor ranks cut it.
    dense = total.total - total.routed_experts + total.embedding
    assert sum(w.dense for w in stages) * 2 == pytest.approx(dense, rel=0.01)
    assert sum(w.optimizer_bytes for w in stages) * 128 == pytest.approx(
        12 * (total.total + total.embedding), rel=0.01
    )


@pytest.mark.skipif(not MUON, reason="emerging-optimizers is not installed")
def test_the_rank_that_owns_most_matrices_is_estimated() -> None:
    names = [f"{name} parallel.expert=1 parallel.overlap=false" for name in MUON]
    cfgs = [configured(name, 2) for name in names]
    by_rank = run_distributed(built, 2, cfgs)
    for i, cfg in enumerate(cfgs):
        (stage,) = stage_weights(cfg, 2)
        most = max(rank[i]["optimizer"] for rank in by_rank)
        assert stage.optimizer_bytes == pytest.approx(most, rel=1e-2)
        buffers = max(rank[i]["buffers"] for rank in by_rank)
        exact = stage.parameter_bytes + stage.gradient_bytes + stage.padding_bytes
        assert buffers == pytest.approx(exact, rel=0.03)


@pytest.mark.parametrize(
    "given",
    [
        "precision=bf16",
        "precision=fp32",
        "precision=bf16 optim.moments=bf16",
        "precision=bf16 optim.ema=0.9 parallel.distributed_optimizer=false",
        "precision=bf16 parallel.tensor=2",
        *(f"precision={p} optim=muon" for p in ("bf16", "fp32") if MUON),
    ],
)
def test_a_checkpoint_has_the_size_that_is_expected(given: str, tmp_path: Path) -> None:
    words = [*given.split(), "model=tiny", "data=synthetic", "run.device=cpu", "run.name=run"]
    words += ["run.steps=1", "data.global_batch=2", "data.micro_batch=1", f"run.dir={tmp_path}"]
    words += ["data.sequence_length=64"]
    main = runs.run(2 if "tensor" in given else 1, words)[0]
    assert main.code == 0, main.err
    size, _ = commit.total_bytes(tmp_path / "run/checkpoints/step_00000001")
    assert size == pytest.approx(checkpoint_bytes(load(words)), rel=0.02)
