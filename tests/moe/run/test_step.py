"""Expected gradients of a step's losses."""

import contextlib
import io
from typing import Any

import pytest

from phalanx.configs.load import load
from tests.support.distributed import run_distributed
from tests.support.scheduling import mostly_slow
from tests.support.tiny_runs import TINY

pytestmark = pytest.mark.dist


Seen = list[tuple[float | None, list[float]]]


def gradients(overrides: list[str]) -> Seen:
    """Expected gradient of the losses of a step, and the distinct actual ones, in order."""
    from phalanx.kernels.library_objects import replaced
    from phalanx.moe.model.gpt import LanguageModel
    from phalanx.moe.run.start import make_trainer
    from phalanx.parallel.fault.signals import StopSignal
    from phalanx.parallel.runtime import start

    seen: Seen = []
    compute = LanguageModel.compute_language_model_loss

    def watched(self: Any, labels: Any, logits: Any, expected_grad: Any = None) -> Any:
        losses = compute(self, labels, logits, expected_grad)
        value = None if expected_grad is None else expected_grad().item()
        losses.register_hook(lambda g: seen.append((value, g.unique().tolist())))
        return losses

    runtime = start(seed=1, timeout=60, deterministic=False)
    with (
        replaced(LanguageModel, "compute_language_model_loss", watched),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        trainer = make_trainer(load(overrides), runtime, StopSignal())
        trainer._train_step()
    trainer.data.loader.close()
    return seen


@pytest.mark.parametrize(
    ("sequences", "layout"),
    [
        (12, ["data.micro_batch=2"]),  # 3 micro-batches of each of two data parallel ranks
        (3, ["data.micro_batch=1", "parallel.tensor=2"]),
        (3, ["data.micro_batch=1", "parallel.context=2"]),
        (5, ["data.micro_batch=1", "parallel.pipeline=2", "model.layers=2"]),
    ],
)
def test_gradients_are_as_expected(sequences: int, layout: list[str], tmp_path: Any) -> None:
    folders = [f"run.dir={tmp_path}", f"data.cache={tmp_path}/cache", "parallel.expert=1"]
    overrides = [*TINY, *folders, *layout, f"data.global_batch={sequences}"]
    first, last = run_distributed(gradients, 2, overrides)
    assert bool(first) == ("parallel.pipeline=2" not in layout)
    for seen in (first or last, last):
        assert len(seen) == (sequences if sequences % 4 else sequences // 4)
        for expected, actual in seen:
            assert [expected] == pytest.approx(actual, rel=5e-7)


@mostly_slow("layout", ["one", "context", "data"], "context", "data")
def test_gradients_of_tokens_that_count_are_as_expected(layout: str, tmp_path: Any) -> None:
    """They are the same for every label of the global batch, on any rank."""
    world, context = {"one": (1, 1), "context": (2, 2), "data": (2, 1)}[layout]
    folders = [f"run.dir={tmp_path}", f"data.cache={tmp_path}/cache", "parallel.expert=1"]
    overrides = ["data.document_mask=true", "data.sequence_length=512", "data.micro_batch=1"]
    overrides.append(f"parallel.context={context}")
    ranks = run_distributed(gradients, world, [*TINY, *folders, *overrides])
    losses = [loss for seen in ranks for loss in seen]
    assert len(losses) == 8 * context and any(len(actual) == 2 for _, actual in losses)
    assert len({expected for expected, _ in losses}) == 1
    for expected, actual in losses:
        assert [expected] == pytest.approx([g for g in actual if g], rel=5e-7)


def test_losses_of_multi_token_prediction_have_other_gradients(tmp_path: Any) -> None:
    folders = [f"run.dir={tmp_path}", f"data.cache={tmp_path}/cache", "model.mtp_layers=1"]
    (seen,) = run_distributed(gradients, 1, [*TINY, *folders])
    assert len(seen) % 2 == 0 and sum(expected is None for expected, _ in seen) == len(seen) // 2
    for expected, actual in seen:
        assert expected is None or [expected] == pytest.approx(actual, rel=5e-7)
