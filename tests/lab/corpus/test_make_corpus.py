"""make_corpus: documents of small packages, without duplicates, the same on every machine."""

import base64
import io
import json
import random
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from phalanx.scripts.lab.corpus import make_corpus, tiktoken_file
from phalanx.scripts.lab.corpus.documents import MOST, pieces
from phalanx.scripts.lab.corpus.duplicates import SIMILAR, similarity, sketch

WORDS = [f"word{i}" for i in range(3000)]


def prose(seed: int, count: int = 120) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def tar(files: dict[str, bytes], mode: str = "w:gz") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


VOCABULARY = [*(bytes([i]) for i in range(256)), b"wo", b"rd", b"word", b" word"]


def vocabulary() -> bytes:
    lines = [base64.b64encode(token) + b" %d" % i for i, token in enumerate(VOCABULARY)]
    return b"\n".join(lines) + b"\n"


def write_recipe(folder: Path) -> Path:
    """Two packages, of which one has an archive inside, and one with a vocabulary."""
    texts = {f"a-1/lib{i % 5}/f{i}.py": prose(i).encode() for i in range(25)}
    near = prose(3).replace(prose(3).split()[60], "another")
    inner = tar({f"src/dir{i}/x.c": prose(100 + i).encode() for i in range(6)}, "w:xz")
    texts |= {
        "a-1/lib0/same.py": prose(7).encode(),
        "a-1/lib1/near.py": near.encode(),
        "a-1/lib1/latin.py": b"\xe9" * 500,
        "a-1/lib1/short.py": b"x = 1\n",
        "a-1/lib1/other.bin": b"\0" * 500,
        "a-1/LICENSE": b"the terms",
        "a-1/src.tar.xz": inner,
    }
    (folder / "a-1.tar.gz").write_bytes(tar(texts))
    with zipfile.ZipFile(folder / "b-1.whl", "w") as wheel:
        wheel.writestr("b/long.py", "\n".join(prose(i) for i in range(200, 320)))
        wheel.writestr("b/again.py", prose(8))
    (folder / "v-1.tar.gz").write_bytes(tar({"v-1/bpe.tiktoken": vocabulary()}))
    path = folder / "packages.yaml"
    path.write_text(
        """
tokenizer: {manager: file, name: v-1.tar.gz, license: MIT, file: "*/bpe.tiktoken"}
packages:
  - {manager: file, name: a-1.tar.gz, license: MIT, domains: {python: ["*.py"], c: ["*.c"]}}
  - {manager: file, name: b-1.whl, license: BSD, domains: {python: ["*.py"]}}
"""
    )
    return path


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_recipe(tmp_path)


