"""The callback and captured steps in the Trainer of transformers."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import Trainer, TrainingArguments

from phalanx.adapters.transformers import NAME
from phalanx.adapters.transformers import trainer as module
from phalanx.adapters.transformers.trainer import Captured, UsePhalanx, captured
from tests.adapters import hf_models


def rows(count: int = 12, length: int = 11) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, hf_models.VOCABULARY, (count, length), generator=generator)
    return [dict(input_ids=row, labels=row.clone()) for row in ids]


def made(folder: Path, data: Any = None, callbacks: Any = (), **options: Any) -> Trainer:
    given: dict[str, Any] = dict(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=5,
        learning_rate=0.01,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    return Trainer(
        hf_models.model("qwen3_moe", "eager"),
        TrainingArguments(**given | options),
        train_dataset=data or rows(),
        callbacks=list(callbacks),
    )


def losses(trainer: Trainer) -> list[float]:
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def test_the_callback_applies_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = UsePhalanx(attention=False)
    trainer = made(tmp_path, callbacks=[callback])
    assert trainer.model.config._experts_implementation == NAME
    assert callback.report is not None and "phalanx in Qwen3MoeForCausalLM" in str(callback.report)
    assert losses(trainer) == pytest.approx(losses(made(tmp_path)), abs=2e-4)
    assert capsys.readouterr().out.count("phalanx in") == 1
    trainer.eval_dataset = rows(4)
    assert trainer.evaluate(rows(4))["eval_loss"] > 0


def test_it_also_applies_where_it_is_added_later(tmp_path: Path) -> None:
    trainer = made(tmp_path)
    trainer.add_callback(UsePhalanx(experts=False))
    want = losses(made(tmp_path))
    assert losses(trainer) == pytest.approx(want, abs=2e-4)
    assert "forward" in vars(trainer.model)


def test_without_a_gpu_steps_run_as_before_and_it_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = made(tmp_path)
    steps = captured(trainer)
    assert captured(trainer) is steps
    with caplog.at_level(logging.WARNING):
        assert losses(trainer) == losses(made(tmp_path))
    assert steps.reasons == ["CUDA graphs need a GPU, not cpu"] and not steps.replays
    assert caplog.text.count("steps run eagerly, as") == 1


class Replayed:
    """In place of a CUDA graph on a CPU: a step that writes where the capture had gradients."""

    def __init__(self, step: Any, trainer: Trainer) -> None:
        self.step, self.parameters = step, list(trainer.model.parameters())
        before = [None if p.grad is None else p.grad.clone() for p in self.parameters]
        self.adds = any(grad is not None for grad in before)
        self.loss = step()
        self.places = [p.grad for p in self.parameters]
        for place, grad in zip(self.places, before, strict=True):
            place.copy_(torch.nan if grad is None else grad)  # a capture computes nothing

    def replay(self) -> None:
        pointers = [p.grad for p in self.parameters]
        assert all(a is b for a, b in zip(pointers, self.places, strict=True))
        if not self.adds:
            for p in self.parameters:
                p.grad = None
        self.loss.copy_(self.step())
        for p, place in zip(self.parameters, self.places, strict=True):
            place.copy_(p.grad)
            p.grad = place


@pytest.mark.parametrize("lengths", [(11, 11), (11, 9)])
def test_gradients_are_where_graphs_have_them(
    lengths: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager and replayed micro-batches of two shapes, some with padding, add up as ever."""
    data = [row for i in range(12) for row in rows(2, lengths[i % 2])]
    for row in data:
        row["attention_mask"] = torch.ones_like(row["input_ids"])
    data[16]["attention_mask"][-2:] = 0
    trainer = made(tmp_path, data, max_steps=12)

    def record(step: Any, pool: Any, stream: Any) -> tuple[Any, Tensor]:
        graph = Replayed(step, trainer)
        return graph, graph.loss

    monkeypatch.setattr(module, "record", record)
    monkeypatch.setattr(Captured, "_refusal", lambda self: None)
    monkeypatch.setattr(Captured, "_side", lambda self: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: 0)
    monkeypatch.setattr(trainer, "_get_train_sampler", lambda *a: range(len(data)))
    steps = captured(trainer)
    other = made(tmp_path, data, max_steps=12)
    monkeypatch.setattr(other, "_get_train_sampler", lambda *a: range(len(data)))
    want = losses(other)
    assert losses(trainer) == pytest.approx(want, abs=2e-4)
    assert steps.replays >= 10 and steps.reasons == ["a batch has padding"]


def test_a_failed_capture_is_a_reason_and_not_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(step: Any, pool: Any, stream: Any) -> None:
        step()
        raise RuntimeError("operation not permitted\nmore")

    monkeypatch.setattr(module, "record", record)
    monkeypatch.setattr(
        Captured, "_refusal", lambda self: "a capture has failed" if self._failed else None
    )
    monkeypatch.setattr(Captured, "_side", lambda self: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: 0)
    trainer = made(tmp_path)
    steps = captured(trainer)
    assert losses(trainer) == losses(made(tmp_path))
    assert steps.reasons[0] == "the capture failed (operation not permitted)"
