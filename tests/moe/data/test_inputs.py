"""Which files of a folder are taken, and that the others are said."""

from pathlib import Path

import pytest

from phalanx.moe.data.host_cache import DataError
from phalanx.moe.data.inputs import find_inputs

TAKEN = [
    *("a.jsonl", "b.JSONL", "c.jsonl.gz", "d.txt", "e.txt.zst", "f.parquet", "g.json", "h.json.gz"),
    *("sub/a.txt", "sub/wiki.jsonl", "reader.txt"),
]
LEFT = {
    "hidden": [".ipynb_checkpoints/", ".hidden.txt", "sub/.git/"],
    "about the data": ["README.txt", "sub/LICENSE.txt", "dataset_infos.json"],
    "of prepared data": ["sub/wiki.json", "sub/wiki.tokenizer.json", "sub/out.parts/"],
    "of a tokenizer or model": ["tokenizer.json", "tokenizer_config.json"],
    "of other kinds": ["a.csv", "README.md", "x.parquet.gz", "sub/wiki.idx", "b.txt.xz"],
    "links to folders": ["linked/"],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "texts"
    for name in (
        *(name for names in LEFT.values() for name in names if name[-1] != "/"),
        *(".ipynb_checkpoints/a-checkpoint.txt", "sub/.git/a.txt", "sub/out.parts/0000000.json"),
        *("sub/out.parts/plan", *TAKEN),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")
    (tmp_path / "elsewhere").mkdir()
    (root / "linked").symlink_to(tmp_path / "elsewhere")
    return root


def test_a_folder_says_what_is_taken_and_what_is_not(folder: Path) -> None:
    found = find_inputs([str(folder)])
    assert [Path(path).relative_to(folder) for path in found.files] == sorted(map(Path, TAKEN))
    assert {reason: sorted(names) for reason, names in found.left.items()} == {
        reason: sorted(names) for reason, names in LEFT.items()
    }
    taken, left = found.report()
    assert taken == (
        "taken: 3 .jsonl, 3 .txt, 1 .jsonl.gz, 1 .txt.zst, 1 .parquet, 1 .json, 1 .json.gz (0.0 MB)"
    )
    assert all(f"{len(names)} {reason} (" in left for reason, names in LEFT.items())
    assert "5 of other kinds (" in left and ", ...)" in left


def test_a_file_that_is_named_is_taken(folder: Path) -> None:
    names = [str(folder / name) for name in ("README.txt", ".hidden.txt", "tokenizer.json")]
    found = find_inputs(names)
    assert found.files == names and not found.left
    assert list(found.report()) == ["taken: 2 .txt, 1 .json (0.0 MB)"]


def test_a_folder_without_text_tells_what_it_holds(folder: Path) -> None:
    (folder / "only").mkdir()
    (folder / "only/README.txt").write_text("x")
    with pytest.raises(
        DataError, match=r"only holds no .*left out: 1 about the data \(README.txt\)"
    ):
        find_inputs([str(folder / "only")])
