"""The model that is looked at against the trainer's: the same logits, on any layout."""

import copy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.configs.load import load
from phalanx.configs.schema import Config
from phalanx.parallel.checkpoint.commit import read_commit
from phalanx.parallel.checkpoint.saved_knobs import CheckpointMismatch
from tests.support.distributed import run_distributed
from tests.support.scheduling import slow
from tests.support.tiny_runs import TINY, step_of, train, untrained

pytestmark = pytest.mark.dist
S = 16


def words() -> tuple[Tensor, Tensor]:
    """Tokens and labels [2, S]."""
    rows = torch.randint(256, (2, S + 1), generator=torch.Generator().manual_seed(2))
    return rows[:, :-1], rows[:, 1:]


def of_training(overrides: list[str]) -> tuple[Tensor, Tensor]:
    """Inside a rank: logits and losses of the trainer's own model, resumed from its checkpoint."""
    import contextlib
    import io

    from phalanx.moe.run.start import make_trainer
    from phalanx.parallel.fault.signals import StopSignal
    from phalanx.parallel.runtime import start

    cfg = load(overrides)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = make_trainer(cfg, start(seed=1, timeout=60, deterministic=False), StopSignal())
    assert trainer.step > 0 and trainer.progress.origin is not None
    (chunk,) = trainer.job.engine.chunks
    trainer.job.engine.eval()
    tokens, labels = words()
    batch = {"tokens": tokens, "labels": labels, "position_ids": torch.arange(S).expand(2, S)}
    with torch.no_grad():
        one_K = torch.ones(1 + cfg.model.mtp_layers)  # the losses of tokens are not divided
        how = dict(microbatches=1, mean_K=one_K)
        losses, _ = trainer.compute.forward_step(iter([batch]), chunk, **how)
        logits = chunk(tokens, batch["position_ids"], None)
    trainer.data.loader.close()
    return logits.float(), losses


