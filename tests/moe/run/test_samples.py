"""`run.sample_every`: on every layout the text that the checkpoint of that step gives alone."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from phalanx.configs.load import load
from phalanx.moe.data.host_cache import DataError
from phalanx.moe.data.tokenizer.codec import codec_of_run
from phalanx.moe.report.loggers import read
from phalanx.moe.run.callbacks import samples
from phalanx.moe.run.callbacks.samples import Sample, Samples, generate
from phalanx.moe.run.preflight import preflight
from phalanx.scripts import prepare_data
from tests.support.distributed import run_distributed
from tests.support.runs import run
from tests.support.scheduling import slow
from tests.support.tiny_runs import TINY, step_of

SAMPLED = ["run.sample_every=2", "run.steps=2"]
LAYOUTS = {
    "one": (1, []),
    "expert": (2, ["parallel.expert=2"]),
    "tensor": (2, ["parallel.tensor=2", "parallel.expert=1"]),
    "pipeline": (2, ["parallel.pipeline=2"]),
    "virtual": (
        2,
        ["parallel.pipeline=2", "parallel.virtual_pipeline=2", "model.layers=4"],
    ),
    "context": (2, ["parallel.context=2"]),
}


@contextmanager
def shorter(_: int, length: int = 24) -> Iterator[None]:
    """Samples of so many tokens; 24 end behind a sequence of 16."""
    with mock.patch.object(samples, "LENGTH", length):
        yield


def expected(overrides: list[str], checkpoint: Path, length: int) -> list[str]:
    """Inside a rank: the same by the model that is looked at."""
    from phalanx.moe.data.loader import build_datasets
    from phalanx.moe.inference.predictor import opened

    rows, _ = build_datasets(load(overrides), 256, 48, 0)
    prompt = rows[0][:8].tolist()
    with opened(checkpoint) as predictor:

        def following(ids: list[int]) -> int:
            return int(predictor.next_logits(torch.tensor([ids])).argmax())

        found = list(generate(following, prompt, length, context=16, ends=(0,)))
    return [bytes(ids).decode(errors="replace") for ids in (prompt, found)]


def of(model: str) -> list[str]:
    """Overrides of a small one, in fp32."""
    if model == "tiny":
        return TINY
    return [*(text for text in TINY if text != "model.attention.head_dim=8"), f"model={model}"]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        *(("tiny", layout) for layout in ("tensor", "virtual", "context")),
        *slow(*(("tiny", layout) for layout in ("one", "expert", "pipeline"))),
        *slow(("tiny_deepseek", "expert")),
    ],
)
def test_a_sample_is_the_text_of_its_checkpoint(model: str, layout: str, tmp_path: Path) -> None:
    world, more = LAYOUTS[layout]
    given = [*of(model), *SAMPLED, *more, f"run.dir={tmp_path}"]
    change, length = (None, 64) if layout == "tensor" else (shorter, 24)
    main = run(world, [*given, f"data.cache={tmp_path.parent}/cache"], change)[0]
    assert main.code == 0, main.err
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    (record,) = [each for each in records if each.get("event") == "sample after step 2"]
    said = [record["before"], record["after"]]
    assert f"-- sample after step 2\n{Sample(*said)}\n" in main.out
    given = [*given, f"data.cache={tmp_path.parent}/cache"]
    assert said == run_distributed(expected, 1, given, step_of(tmp_path / "run", 2), length)[0]
    assert len(said[0].encode()) == 8 and len(said[1]) > 10


@pytest.mark.dist
def test_samples_do_not_change_the_training(tmp_path: Path) -> None:
    found, few = [], partial(shorter, length=6)
    for every in (0, 1):
        given = [*of("tiny_deepseek"), f"data.cache={tmp_path.parent}/cache", f"run.name=of{every}"]
        more = [f"run.sample_every={every}", "run.save_interval=-1"]
        main = run(2, [*given, *more, "run.steps=2", f"run.dir={tmp_path}"], few)[0]
        assert main.code == 0, main.err
        assert main.out.count("-- sample after step") == 2 * every
        records = read(tmp_path / f"of{every}" / "metrics.jsonl")
        names = ("loss", "mtp_loss", "grad_norm", "layers")
        found.append([[record[name] for name in names] for record in records])
    assert found[0] == found[1]


def test_a_sample_is_shown_line_by_line_without_control_characters() -> None:
    shown = str(Sample("def f(x):\n", "    y\t= '\\n'\x1b[2J\r\n\u202e"))
    assert shown.splitlines() == [
        "   | def f(x):",
        "   | ",
        "   continued",
        "   |     y\t= '\\n'\\x1b[2J\\r",
        "   | \\u202e",
    ]


@pytest.mark.dist
def test_of_logits_that_are_no_numbers_there_is_no_sample(tmp_path: Path) -> None:
    given = [*TINY, f"data.cache={tmp_path.parent}/cache", f"run.dir={tmp_path}", *SAMPLED]
    given += ["run.steps=2", "run.sample_every=2", "run.save_interval=-1"]
    main = run(2, [*given, "parallel.tensor=2", "parallel.expert=1"], _broken_when_it_samples)[0]
    assert main.code == 0, main.err
    assert "-- sample after step 2: none, as the model's logits are NaN or infinite\n" in main.out
    assert "continued" not in main.out


@contextmanager
def _broken_when_it_samples(rank: int) -> Iterator[None]:
    """Weights of rank 1 become NaN with the first token."""
    original = Samples._best

    def best(self: Any, inputs: Any, place: int | None) -> int:
        with torch.no_grad():
            for weight in self._job.engine.chunks[-1].parameters() if rank else ():
                weight.fill_(torch.nan)
        return original(self, inputs, place)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Samples, "_best", best)
        yield


def test_of_packed_documents_the_longest_is_gone_on_with() -> None:
    cfg = load([*TINY, "data.document_mask=true"])
    step: Any = SimpleNamespace(job=None)
    row, place = torch.arange(100, 117), np.array([0, 1, 0, *range(11), 0, 1, 2])
    assert Samples(cfg, step, row, place)._prompt == list(range(103, 111))
    place = np.array([0, 1, 0, 1, 0, 1, 2, 3, *[0, 1, 2] * 3])
    assert Samples(cfg, step, row, place)._prompt == [104, 105, 106], "without its end"
    assert Samples(cfg, step, row, np.zeros(17, np.int64))._prompt == [100]
    assert Samples(cfg, step, row)._prompt == list(range(100, 108))


def test_data_without_its_tokenizer_is_told_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a b " * 400)
    words = Tokenizer(models.WordLevel({"?": 0, "a": 1, "b": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    given = [str(tmp_path / "text.txt"), "--tokenizer", str(tmp_path / "tokenizer.json")]
    ids = tmp_path / "ids"
    assert prepare_data.main([*given, "--eod", "?", "--workers", "1", "--output", str(ids)]) == 0
    indexed = ["data=indexed", f"data.blend=[{ids}]", "data.split=1", f"data.cache={tmp_path}"]
    tiny = [text for text in TINY if not text.startswith("data=")]
    cfg = load([*tiny, *indexed, f"run.dir={tmp_path}", "run.sample_every=1"])
    assert codec_of_run(cfg).encode("b a") == [2, 1] and not preflight(cfg).errors
    Path(f"{ids}.tokenizer.json").unlink()
    (error,) = preflight(cfg).errors
    assert isinstance(error, DataError) and "was made with" in str(error)
    assert str(error).endswith("copy it there, or set run.sample_every=0")
    cfg.run.sample_every = 0
    assert not preflight(cfg).errors
