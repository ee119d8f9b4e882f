"""Runs whose context ranks share out heads are those of one rank, with documents and without."""

from pathlib import Path

import pytest

from tests.end_to_end.test_document_mask import (
    QWEN3,
    QWEN3_NEXT,
    WINDOWS,
    WITHOUT_LOSS,
    corpus,  # noqa: F401  (a fixture)
)
from tests.support.runs import SMALL, exact, records, run
from tests.support.scheduling import slow
from tests.support.training import trained

pytestmark = pytest.mark.dist

MANY_KEYS = [*QWEN3, "model.attention.kv_heads=4"]


@pytest.mark.parametrize(
    ("model", "mask", "sizes"),
    [
        (WITHOUT_LOSS, True, {"parallel.context": 2}),
        (WINDOWS, True, {"parallel.context": 2}),
        *slow(
            (MANY_KEYS, False, {"parallel.context": 4}), (QWEN3_NEXT, True, {"parallel.context": 2})
        ),
    ],
    ids=["deepseek", "gpt_oss", "qwen3", "qwen3_next"],
)
def test_ranks_train_as_one(
    corpus: list[str],  # noqa: F811
    model: list[str],
    mask: bool,
    sizes: dict[str, int],
) -> None:
    (blend,) = (x for x in corpus if x.startswith("data.blend="))
    overrides = [
        *(x for x in corpus if not x.startswith(("data=", "data.blend="))),
        *model,
        *["precision=fp32", "run.steps=2", "run.seed=3", "parallel.capacity_factor=16"],
        *["data.sequence_length=16", "data.micro_batch=2", "optim.eps=1e-2", "optim.lr=3e-2"],
    ]
    prefix = blend.removeprefix("data.blend=[").removesuffix("]")
    real = {"data.source": "indexed", "data.blend": [prefix], "optim.max_logit_every": 1}
    real |= {"data.document_mask": mask}
    alone = trained(1, overrides, real)
    other = trained(sizes["parallel.context"], overrides, {**real, **sizes})
    assert other.series("loss") == pytest.approx(alone.series("loss"), rel=5e-6)
    assert other.series("max_logit") == pytest.approx(alone.series("max_logit"), rel=2e-5)
    assert other.series("grad_norm") == pytest.approx(alone.series("grad_norm"), rel=5e-5)
    assert other.valid_loss == pytest.approx(alone.valid_loss, rel=5e-6)


def test_recomputed_attention_has_the_same_losses(tmp_path: Path) -> None:
    """The exchange is repeated in the backward pass: losses and norms bit for bit."""
    command = [*SMALL, "parallel.context=2", "data.document_mask=true", "run.steps=2"]
    for name, more in (("saved", []), ("again", ["run.recompute=attention"])):
        main, _ = run(2, [*command, *more, f"run.dir={tmp_path / name}"])
        assert main.code == 0, main.err
    saved, again = (exact(records(tmp_path / name / "run")) for name in ("saved", "again"))
    assert len(saved) == 2 and saved == again
