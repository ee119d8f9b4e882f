"""Losses and gradients of supervised rows are those of the rows one by one, on any layout.

Some sequences have no label that counts, so that micro-batches and ranks have very different
numbers of them, zero among them.
"""

import contextlib
import io
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from phalanx.configs.load import load
from phalanx.configs.schema import Config, DataConfig
from phalanx.extras.chat.masks import BEGINS, COUNTS
from phalanx.moe.data.loader import Loader, build_datasets
from phalanx.moe.labels import count_labels
from tests.end_to_end.layouts.test_layouts import DEEPSEEK, EP1, TINY
from tests.extras.chat.chats import chat, prepare
from tests.extras.chat.test_masks import flags_by_row
from tests.support.distributed import run_distributed
from tests.support.runs import write_corpus
from tests.support.training import Trained, trained

pytestmark = pytest.mark.dist

LENGTH = 64
PURE = [f"model.moe.router.{name}=0" for name in ("aux_loss", "seq_aux_loss", "z_loss")]
MODELS = {
    "tiny": [*TINY, *PURE],
    "deepseek": [*DEEPSEEK, *PURE, "model.mtp_layers=2", "model.mtp_loss=0.5"],
}
"""Without losses of routers, and with two tokens ahead."""
REL = 2e-6
"""Sums of some hundred fp32 terms in another order."""


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Chats, of which every third sequence has no label that counts."""
    folder = tmp_path_factory.mktemp("chats")
    says = ["a", "no", "x" * 20, "what else is there to say?"]
    rows = [{"messages": chat(str(i), says[i % 4], "b", says[i % 3])} for i in range(60)]
    prefix = prepare(folder, "chats", rows)
    flags = np.fromfile(f"{prefix}.mask.bin", np.uint8).reshape(-1, LENGTH)
    flags[::3] &= ~np.uint8(COUNTS)
    flags.tofile(f"{prefix}.mask.bin")
    return prefix


def changes(prefix: str, *more: str) -> dict[str, Any]:
    data: dict[str, Any] = {"source": "indexed", "blend": [prefix, *more], "split": "80,20"}
    data |= {"sequence_length": LENGTH, "cache": f"{prefix}.cache", "document_mask": True}
    data |= {"global_batch": 8, "micro_batch": 1}
    return {f"data.{name}": value for name, value in data.items()} | {
        "model.vocab_size": 384,
        "run.steps": 1,
    }


def _with_reference(overrides: list[str], prefix: str) -> tuple[Tensor, Tensor, list[float]]:
    """Gradients of a step, those of plain PyTorch over its rows one by one, and losses of both."""
    from phalanx.moe.router import balance
    from phalanx.moe.run.start import make_trainer
    from phalanx.parallel.fault.signals import StopSignal
    from phalanx.parallel.runtime import start

    with contextlib.redirect_stdout(io.StringIO()):
        runtime = start(seed=1, timeout=60, deterministic=False)
        trainer = make_trainer(load(overrides), runtime, StopSignal())
    (model,) = trainer.job.engine.modules
    batches, known = trainer.data.loader.next_step(), flags_by_row(Path(prefix))
    weights = list(model.parameters())
    expected = [torch.zeros_like(weight, dtype=torch.float64) for weight in weights]
    nats, count = 0.0, 0
    for tokens_S in torch.cat([batch["tokens"] for batch in batches]):
        flags = torch.from_numpy(known[tokens_S.numpy().astype(np.uint16).tobytes()])
        starts = [*(flags & BEGINS).nonzero().flatten().tolist(), LENGTH]
        for first, end in itertools.pairwise(starts):
            row_T, counts_T = tokens_S[first:end], flags[first + 1 : end] & COUNTS != 0
            if not counts_T.any():
                continue
            logits_1TV = model(row_T[None], torch.arange(len(row_T))[None], None)
            loss_T = cross_entropy(logits_1TV[0, :-1].double(), row_T[1:], reduction="none")
            nats += float(loss_T[counts_T].sum())
            count += int(counts_T.sum())
            grads = torch.autograd.grad(loss_T[counts_T].sum(), weights, allow_unused=True)
            for total, grad in zip(expected, grads, strict=True):
                total += 0 if grad is None else grad.double()
    totals = trainer.compute(batches, balance.snapshot([model]))
    found = torch.cat([weight.main_grad.flatten().double() for weight in weights])
    trainer.data.loader.close()
    assert totals.labels == count
    reference = torch.cat([total.flatten() for total in expected]) / count
    return found.clone(), reference, [totals.loss, nats / count]


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_gradients_are_those_of_the_rows_one_by_one(
    micro_batch: int, prefix: str, tmp_path: Path
) -> None:
    given = [f"{key}={value}" for key, value in changes(prefix).items() if key != "data.blend"]
    given = [text.replace("80,20", "'80,20'") for text in given]
    overrides = [*MODELS["tiny"], "precision=fp32", "run.device=cpu", f"run.dir={tmp_path}", *given]
    overrides += [f"data.blend=[{prefix}]", f"data.micro_batch={micro_batch}"]
    overrides += ["kernels.gradient_accumulation_fusion=false", "run.save_interval=-1"]
    ((found, reference, (loss, expected)),) = run_distributed(_with_reference, 1, overrides, prefix)
    assert loss == pytest.approx(expected, rel=REL)
    assert (found - reference).norm() < 2e-5 * reference.norm()


@pytest.fixture(scope="module")
def alone(prefix: str) -> dict[str, Trained]:
    return {name: trained(1, MODELS[name], changes(prefix)) for name in MODELS}


@pytest.mark.parametrize(
    ("name", "layout", "micro_batch"),
    [
        ("deepseek", EP1, 1),
        ("deepseek", {"parallel.expert": 2}, 4),
        ("deepseek", EP1 | {"parallel.context": 2}, 2),
        ("deepseek", EP1 | {"parallel.pipeline": 2}, 2),
        ("tiny", EP1, 2),
        pytest.param("tiny", EP1 | {"parallel.tensor": 2}, 2, marks=pytest.mark.slow),
    ],
    ids=["data", "expert", "context", "pipeline", "tiny", "tensor"],
)
def test_layouts_agree(
    name: str, layout: dict[str, int], micro_batch: int, prefix: str, alone: dict[str, Trained]
) -> None:
    """Also the tokens ahead, whose masks are shifted, and a validation."""
    one = alone[name]
    two = trained(2, MODELS[name], changes(prefix) | layout | {"data.micro_batch": micro_batch})
    assert two.series("labels") == one.series("labels")
    assert 0 < one.series("labels")[0] < 4 * LENGTH
    for number in ("loss", "grad_norm", *(["mtp_loss"] if name == "deepseek" else [])):
        assert two.series(number) == pytest.approx(one.series(number), rel=REL), number
    assert two.valid_loss == pytest.approx(one.valid_loss, rel=REL)
    for key, weight in one.after.items():
        assert (two.after[key] - weight).norm() <= REL * weight.norm(), key


def test_labels_ahead_stay_in_their_answers(prefix: str) -> None:
    """A token ahead counts where it counts as a label, in the same row."""
    data = {k.removeprefix("data."): v for k, v in changes(prefix).items() if k[:4] == "data"}
    rows, _ = build_datasets(Config(data=DataConfig(**data)), 400, 8, 0)
    loader = Loader(rows, 2, 8, 0, 1, documents=True)
    batches, expected = loader.next_step(), [0, 0, 0]
    for tokens_S in torch.cat([batch["tokens"] for batch in batches]).numpy():
        flags = flags_by_row(Path(prefix))[tokens_S.astype(np.uint16).tobytes()]
        row = 0
        for i, flag in enumerate(flags):
            row = i if flag & BEGINS else row
            for ahead in range(3):
                # Token i is a label of the token 1 + ahead before it, if that is in its row.
                expected[ahead] += bool(flag & COUNTS and i - 1 - ahead >= row)
    alone: Any = SimpleNamespace(size=lambda: 1)
    assert count_labels(batches, 3, 4, alone).number_K.tolist() == expected
    loader.close()


def test_a_blend_has_the_labels_of_both(prefix: str) -> None:
    text = write_corpus(
        Path(prefix).parent / "text", [range(i % 90, i % 90 + 30) for i in range(99)]
    )
    given = changes(prefix, text) | {"run.steps": 2}
    one = trained(1, MODELS["tiny"], given)
    two = trained(2, MODELS["tiny"], given | EP1)
    assert two.series("labels") == one.series("labels")
    assert two.series("loss") == pytest.approx(one.series("loss"), rel=1e-5)
    all_of_text = LENGTH - 3  # but for labels in another document
    assert all(labels > all_of_text for labels in one.series("labels"))
    without = trained(1, MODELS["tiny"], given | {"data.loss_mask": False})
    assert without.series("labels")[0] > one.series("labels")[0] + LENGTH
