"""Rows of a run that reads other data than its checkpoint: by value, source by source."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.configs.schema import Config, DataConfig
from phalanx.extras.phases.positions import carried, rows
from phalanx.moe.data.loader import Loader, Samples, build_datasets
from tests.support.runs import write_corpus

VOCABULARY = 6000


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Sources of 1,002 tokens, an epoch of 100 rows of 10: ids of a from 0, b from 2000, c."""
    folder = tmp_path_factory.mktemp("sources")
    return [
        write_corpus(folder / name, [range(at, at + 501) for at in (2000 * i, 2000 * i + 1000)])
        for i, name in enumerate("abc")
    ]


def config(prefixes: Sequence[str], weights: str, sequence: int = 10, **data: Any) -> Config:
    """`weights` as in 3/1; none of them leaves the sources to their numbers of tokens."""
    blend = list(prefixes)
    if weights:
        blend = [x for pair in zip(weights.split("/"), prefixes, strict=True) for x in pair]
    cache = str(Path(prefixes[0]).parent / "cache")
    cfg = Config(data=DataConfig(source="indexed", blend=blend, split="100", cache=cache, **data))
    cfg.data.sequence_length, cfg.model.vocab_size = sequence, VOCABULARY
    return cfg


def state(cfg: Config, consumed: int, before: dict[str, Any] | None = None) -> dict[str, Any]:
    """A checkpoint's state after so many samples, `before` them of other data."""
    return {"config": asdict(cfg), "data": {"consumed_samples": consumed}, "carried": before or {}}


def on(saved: dict[str, Any], cfg: Config, samples: int) -> tuple[Samples, dict[str, Any]]:
    """The rows of a run of so many that goes on from a checkpoint, and the state that it has."""
    plain, _ = build_datasets(cfg, VOCABULARY, samples, 0)
    new = carried(saved, cfg, plain)
    return rows(cfg, samples, new["carried"]), new


def alone(prefix: str, samples: int, sequence: int = 10) -> list[list[int]]:
    found, _ = build_datasets(config([prefix], "", sequence), VOCABULARY, samples, 0)
    return [found[i].tolist() for i in range(samples)]


def by_source(found: Samples, first: int, end: int, sources: int) -> list[list[list[int]]]:
    taken: list[list[list[int]]] = [[] for _ in range(sources)]
    for i in range(first, end):
        taken[found.source(i)].append(found[i].tolist())
    return taken


def test_a_source_that_is_added_begins_and_others_go_on(prefixes: list[str]) -> None:
    """300 samples before: 150 of a and b, an epoch and a half."""
    saved = state(config(prefixes[:2], "1/1"), 300)
    found, new = on(saved, config(prefixes, "1/1/2"), 420)
    assert new["data"] == {"consumed_samples": 300}
    assert new["carried"] == {"first": 300, "tokens": 0, "rows": [150, 150, 0], "gone": {}}
    a, b, c = by_source(found, 300, 420, 3)
    assert a == alone(prefixes[0], 180)[150:] and b == alone(prefixes[1], 180)[150:]
    assert c == alone(prefixes[2], 60)
    assert [(s.name, s.samples, s.weight) for s in found.sources] == [
        ("a", 180, 0.25),
        ("b", 180, 0.25),
        ("c", 60, 0.5),
    ]
    assert len(found) == 420 and len({i[0] for i in c}) == 60
    with pytest.raises(IndexError, match="sample 420 of 420"):
        found[420]


def test_a_source_that_is_removed_comes_back_where_it_stopped(prefixes: list[str]) -> None:
    both, one = config(prefixes[:2], "3/1"), config(prefixes[:1], "1")
    _, second = on(state(both, 40), one, 60)
    assert second["carried"]["gone"] == {prefixes[1]: 100}
    found, third = on(state(one, 60, second["carried"]), both, 100)
    assert third["carried"] == {"first": 60, "tokens": 0, "rows": [50, 10], "gone": {}}
    a, b = by_source(found, 60, 100, 2)
    assert a == alone(prefixes[0], 80)[50:] and b == alone(prefixes[1], 20)[10:]


