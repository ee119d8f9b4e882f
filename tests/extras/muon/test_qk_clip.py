"""QK-clip: heads end at the limit and others as they were, in weights and in all that is kept."""

import contextlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from phalanx.configs.schema import Config
from phalanx.extras.muon import qk_clip
from phalanx.extras.muon.qk_clip import clip_factors
from tests.moe.model.test_max_logits import (
    CP2,
    DEEPSEEK,
    EP1,
    EP2,
    GPT_OSS,
    PP2,
    TINY,
    TP2,
    configured,
    trainer_of,
)
from tests.support.distributed import run_distributed
from tests.support.runs import exact, records, run
from tests.support.scheduling import mostly_slow, slow
from tests.support.sync_free import sync_free
from tests.support.training import Trained, trained

MUON = {"optim.kind": "muon"}
MIXED = "optim=muon optim.moments=bf16"
BF16 = {"precision.recipe": "bf16"}
ONE_LAYER = {"model.layers": 1, "model.mtp_layers": 0, "model.moe.dense_layers": 0}
"""No other layer's input depends on what is clipped."""


def test_factors() -> None:
    most = torch.tensor([[200.0, 100.0, 1.0, 0.0, -500.0, float("-inf"), 400.0]])
    assert clip_factors(most, 100.0).tolist() == [[0.5, 1, 1, 1, 1, 1, 0.25]]


# --- logits after a clip --------------------------------------------------------------------------


def _clipped(cfg: Config) -> tuple[float, list[Tensor]]:
    """Limit of the second of two updates that only clip; tables of a batch before and after them.

    The limit of the first update is above all logits, that of the second among them.
    """
    from phalanx.moe.router import balance

    with trainer_of(cfg) as trainer:
        engine, tops = trainer.job.engine, trainer.job.max_logits
        for module in engine.modules:
            for name, p in module.named_parameters():
                if name.endswith("linear_qkv.bias"):  # they begin as zeros
                    torch.nn.init.normal_(p, std=0.5)
        engine.optimizer.reload_model_params()
        batches = trainer.data.loader.next_step()
        engine.train()

        def measured() -> tuple[float, Tensor]:
            before = balance.snapshot(engine.modules)
            totals = trainer.compute(batches, before, measure_logits=True)
            return totals.norm, tops.most_LH.clone()

        norm, before = measured()
        limit, tables = float(before.quantile(0.4)), [before]
        low = mock.patch.object(qk_clip, "clip_factors", lambda most, _: clip_factors(most, limit))
        for updated in (contextlib.nullcontext(), low):
            with updated, sync_free():
                engine.step(norm)
            norm, table = measured()
            tables.append(table)
        return limit, tables


@pytest.mark.dist
@pytest.mark.parametrize(
    ("overrides", "world", "changes"),
    [
        (GPT_OSS, 1, {}),
        ([*TINY, "model.bias=true"], 1, {"model.attention.kv_heads": 4} | MUON),
        (DEEPSEEK, 1, {}),
        (DEEPSEEK, 1, {"model.attention.q_lora_rank": 0} | MUON),
        ([*TINY, "model.attention.output_gate=true"], 1, {"model.attention.kv_heads": 4}),
        ([*TINY, "model.attention.output_gate=true"], 2, TP2 | EP1 | MUON),
        (GPT_OSS, 2, TP2 | EP1),
        (TINY, 2, TP2 | EP1 | {"model.attention.kv_heads": 1}),
        (GPT_OSS, 2, EP2 | {"parallel.distributed_optimizer": False}),
        *slow((DEEPSEEK, 2, TP2 | EP2 | MUON), (GPT_OSS, 2, CP2 | EP1)),
    ],
)
def test_heads_end_at_the_limit(overrides: list[str], world: int, changes: dict[str, Any]) -> None:
    """Heads above the limit change, and those below keep their bits."""
    still = ONE_LAYER | {"optim.lr": 1e-30, "optim.min_lr": 0.0, "optim.weight_decay": 0.0}
    cfg = configured(overrides, still | {"optim.qk_clip": 1e9} | changes, world)
    results = run_distributed(_clipped, world, cfg)
    limit, (before, same, after) = results[0]
    assert torch.equal(before, same)
    assert all(torch.equal(tables[2], after) for _, tables in results)
    high = before > limit
    assert high.any() and not high.all()
    expected = torch.full_like(before, limit)[high]
    torch.testing.assert_close(after[high], expected, rtol=2e-6, atol=0)
    assert torch.equal(after[~high], before[~high])


# --- training -------------------------------------------------------------------------------------

STEPS = {"run.steps": 2, "optim.lr": 1e-2, "optim.eps": 1e-2}
LOW = {"optim.qk_clip": 2.0}


@pytest.fixture(scope="module")
def alone() -> dict[str, Trained]:
    models = {"gpt_oss": (GPT_OSS, {}), "deepseek": (DEEPSEEK, MUON)}
    return {name: trained(1, m, STEPS | LOW | more) for name, (m, more) in models.items()}


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("deepseek", TP2 | EP2),
        ("gpt_oss", CP2 | EP1),
        ("deepseek", PP2),
        *slow(("gpt_oss", EP1), ("gpt_oss", TP2 | EP1)),
        *slow(("deepseek", EP2 | {"parallel.distributed_optimizer": False})),
    ],
)
def test_layouts_clip_alike(name: str, layout: dict[str, Any], alone: dict[str, Trained]) -> None:
    model, more = (GPT_OSS, {}) if name == "gpt_oss" else (DEEPSEEK, MUON)
    two, one = trained(2, model, STEPS | LOW | more | layout), alone[name]
    assert max(one.series("max_logit")) > 1.5 * LOW["optim.qk_clip"]
    assert two.series("loss") == pytest.approx(one.series("loss"), rel=1e-5)
    assert two.series("max_logit") == pytest.approx(one.series("max_logit"), rel=1e-4)
    two.has_weights_of(one, change=1e-3)