def run(recipe: Path, output: Path, *more: str) -> dict[str, Any]:
    share = ["--held-out", "0.1", "--recipe", str(recipe)]
    assert make_corpus.main([str(output), *share, *more]) == 0
    manifest: dict[str, Any] = json.loads((output / "manifest.json").read_text())
    return manifest


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus with its tokens."""
    folder = tmp_path_factory.mktemp("corpus")
    run(write_recipe(folder), folder / "out")
    return folder / "out"


def test_a_corpus_has_each_text_once_in_one_part(output: Path) -> None:
    manifest = json.loads((output / "manifest.json").read_text())
    assert manifest["left_out"] == {
        "duplicate": 2,
        "near-duplicate": 1,
        "no UTF-8": 1,
        "shorter than 200 bytes, or binary": 1,
    }
    train = rows(output / "train.jsonl")
    held = {path.stem: rows(path) for path in (output / "held_out").glob("*.jsonl")}
    assert held.keys() == {"python", "c"} and all(held.values())
    sources = [row["source"] for row in (*train, *held["python"], *held["c"])]
    assert len(sources) == len(set(sources)) and sources != sorted(sources)
    files = {source.partition("#")[0] for source in sources}
    assert len(files) == 25 + 6 + 1
    folders = [
        {row["source"].rpartition("/")[0] for row in part} for part in (train, *held.values())
    ]
    assert not folders[0] & (folders[1] | folders[2])
    whole = {row["source"]: row["text"] for row in (*train, *held["python"])}
    assert whole["a-1.tar.gz/a-1/lib0/f0.py"] == prose(0)
    assert max(len(text) for text in whole.values()) <= MOST
    assert (output / "licenses/a-1.tar.gz/a-1_LICENSE").read_bytes() == b"the terms"
    assert manifest["parts"]["train"]["documents"] == len(train)


def test_the_tokens_are_those_of_the_texts(output: Path) -> None:
    tokenizer = Tokenizer.from_file(str(output / "tokenizer.json"))
    ids = np.fromfile(output / "train.bin", np.uint16)
    end = tokenizer.token_to_id(tiktoken_file.END)
    assert end == len(VOCABULARY)
    texts = [row["text"] for row in rows(output / "train.jsonl")]
    ends = np.flatnonzero(ids == end)
    assert len(ends) == len(texts)
    for text, part in zip(texts, np.split(ids, ends + 1), strict=False):
        assert tokenizer.decode(part[:-1].tolist()) == text


def test_the_corpus_is_the_same_again_and_its_seed_decides(recipe: Path, tmp_path: Path) -> None:
    first, second = (run(recipe, tmp_path / name, "--no-tokens") for name in ("a", "b"))
    assert first == second
    other = run(recipe, tmp_path / "a", "--no-tokens", "--seed", "2")
    assert other["sha256"]["train.jsonl"] != first["sha256"]["train.jsonl"]
    assert other["packages"] == first["packages"]


def test_files_that_the_recipe_excludes_are_not_taken(recipe: Path, tmp_path: Path) -> None:
    whole = run(recipe, tmp_path / "a", "--no-tokens")
    text = recipe.read_text().replace(
        "license: MIT, domains", 'without: ["*/dir3/*"], license: MIT, domains'
    )
    recipe.write_text(text)
    fewer = run(recipe, tmp_path / "b", "--no-tokens")
    count = [sum(part["documents"] for part in m["parts"].values()) for m in (whole, fewer)]
    assert count[0] - count[1] == 1
    assert not any("/dir3/" in row["source"] for row in rows(tmp_path / "b/train.jsonl"))


def test_a_domain_is_cut_to_a_size_in_the_shuffled_order(recipe: Path, tmp_path: Path) -> None:
    most = 20_000
    whole = run(recipe, tmp_path / "a", "--no-tokens", "--held-out", "0")
    cut = run(recipe, tmp_path / "b", "--no-tokens", "--held-out", "0", "--domain-mb", "0.02")
    sizes, before = cut["parts"]["train"]["domains"], whole["parts"]["train"]["domains"]
    assert before["python"] > most > sizes["python"] > most / 2
    assert before["c"] == sizes["c"] < most
    sources = [[row["source"] for row in rows(tmp_path / f"{x}/train.jsonl")] for x in "ab"]
    assert sources[1] == [source for source in sources[0] if source in sources[1]]
    assert cut["domain_mb"] == 0.02 and whole["domain_mb"] is None


def test_long_files_are_parts_of_their_own(recipe: Path, tmp_path: Path) -> None:
    cut = run(recipe, tmp_path / "a", "--no-tokens")
    assert "long" not in cut["parts"]
    whole = run(recipe, tmp_path / "b", "--no-tokens", "--whole", "80", "200")
    (held,) = cut["parts"].keys() & {"held_out/python"}
    (row,) = [row for n in ("long", "held_out/long") for row in rows_if(tmp_path / f"b/{n}.jsonl")]
    assert row["text"] == "\n".join(prose(i) for i in range(200, 320))
    assert row["source"] == "b-1.whl/b/long.py" and len(row["text"]) > MOST
    folder = [r["source"] for r in rows(tmp_path / f"b/{held}.jsonl") if r["source"][:5] == "b-1.w"]
    assert bool(folder) == (tmp_path / "b/held_out/long.jsonl").exists()
    assert whole["whole"] == [80, 200] and cut["whole"] is None
    kept = run(recipe, tmp_path / "c", "--no-tokens", "--whole", "80", "200", "--whole-mb", "0.01")
    assert not {"long", "held_out/long"} & kept["parts"].keys()
    assert not any("long.py" in r["source"] for r in rows(tmp_path / "c/train.jsonl"))


def rows_if(path: Path) -> list[dict[str, str]]:
    return rows(path) if path.exists() else []


def test_merges_are_those_of_the_ranks() -> None:
    tokenizer = tiktoken_file.convert(vocabulary())
    assert tokenizer.encode("word words").ids == [258, 259, ord("s")]
    with pytest.raises(ValueError, match="line 2 of the vocabulary"):
        tiktoken_file.convert(b"AA== 0\nnonsense\n")


def test_similarity_is_that_of_shingles() -> None:
    text = prose(1, 2000)
    words = text.split()
    half = " ".join(words[:1000] + prose(2, 1000).split())
    assert similarity(sketch(text), sketch(text.upper().replace(" ", "\n "))) == 1
    assert similarity(sketch(text), sketch(half)) < SIMILAR  # a third of the shingles of both
    assert similarity(sketch(text), sketch(prose(3, 2000))) < 0.1
    words[1000] = "another"
    assert similarity(sketch(text), sketch(" ".join(words))) > SIMILAR


def test_long_texts_are_cut_at_lines() -> None:
    text = "\n".join(["a" * 99] * 2000)
    parts = list(pieces(text))
    assert "\n".join(parts) == text and all(len(part) <= MOST for part in parts)
    assert list(pieces("b" * (MOST + 1))) == ["b" * MOST, "b"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("manager: file, name: b", "manager: git, name: b"), "manager=git; use pip, apt or file"),
        (("b-1.whl", "gone.whl"), "gone.whl"),
        (("license: BSD", "licence: BSD"), "b-1.whl has a wrong field"),
        (("license: BSD", "license: BSD, unit: line"), "unit=line; use folder or file"),
        (("bpe.tiktoken", "other"), "has no file */other"),
    ],
)
def test_a_wrong_recipe_is_refused_in_a_line(
    change: tuple[str, str], message: str, recipe: Path, tmp_path: Path, capsys: Any
) -> None:
    recipe.write_text(recipe.read_text().replace(*change))
    assert make_corpus.main([str(tmp_path / "out"), "--recipe", str(recipe)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_packages_that_the_recipe_lacks_are_named(
    recipe: Path, tmp_path: Path, capsys: Any
) -> None:
    argv = [str(tmp_path / "out"), "--recipe", str(recipe), "--only", "c"]
    assert make_corpus.main(argv) == 2
    assert "--only c is not in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--domain-mb", "0"], "--domain-mb 0.0 must be positive"),
        (["--whole-mb", "-1"], "--whole-mb -1.0 must be positive"),
        (["--whole", "4", "200"], "--whole 4 200: give the KiB"),
        (["--whole", "200", "100"], "--whole 200 100: give the KiB"),
    ],
)
def test_wrong_sizes_are_refused(
    words: list[str], message: str, recipe: Path, tmp_path: Path, capsys: Any
) -> None:
    argv = [str(tmp_path / "out"), "--recipe", str(recipe), *words]
    assert make_corpus.main(argv) == 2
    assert message in capsys.readouterr().err