def of_predictor(checkpoint: Path, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Inside a rank: logits and losses of the checkpoint's model on one process."""
    from phalanx.moe.inference.predictor import opened

    with opened(checkpoint) as predictor:
        return predictor.logits(tokens), predictor.losses(tokens, labels)


@pytest.mark.parametrize(
    ("model", "precision"),
    [
        *[("tiny_gpt_oss", "fp32"), ("tiny_deepseek", "bf16"), ("tiny", "fp8_block")],
        *slow(("tiny", "bf16")),
    ],
)
def test_logits_are_those_of_training_in_bits(model: str, precision: str, tmp_path: Path) -> None:
    given = [f"model={model}", f"precision={precision}", "run.steps=2"]
    given += ["model.attention.head_dim=8"] if model == "tiny" else []
    if precision == "fp8_block":
        given += ["model.hidden=128", "model.moe.ffn=128", "model.dense_ffn=128"]
        given += ["precision.dispatch=fp8", "precision.hidden=fp8"]
    folder = train(tmp_path, "run", 1, *given)
    place = [f"run.dir={tmp_path}", "run.name=run", f"data.cache={tmp_path}/cache"]
    logits, losses = run_distributed(of_training, 1, [*TINY, *place, *given])[0]
    ours = run_distributed(of_predictor, 1, step_of(folder, 2), *words())[0]
    assert torch.equal(ours[0], logits) and torch.equal(ours[1], losses)
    direct = torch.nn.functional.cross_entropy(logits.flatten(0, 1), words()[1].flatten())
    assert torch.allclose(losses.mean(), direct, rtol=2e-2 if precision != "fp32" else 1e-5)
    assert logits.std() > 0.1  # something that could differ


def test_two_ranks_save_what_one_rank_reads(tmp_path: Path) -> None:
    """Experts of two ranks, expert parallel; and by tensor and pipeline parallelism."""
    first = step_of(train(tmp_path, "one", 1, "run.steps=2"), 2)
    ours = run_distributed(of_predictor, 1, first, *words())[0]
    for name, layout in (("expert", []), ("tensor", ["parallel.expert=1"])):
        more = [f"parallel.{name}=2", *layout, "run.steps=3"]
        folder = untrained(tmp_path, name, 2, first, *more)
        second = step_of(folder, 3)
        assert read_commit(second).world == 2
        again = run_distributed(of_predictor, 1, second, *words())[0]
        assert torch.equal(again[0], ours[0]) and torch.equal(again[1], ours[1]), name
        if name == "expert":
            place = [f"run.dir={tmp_path}", f"run.name={name}", f"data.cache={tmp_path}/cache"]
            ranks = run_distributed(of_training, 2, [*TINY, *place, *more])
            for logits, losses in ranks:
                assert torch.allclose(ours[0], logits, rtol=1e-4, atol=1e-5)
                assert torch.allclose(ours[1], losses, rtol=1e-5)


def causal(checkpoint: Path, tokens: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    """Inside a rank: logits of tokens, and of them padded as on a GPU; losses of two documents in
    each sequence, of these padded, and of the second one alone."""
    from phalanx.moe.inference import predictor as module

    with module.opened(checkpoint) as predictor:
        plain = predictor.logits(tokens)
        seen: list[tuple[int, ...]] = []
        predictor._model.register_forward_pre_hook(lambda m, args: seen.append(args[0].shape))
        predictor._padded = lambda ids: torch.nn.functional.pad(ids, (0, -ids.size(1) % 128))
        padded = predictor.logits(tokens)
        assert [tuple(shape) for shape in seen] == [(2, 128)]
        position = torch.tensor([*range(5), *range(S - 5)]).expand(2, S)
        apart = predictor.losses(tokens, labels, position)
        del predictor._padded
        whole = predictor.losses(tokens, labels, position)
        second = predictor.losses(tokens[:, 5:], labels[:, 5:])
        return plain, padded, whole, apart, second


def test_padding_changes_no_logits(tmp_path: Path) -> None:
    folder = train(tmp_path, "run", 1, "run.steps=2", "data=synthetic")
    plain, padded, whole, apart, second = run_distributed(causal, 1, step_of(folder, 2), *words())[
        0
    ]
    assert plain.shape == padded.shape == (2, S, 256)
    assert torch.allclose(plain, padded, rtol=1e-4, atol=1e-5)
    assert whole.shape == (2, S) and torch.allclose(whole, apart, rtol=1e-4, atol=1e-5)
    assert torch.allclose(whole[:, 5:], second, rtol=1e-4, atol=1e-5)


def of_one(saved: dict[str, Any], huggingface: dict[str, Any]) -> Config:
    from phalanx.moe.inference.predictor import of_one_process

    return of_one_process({"config": saved, "huggingface": huggingface})


def test_a_saved_configuration_becomes_that_of_one_process() -> None:
    cfg = load(
        ["model=tiny_deepseek", "data.global_batch=16", "kernels=torch", "parallel.tensor=2"]
    )
    found = of_one(asdict(cfg), {})
    expected = copy.deepcopy(cfg.model)
    expected.mtp_layers = 0
    assert found.model == expected and found.precision == cfg.precision
    assert found.parallel.tensor == 1 and found.kernels.backend == "auto"
    assert found.data.sequence_length == cfg.data.sequence_length
    imported = of_one({"model": asdict(cfg.model)}, {"max_position_embeddings": 1024})
    assert imported.data.sequence_length == 1024
    older = asdict(cfg) | {"run": {"precision": "fp32"}}
    del older["precision"]
    assert of_one(older, {}).precision.recipe == "fp32"


@pytest.mark.parametrize(
    "saved", [{"model": {"wings": 2}}, {"model": {"layers": "two"}}, {"model": {"norm_eps": "x"}}]
)
def test_what_another_version_saved_is_refused_by_name(saved: dict[str, Any]) -> None:
    (knob,) = saved["model"]
    with pytest.raises(CheckpointMismatch, match=rf"has model\.{knob}=.*does not know: use the"):
        of_one(saved, {})