def test_positions_are_tokens_where_sequences_are_longer(prefixes: list[str]) -> None:
    """75 rows of 10 of a are 750 tokens: in rows of 40 the next begins at 760."""
    saved = state(config(prefixes[:2], "3/1"), 100)
    cfg = config(prefixes[:2], "1/1", sequence=40)
    found, new = on(saved, cfg, 45)
    assert new["data"] == {"consumed_samples": 25} and new["carried"]["rows"] == [19, 7]
    assert new["carried"]["first"] == 25 and new["carried"]["tokens"] == 0
    a, b = by_source(found, 25, 45, 2)
    assert a == alone(prefixes[0], 29, 40)[19:] and b == alone(prefixes[1], 17, 40)[7:]
    longer, again = on(state(cfg, 26, new["carried"]), config(prefixes[:2], "1/1", 100), 12)
    # 1,040 tokens are 10.4 samples of 100: eleven, less the 60 tokens that were not read.
    assert again["data"] == {"consumed_samples": 11} and again["carried"]["tokens"] == -60
    assert again["carried"]["rows"] == [8, 3]
    assert longer[11].tolist() in (
        alone(prefixes[0], 9, 100)[8],
        alone(prefixes[1], 4, 100)[3],
    )


def test_steps_that_were_skipped_or_undone_stay_read(prefixes: list[str]) -> None:
    """The run counts 32 of 60 samples, as 20 were undone, 8 skipped; its source is at 60."""
    saved = state(config(prefixes[:1], ""), 60) | {"skipped_samples": 8}
    saved["data"]["undone_samples"] = 20
    saved["health"] = {"skipped": 1, "seen": {"loss": [9.0]}, "in_a_row": 1}
    found, new = on(saved, config(prefixes[:2], "1/1"), 44)
    assert new["data"] == {"consumed_samples": 40} and new["skipped_samples"] == 0
    assert new["carried"] == {"first": 40, "tokens": -80, "rows": [60, 0], "gone": {}}
    assert new["health"] == {"skipped": 1, "seen": {}, "in_a_row": 0}
    a, _ = by_source(found, 40, 44, 2)
    assert a == alone(prefixes[0], 62)[60:]


def test_sources_without_weights_are_read_by_their_tokens(prefixes: list[str]) -> None:
    _, new = on(state(config(prefixes, ""), 90), config(prefixes[:1], ""), 100)
    assert new["carried"]["rows"] == [30]
    assert new["carried"]["gone"] == {prefix: 300 for prefix in prefixes[1:]}


def test_stages_count_the_tokens_of_the_run(prefixes: list[str]) -> None:
    """A source is added within the second stage, whose weights it joins; a third one follows."""
    old = config(prefixes[:2], "1/0", stages=["200:0/1", "600:1/1"])
    cfg = config(prefixes, "1/1/1", stages=["200:0/1/1", "600:1/0/0"])
    found, new = on(state(old, 40), cfg, 80)
    assert new["carried"]["rows"] == [20, 20, 0]
    a, b, c = by_source(found, 40, 60, 3)
    assert (len(a), len(b), len(c)) == (0, 10, 10) and b == alone(prefixes[1], 30)[20:]
    a, b, c = by_source(found, 60, 80, 3)
    assert (len(b), len(c)) == (0, 0) and a == alone(prefixes[0], 40)[20:]


def test_stages_that_have_not_begun_change_nothing(prefixes: list[str]) -> None:
    saved = state(config(prefixes[:2], "1/1"), 40)
    cfg = config(prefixes[:2], "1/1", stages=["401:0/1"])
    assert carried(saved, cfg, build_datasets(cfg, VOCABULARY, 50, 0)[0]) is saved
    other = config(prefixes[:2], "1/1", stages=["389:0/1"])
    assert carried(saved, other, build_datasets(other, VOCABULARY, 50, 0)[0]) is not saved


def test_random_tokens_have_no_sources() -> None:
    data = DataConfig(source="synthetic", sequence_length=10)
    cfg = Config(data=DataConfig(source="synthetic", sequence_length=40))
    cfg.model.vocab_size = VOCABULARY
    found, new = on(state(Config(data=data), 10), cfg, 8)
    assert new["data"] == {"consumed_samples": 3} and new["carried"]["tokens"] == -20
    plain, _ = build_datasets(cfg, VOCABULARY, 8, 0)
    assert np.array_equal(found[5], plain[5])


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_ranks_read_each_sample_once(prefixes: list[str], ranks: int) -> None:
    saved = state(config(prefixes[:2], "1/1"), 40)
    found, new = on(saved, config(prefixes, "1/1/2"), 80)
    taken = []
    for rank in range(ranks):
        loader = Loader(found, 2, 8, rank, ranks)
        loader.load_state_dict(new["data"])
        taken += [row for batch in loader for row in batch["tokens"].tolist()]
    assert sorted(taken) == sorted(found[i][:-1].tolist() for i in range(40, 80))