@pytest.mark.parametrize(
    "how",
    [BF16 | {"optim.moments": "bf16"} | MUON, *slow(BF16, {})],
)
def test_below_the_limit_nothing_changes(how: dict[str, Any]) -> None:
    with_limit, without = (
        trained(1, DEEPSEEK, STEPS | how | {"optim.qk_clip": limit}) for limit in (1e6, 0.0)
    )
    assert with_limit.left == without.left
    assert "max_logit" in with_limit.steps[0] and "max_logit" not in without.steps[0]


def test_clipped_in_measured_steps_alone(alone: dict[str, Trained]) -> None:
    how = STEPS | LOW
    seldom, never = (
        trained(1, GPT_OSS, how | {"optim.max_logit_every": 4}),
        trained(1, GPT_OSS, how | {"optim.qk_clip": 0.0}),
    )
    assert seldom.left == never.left
    assert seldom.left != alone["gpt_oss"].left


# --- what is kept ---------------------------------------------------------------------------------


def _kept(cfg: Config) -> list[str]:
    """Parameters that are not what their masters are in bf16, after steps that clip."""
    from phalanx.parallel.megatron.updated import parts, updated

    with trainer_of(cfg) as trainer:
        trainer.fit()
        assert len(trainer.job.engine.optimizer.chained_optimizers) > 1
        names = {id(p): n for m in trainer.job.engine.modules for n, p in m.named_parameters()}
        wrong, clipped = [], 0
        for part in parts(trainer.job.engine.optimizer):
            for u in updated(part):
                name = names[id(u.parameter)]
                weight = u.parameter.detach().view(-1)[u.start : u.stop]
                clipped += any(n in name for n in ("linear_q", "linear_kv_up"))
                if not torch.equal(weight, u.main.detach().view(-1).to(weight.dtype)):
                    wrong.append(name)
        assert clipped
        return wrong


@pytest.mark.dist
@pytest.mark.parametrize(
    "how",
    [
        {},
        MUON | {"optim.moments": "bf16", "parallel.grad_dtype": "bf16"},
        {"parallel.distributed_optimizer": False},
        *slow(MUON, {"optim.moments": "bf16"}),
    ],
)
def test_weights_are_those_of_their_masters(how: dict[str, Any]) -> None:
    cfg = configured(DEEPSEEK, STEPS | LOW | BF16 | {"parallel.expert": 1} | how, 2)
    assert run_distributed(_kept, 2, cfg) == [[], []]


@pytest.mark.dist
@mostly_slow("how", ["optim.moments=fp32", MIXED], MIXED)
def test_a_resumed_run_goes_on_bit_for_bit(how: str, tmp_path: Path) -> None:
    command = [*DEEPSEEK, "precision=bf16", *how.split(), "optim.qk_clip=2", "run.name=run"]
    command += ["data=embedded", "model.vocab_size=256", "optim.decay_steps=8"]
    command += ["run.steps=4", "run.save_interval=2"]
    whole, part = tmp_path / "whole", tmp_path / "part"
    resume = f"run.resume={whole}/run/checkpoints/step_00000002"
    for more in ([f"run.dir={whole}"], [f"run.dir={part}", resume]):
        assert [r.code for r in run(2, [*command, *more])] == [0, 0]
    expected = exact(records(whole / "run"))
    assert len(expected) == 4 and exact(records(part / "run")) == expected[2:]
    assert max(r["max_logit"] for r in records(whole / "run")) > 3


@pytest.mark.dist
def test_an_export_has_the_clipped_weights(tmp_path: Path) -> None:
    """Factors of the rows, from a step with the clip and the same step without."""
    from phalanx.moe.hf.convert import export_checkpoint
    from tests.moe.hf.models import tensors

    exported, limit = [], 2.0
    for clip in (limit, 0.0):
        folder = tmp_path / str(clip)
        command = [*DEEPSEEK, f"optim.qk_clip={clip}", f"run.dir={folder}", "run.name=run"]
        command += ["optim.max_logit_every=1", "run.steps=1", "run.save_interval=0"]
        command += ["parallel.tensor=2", "model.mtp_layers=0"]
        assert [r.code for r in run(2, command)] == [0, 0]
        export_checkpoint(folder / "run/checkpoints/step_00000001", folder / "theirs")
        exported.append(tensors(folder / "theirs"))
    clipped, plain = exported
    assert clipped.keys() == plain.keys()
    changed = {name for name in plain if not torch.equal(clipped[name], plain[name])}
    layers = [f"model.layers.{i}.self_attn." for i in range(2)]
    assert changed == {
        at + name for at in layers for name in ("q_b_proj.weight", "kv_b_proj.weight")
    }
    largest = records(tmp_path / "0.0/run")[0]["max_logits"].values()
    for at, most in zip(layers, largest, strict=True):
        query, key_value = (
            (clipped[at + name] / plain[at + name]).nanmedian(1).values.view(4, -1)
            for name in ("q_b_proj.weight", "kv_b_proj.weight")
        )
        own, turned = query.split([32, 16], 1)
        key, value = key_value.split([32, 32], 1)
        gamma_H1 = turned[:, :1]
        assert float(gamma_H1.min()) == pytest.approx(limit / most, rel=1e-5)
        torch.testing.assert_close(turned, gamma_H1.expand_as(turned))
        torch.testing.assert_close(own, gamma_H1.sqrt().expand_as(own))
        torch.testing.assert_close(key, gamma_H1.sqrt().expand_as(key))
        assert (value == 1).all()
