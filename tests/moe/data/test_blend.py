"""Checks of .bin/.idx pairs before a launch: parts as Megatron-Core cuts them, epochs, refusals."""

from pathlib import Path

import pytest
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)

from phalanx.configs.schema import DataConfig
from phalanx.moe.data import blend as module
from phalanx.moe.data.blend import bounds, open_blend, parse_split
from phalanx.moe.data.host_cache import DataError
from phalanx.moe.data.token_files import embedded, embedded_tokens, open_corpus
from tests.support.runs import write_corpus


@pytest.mark.parametrize("split", ["98,2", "1", "90,5,5", "0.7,0.2,0.1", "3,1", "1,0,1"])
def test_parts_are_cut_as_megatron_core_cuts_them(split: str) -> None:
    given = parse_split(split, (1, 0))
    theirs = convert_split_vector_to_split_matrix(parse_and_normalize_split(given))
    assert [pair if pair[1] > pair[0] else None for pair in bounds(given)] == theirs[:2]


def test_a_run_reads_each_pair_by_its_weight(tmp_path: Path) -> None:
    prefixes = [
        write_corpus(tmp_path / "a", [[1] * 10] * 20),
        write_corpus(tmp_path / "b", [[1] * 10] * 80),
    ]
    cfg = DataConfig(source="indexed", sequence_length=8, split="90,10")
    by_size = open_blend(prefixes, None, cfg, 256, (4, 1))
    assert [[part.tokens for part in parts] for parts in by_size.parts] == [[180, 20], [720, 80]]
    assert by_size.epochs(9000) == [10, 10]
    assert open_blend(prefixes, [1, 3], cfg, 256, (4, 1)).epochs(7200) == [10, 7.5]
    assert open_blend(prefixes[:1], None, cfg, 256, (4, 1)).epochs(360) == [2]


def test_a_pair_that_may_not_be_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(prefix: str, *_: object) -> None:
        raise PermissionError(13, "Permission denied", f"{prefix}.bin")

    monkeypatch.setattr(module, "open_corpus", refuse)
    with pytest.raises(DataError, match=r"^x/a\.bin cannot be read \(data\.blend\): Permission"):
        open_blend(["x/a"], None, DataConfig(), 256, (1, 0))


def test_the_embedded_corpus_is_counted_without_building_it(tmp_path: Path) -> None:
    library = tmp_path / "library"
    library.mkdir()
    for name, text in {"a.py": b"x = 1\n", "b.py": b"", "c.py": b"a\0b", "d.py": b"12"}.items():
        (library / name).write_bytes(text)
    lengths = open_corpus(embedded(tmp_path / "cache", library)).lengths
    assert embedded_tokens(library) == int(lengths.sum()) == 10
