"""Validation on data of its own (data.validation): its rows, and what is refused."""

from pathlib import Path

import numpy as np
import pytest

from phalanx.configs.load import load
from phalanx.configs.schema import Config, DataConfig
from phalanx.configs.validate import ConfigError, validate
from phalanx.moe.data.datasets import plan
from phalanx.moe.data.host_cache import DataError
from phalanx.moe.data.loader import build_datasets
from phalanx.moe.data.token_files import Sidecar
from phalanx.moe.run.preflight import preflight
from tests.support.runs import write_corpus


def pair(folder: Path, number: int, tokenizer: str = "t", vocab: int = 6000) -> str:
    """A pair of 1,001 consecutive ids from 2000 * `number` on, with its description."""
    prefix = write_corpus(folder / "abc"[number], [range(2000 * number, 2000 * number + 1001)])
    Sidecar(
        tokenizer=tokenizer,
        tokenizer_sha256=tokenizer,
        vocab_size=vocab,
        eod=0,
        dtype="uint16",
        documents=1,
        tokens=1001,
        text_bytes=1001 * (number + 1),
    ).write(Path(f"{prefix}.json"))
    return prefix


def config(folder: Path, blend: list[str], validation: list[str], split: str = "1") -> Config:
    data = DataConfig(source="indexed", blend=blend, validation=validation, split=split)
    data.sequence_length, data.cache = 10, str(folder / "cache")
    cfg = Config(data=data)
    cfg.run.dir, cfg.model.vocab_size = str(folder), 6000
    return cfg


def test_rows_of_a_validation_are_of_its_own_data(tmp_path: Path) -> None:
    a, b, c = (pair(tmp_path, number) for number in range(3))
    cfg = config(tmp_path, [a], ["3", b, "1", c])
    training, valid = build_datasets(cfg, 6000, 100, 40)
    assert valid is not None and len(valid) == 40
    assert sorted(int(training[i][0]) for i in range(100)) == list(range(0, 1000, 10))
    found = [int(valid[i][0]) // 2000 for i in range(40)]
    assert found.count(1) == 30 and found.count(2) == 10
    assert found == [valid.source(i) + 1 for i in range(40)]
    assert [(s.name, s.bytes_per_token) for s in valid.sources] == [("b", 2), ("c", 3)]
    assert plan(cfg.data, 6000, (100, 40)).sources == [training.sources, valid.sources]
    alone, nothing = build_datasets(config(tmp_path, [a], []), 6000, 100, 0)
    assert nothing is None
    assert all(np.array_equal(training[i], alone[i]) for i in range(100))


def test_data_that_is_not_read_is_not_opened(tmp_path: Path) -> None:
    """A run without validations takes a command line of one with them."""
    cfg = config(tmp_path, [pair(tmp_path, 0)], [str(tmp_path / "missing")])
    _, valid = build_datasets(cfg, 6000, 100, 0)
    assert valid is None and preflight(cfg).errors == []


def test_bad_data_is_told_with_its_knob(tmp_path: Path) -> None:
    cfg = config(tmp_path, [pair(tmp_path, 0)], [str(tmp_path / "missing")])
    cfg.run.eval_interval = 5
    with pytest.raises(DataError, match=r"missing\.bin does not exist; data\.validation takes"):
        build_datasets(cfg, 6000, 100, 40)
    (error,) = preflight(cfg).errors
    assert "missing.bin does not exist; data.validation takes" in str(error)
    for vocab in (6000, 7000):
        cfg.data.validation = [pair(tmp_path, 1, "other", vocab)]
        with pytest.raises(DataError, match="mixes tokenizers: t in .*a.json, other in .*b.json"):
            build_datasets(cfg, 6000, 100, 40)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["data.validation=[x]"], "data.validation=[x] is not read with data.source=embedded; set"),
        (["data=indexed", "data.blend=[a]", "data.validation=[1,x,y]"], "must be prefixes, or"),
        (["data=indexed", "data.blend=[a]", "data.validation=[0,x]"], "no prefix a weight above 0"),
        (["data=indexed", "data.blend=[a]", "data.validation=['s3://']"], "has an address that"),
    ],
)
def test_what_is_no_data_is_one_line(words: list[str], why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(load(words), 1)
    (line,) = str(caught.value).splitlines()
    assert line.startswith("data.validation=") and why in line


def test_all_of_the_blend_may_be_trained_on() -> None:
    words = ["data=indexed", "data.blend=[a]", "data.split='1'", "run.eval_interval=5"]
    with pytest.raises(ConfigError, match=r"validates on nothing"):
        validate(load(words), 1)
    validate(load([*words, "data.validation=[b]"]), 1)
