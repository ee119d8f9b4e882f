"""Blends that change by stage: which rows of which source, and resumes inside a stage."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from phalanx.configs.arithmetic.data_stages import parse
from phalanx.configs.schema import Config, DataConfig
from phalanx.moe.data.host_cache import DataError
from phalanx.moe.data.loader import Loader, Samples, build_datasets
from phalanx.moe.data.sources import stage_line
from tests.support.runs import write_corpus

SEQUENCE = 10
NAMES = ("a", "b", "c")


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Sources of 1,002 tokens, an epoch of 100 rows: ids of a from 0, b from 2000, c from 4000."""
    folder = tmp_path_factory.mktemp("sources")
    return [
        write_corpus(folder / name, [range(at, at + 501) for at in (2000 * i, 2000 * i + 1000)])
        for i, name in enumerate(NAMES)
    ]


def build(
    folder: Path, prefixes: list[str], weights: str, stages: list[str], train: int, valid: int = 0
) -> tuple[Samples, Samples | None]:
    blend = [x for pair in zip(weights.split("/"), prefixes, strict=True) for x in pair]
    split = "50,50" if valid else "100"
    data = DataConfig(source="indexed", blend=blend, stages=stages, split=split)
    data.sequence_length, data.cache = SEQUENCE, str(folder / "cache")
    return build_datasets(Config(data=data), 6000, train, valid)


def read(rows: Samples, first: int, end: int) -> Counter[int]:
    """Number of rows of each source, whose number must be that of `source`."""
    found = [int(rows[i][0]) // 2000 for i in range(first, end)]
    assert found == [rows.source(i) for i in range(first, end)]
    return Counter(found)


def test_each_stage_has_its_weights(tmp_path: Path, prefixes: list[str]) -> None:
    stages = ["1000:0/1/1", "2005:1/0/0", "2500:1/1/2"]
    rows, _ = build(tmp_path, prefixes, "3/1/0", stages, 290)
    assert read(rows, 0, 100) == {0: 75, 1: 25}
    assert read(rows, 100, 201) == {1: 50, 2: 51} or read(rows, 100, 201) == {1: 51, 2: 50}
    assert read(rows, 201, 250) == {0: 49}
    assert read(rows, 250, 290) == {0: 10, 1: 10, 2: 20}
    assert [(s.name, round(s.samples, 6)) for s in rows.sources] == [
        ("a", 75 + 49 + 10),
        ("b", 25 + 50.5 + 10),
        ("c", 50.5 + 20),
    ]
    assert [s.weight for s in rows.sources] == [s.samples / 290 for s in rows.sources]


def test_a_source_goes_on_where_it_was(tmp_path: Path, prefixes: list[str]) -> None:
    """No row of an epoch is read twice, whatever the stages between."""
    rows, _ = build(tmp_path, prefixes, "1/1/0", ["600:0/1/1", "1000:1/0/2"], 240)
    for source in range(3):
        of_source = [int(rows[i][0]) for i in range(240) if rows.source(i) == source]
        first = of_source[:100]
        assert len(set(first)) == len(first)
        alone, _ = build(tmp_path, prefixes[source : source + 1], "1", [], 300)
        assert of_source == [int(alone[i][0]) for i in range(len(of_source))]


def test_rows_before_a_stage_are_those_without_it(tmp_path: Path, prefixes: list[str]) -> None:
    plain, _ = build(tmp_path, prefixes, "2/1/1", [], 150)
    staged, _ = build(tmp_path, prefixes, "2/1/1", ["1000:0/0/1"], 150)
    longer, _ = build(tmp_path, prefixes, "2/1/1", ["1000:0/0/1", "1400:1/1/1"], 900)
    assert all(np.array_equal(plain[i], staged[i]) for i in range(100))
    assert all(np.array_equal(staged[i], longer[i]) for i in range(140))
    assert read(staged, 100, 150) == {2: 50}
    assert len({plain.fingerprint, staged.fingerprint, longer.fingerprint}) == 3


def test_validation_keeps_the_weights_of_the_blend(tmp_path: Path, prefixes: list[str]) -> None:
    _, valid = build(tmp_path, prefixes, "1/3/0", ["100:0/0/1"], 40, 40)
    assert valid is not None and read(valid, 0, 40) == {0: 10, 1: 30}
    assert [s.samples for s in valid.sources] == [10, 30, 0]


@pytest.mark.parametrize("consumed", [0, 32, 96, 104, 160])
def test_a_resume_inside_a_stage_reads_what_was_left(
    tmp_path: Path, prefixes: list[str], consumed: int
) -> None:
    stages = ["1000:0/1/1", "1555:1/0/2"]
    whole, _ = build(tmp_path, prefixes, "3/1/0", stages, 200)
    again, _ = build(tmp_path, prefixes, "3/1/0", stages, 200)
    straight, resumed = Loader(whole, 2, 8, 0, 1), Loader(again, 2, 8, 0, 1)
    resumed.load_state_dict({"consumed_samples": consumed})
    for _ in range(consumed // 8):
        straight.next_step()
    left = [[b["tokens"].tolist() for b in loader] for loader in (straight, resumed)]
    assert left[0] == left[1] and len(left[0]) == (200 - consumed) // 2


def test_a_weight_of_0_needs_stages(tmp_path: Path, prefixes: list[str]) -> None:
    with pytest.raises(DataError, match=r"gives .*/c the weight 0.0; it must be positive"):
        build(tmp_path, prefixes, "1/1/0", [], 10)


def test_a_stage_is_told_by_its_shares() -> None:
    line = stage_line(parse("80e9:1/0/3"), NAMES)
    assert line == "from 80.0 B tokens on: 25.0% a, 75.0% c"
