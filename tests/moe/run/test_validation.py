"""Validation losses of each source are the same on every layout, and what each alone would give."""

from pathlib import Path

import pytest
import torch

from tests.end_to_end.layouts.test_layouts import LOSS
from tests.support.runs import SMALL, records, run, write_corpus
from tests.support.scheduling import mostly_slow

pytestmark = pytest.mark.dist

# Nothing is learned, so that runs on other data validate the same model.
STILL = ["optim.lr=1e-30", "optim.min_lr=0", "optim.weight_decay=0", "run.steps=1"]
TRAINING = [
    *SMALL,
    *STILL,
    *["model=tiny", "model.attention.head_dim=8", "model.layers=4"],
    *["precision=fp32", "run.seed=3", "run.save_interval=-1", "parallel.capacity_factor=16"],
    *["data=indexed", "data.split='50,50'", "data.micro_batch=2", "run.eval_interval=1"],
]
LAYOUTS = {
    "data": ["parallel.expert=1"],
    "expert": ["parallel.expert=2"],
    "tensor": ["parallel.tensor=2", "parallel.expert=1"],
    "context": ["parallel.context=2", "parallel.expert=1"],
    "pipeline": ["parallel.pipeline=2"],
    "interleaved": ["parallel.pipeline=2", "parallel.virtual_pipeline=2"],
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two that a model without training has other losses on: text, and one byte again and again."""
    folder = tmp_path_factory.mktemp("sources")
    write_corpus(folder / "text")
    write_corpus(folder / "one", [[7] * 40 for _ in range(200)])
    return [str(folder / "text"), str(folder / "one")]


def validated(world: int, blend: list[str], folder: Path, *more: str) -> dict[str, float]:
    where = [f"data.blend=[{','.join(blend)}]", f"data.cache={folder / 'cache'}"]
    where += [f"run.dir={folder / 'runs'}", "run.resume=never"]
    ranks = run(world, [*TRAINING, *where, *more])
    assert [rank.code for rank in ranks] == [0] * world, ranks[0].err
    (record,) = records(folder / "runs/run")
    return {key: value for key, value in record.items() if key.startswith("valid_")}


@pytest.fixture(scope="module")
def alone(sources: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Scores of one process. Three quarters of 32 samples are text."""
    blend = ["0.75", sources[0], "0.25", sources[1]]
    return validated(1, blend, tmp_path_factory.mktemp("alone"), "run.eval_batches=4")


def test_a_source_has_the_loss_that_it_has_alone(
    alone: dict[str, float], sources: list[str], tmp_path: Path
) -> None:
    text, one = (
        validated(1, [source], tmp_path, f"run.eval_batches={batches}")
        for source, batches in zip(sources, (3, 1), strict=True)
    )
    # Bytes of text are not known.
    assert set(text) == {"valid_loss", "valid_perplexity", "valid_labels"}
    assert alone["valid_loss/text"] == pytest.approx(text["valid_loss"], rel=LOSS)
    assert alone["valid_loss/one"] == pytest.approx(one["valid_loss"], rel=LOSS)
    assert abs(text["valid_loss"] - one["valid_loss"]) > 1e-2
    mean = 0.75 * text["valid_loss"] + 0.25 * one["valid_loss"]
    assert alone["valid_loss"] == pytest.approx(mean, rel=LOSS)


@mostly_slow("layout", LAYOUTS, "tensor")
def test_layouts_agree(
    layout: str, alone: dict[str, float], sources: list[str], tmp_path: Path
) -> None:
    blend = ["0.75", sources[0], "0.25", sources[1]]
    found = validated(2, blend, tmp_path, "run.eval_batches=4", *LAYOUTS[layout])
    assert found.keys() == alone.keys() and len(found) == 9
    assert found == pytest.approx(alone, rel=5 * LOSS)


@mostly_slow("layout", ["context", "tensor"], "context")
def test_sources_of_documents_add_up(layout: str, tmp_path: Path) -> None:
    """Sources are weighted by their labels, of which one of short documents has few."""
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 64, (4000,), generator=random)
    sources = {"long": ids.split(60), "short": ids.split([2, 1] * 1333 + [1])}
    prefixes = [write_corpus(tmp_path / n, [d.tolist() for d in s]) for n, s in sources.items()]
    blend = ["0.5", prefixes[0], "0.5", prefixes[1]]
    more = ["data.document_mask=true", *LAYOUTS[layout]]
    found = validated(2, blend, tmp_path, *more, "run.eval_batches=2")
    long, short = (found[f"valid_labels/{name}"] for name in sources)
    assert found["valid_labels"] == long + short and 0 < 2 * short < long
    mean = (long * found["valid_loss/long"] + short * found["valid_loss/short"]) / (long + short)
    assert found["valid_loss"] == pytest.approx(mean, rel=1e-6)
