"""Likelihoods of rows are those of transformers on the exported model."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.extras.tasks.conftest import Trained
from tests.support.distributed import run_distributed

pytestmark = pytest.mark.dist


def rows_here(trained: Trained) -> list[Any]:
    """Inside a rank: all rows of all tasks, and their results."""
    from phalanx.extras.tasks.formats import read_tasks
    from phalanx.extras.tasks.forward import checkpoint_forward
    from phalanx.extras.tasks.requests import requests_of
    from phalanx.moe.data.tokenizer.codec import codec_of
    from phalanx.moe.inference.predictor import opened

    with opened(trained.step) as predictor:
        codec = codec_of(predictor.common, 384, None)
        tasks = [requests_of(task, codec, 64) for task in read_tasks(trained.tasks)]
        rows = [row for each in tasks for row in each.rows]
        found = checkpoint_forward(predictor, 256, lambda n: None)(rows)
    return [(row.inputs, row.labels_KN, *scored) for row, scored in zip(rows, found, strict=True)]


def test_likelihoods_are_those_of_transformers(trained: Trained, exported: Path) -> None:
    import transformers

    rows = run_distributed(rows_here, 1, trained)[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    assert len(rows) > 30 and any(len(labels) > 1 for _, labels, *_ in rows)
    for inputs, labels_KN, alternatives, token in rows:
        with torch.no_grad():
            logits_NV = model(torch.tensor([inputs])).logits[0, -len(labels_KN[0]) :]
        best = logits_NV.argmax(-1).tolist()
        if len(best) == 1:
            assert token == best[0]
        for labels, found in zip(labels_KN, alternatives, strict=True):
            logp_N = logits_NV.log_softmax(-1).gather(1, torch.tensor(labels)[:, None])
            assert found.nats == pytest.approx(float(logp_N.sum()), abs=2e-4)
            assert found.greedy == (best == labels)
