"""Sharded parameters train as unsharded ones do."""

from typing import Any

import pytest
import torch

from tests.support.distributed import run_distributed
from tests.support.scheduling import slow
from tests.support.training import Trained, trained

SMALL = [
    *["model.layers=3", "model.hidden=32", "model.vocab_size=64", "model.dense_ffn=48"],
    *["model.moe.ffn=16", "model.init_std=0.1", "data.sequence_length=16", "data.micro_batch=1"],
    *["optim.warmup_steps=0", "optim.schedule=constant", "optim.lr=2e-2", "run.steps=4"],
]
DEEPSEEK = ["model=tiny_deepseek", *SMALL]
TINY = ["model=tiny", *SMALL, "model.attention.head_dim=8"]
GPT_OSS = ["model=tiny_gpt_oss", *SMALL, "model.attention.head_dim=8"]
ONE = ["data.global_batch=2", "parallel.expert=1"]
BF16 = ["precision=bf16", "optim.moments=bf16", "parallel.grad_dtype=bf16"]
CONTEXT = ["parallel.context=2", "data.global_batch=1"]
ZERO3 = "parallel.distributed_optimizer=zero3"


CHUNKS = ["model.layers=4", "parallel.pipeline=2", "parallel.virtual_pipeline=2"]


def both(world: int, overrides: list[str]) -> tuple[Trained, Trained]:
    return trained(world, overrides), trained(world, [*overrides, ZERO3])


@pytest.mark.dist
@pytest.mark.parametrize(
    "overrides",
    [
        [*GPT_OSS, *ONE, "precision=fp32", "run.eval_interval=1"],
        [*DEEPSEEK, *ONE, *BF16, "model.mtp_layers=2", "run.recompute=[full]"],
        *slow(
            [*DEEPSEEK, "data.global_batch=2", *BF16, "parallel.expert=2"],
            [*TINY, *ONE, "precision=fp32", "model.tie_embeddings=true", "model.mtp_layers=1"],
            [*DEEPSEEK, *ONE, "precision=fp8_block"],
            [*TINY, *ONE, "precision=fp32", "run.recompute=[norm,mlp,expert_h]"],
            [*TINY, *ONE, "precision=fp32", "run.offload=[residual]", "optim.qk_clip=0.5"],
            [*TINY, *CONTEXT, "precision=fp32", "parallel.expert=1"],
            ["model=tiny_qwen3_next", *SMALL, *ONE, "precision=fp32"],
        ),
    ],
    ids=["gpt_oss", "mtp", "expert", "tied", "fp8", "recompute", "offload", "context", "linear"],
)
def test_one_micro_batch_on_two_ranks_has_the_same_bits(overrides: list[str]) -> None:
    """Sums of two have no order. Ranks have other parts of the norm, in other orders."""
    plain, sharded = both(2, overrides)
    for name in plain.steps[0].keys() & {"loss", "mtp_loss"}:
        assert sharded.series(name) == plain.series(name)
    assert sharded.series("grad_norm") == pytest.approx(plain.series("grad_norm"), rel=1e-9)
    assert sharded.valid_losses == plain.valid_losses
    assert all(torch.equal(sharded.after[key], plain.after[key]) for key in plain.after)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("world", "overrides"),
    [
        (4, [*DEEPSEEK, *CHUNKS, "data.global_batch=4", "parallel.expert=1"]),
        *slow(
            (2, [*TINY, "data.global_batch=6", "parallel.expert=1"]),
            (4, [*DEEPSEEK, "data.global_batch=4", "parallel.expert=2"]),
            (4, [*DEEPSEEK, "data.global_batch=8", "parallel.expert=1", "parallel.pipeline=2"]),
            (4, [*TINY, "data.global_batch=8", "parallel.expert=2", "parallel.dispatch=alltoall"]),
            (4, [*TINY, "data.global_batch=2", "parallel.expert=2", "parallel.tensor=2"]),
        ),
    ],
    ids=["chunks", "micro-batches", "expert", "stages", "beside exchanges", "tensor"],
)
def test_more_of_them_differ_by_roundings(world: int, overrides: list[str]) -> None:
    """Each micro-batch is summed over ranks, and not each rank over micro-batches."""
    plain, sharded = both(world, [*overrides, "precision=fp32"])
    assert sharded.series("loss") == pytest.approx(plain.series("loss"), rel=2e-6)
    sharded.has_weights_of(plain, change=1e-3)


@pytest.mark.dist
@pytest.mark.parametrize(
    "overrides",
    [
        [*DEEPSEEK, "data.global_batch=8", "parallel.expert=1", "model.mtp_layers=1"],
        *slow(
            [*TINY, "data.global_batch=4", "parallel.expert=2"],
            [*TINY, "data.global_batch=8", "parallel.pipeline=2", "parallel.expert=1"],
            [*DEEPSEEK, *CHUNKS, "data.global_batch=4", "parallel.expert=1"],
        ),
    ],
    ids=["all", "experts once in a node", "stages", "chunks"],
)
def test_shards_of_a_node(overrides: list[str]) -> None:
    """Four ranks on two pretended nodes; with stages, each stage is on one."""
    overrides = [*overrides, "precision=fp32", "run.eval_interval=2"]
    plain = trained(4, overrides)
    for node_ranks in (2, 1) if "parallel.pipeline=2" in overrides else (2,):
        sharded = trained(4, [*overrides, f"{ZERO3}_node"], node_ranks=node_ranks)
        assert sharded.series("loss") == pytest.approx(plain.series("loss"), rel=2e-6)
        assert sharded.valid_losses == pytest.approx(plain.valid_losses, rel=2e-6)
        sharded.has_weights_of(plain, change=1e-3)


def _abandoned(folder: Any) -> tuple[list[float], list[float]]:
    """Losses after a step that broke off in a layer, and those of its kind without sharding."""
    from tests.parallel.checkpoint.checkpoints import build, train

    results = []
    for kind in (True, "zero3"):
        engine, groups = build(layers=4, distributed_optimizer=kind)
        train(engine, groups, 0, 1)
        broken = engine.modules[0].decoder.layers[1].register_forward_hook(_break)
        with pytest.raises(InterruptedError):
            train(engine, groups, 1, 2)
        broken.remove()
        engine.abandon_step()
        results.append([loss for loss, _ in train(engine, groups, 1, 4)])
    return results[0], results[1]


def _break(*_: Any) -> None:
    raise InterruptedError


@pytest.mark.dist
def test_a_step_that_broke_off_leaves_nothing(tmp_path: Any) -> None:
    for plain, sharded in run_distributed(_abandoned, 2, tmp_path):
        assert sharded == pytest.approx(plain, rel=1e-4)
