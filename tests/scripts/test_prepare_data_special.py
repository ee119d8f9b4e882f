"""prepare_data where documents spell special tokens: as text, as tokens, or refused."""

import json
import os
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer

from phalanx.moe.data.host_cache import digest
from phalanx.moe.data.token_files import Sidecar, open_corpus
from phalanx.moe.data.tokenizer.codec import Codec
from phalanx.moe.inference.scoring import text_of
from tests.scripts.test_prepare_data import documents, left_over, lines, run, write_jsonl
from tests.support.tokenizers import llama

TEXTS = ["bye </s> mid <s>x", "fine", "</s></s>"]
END = 2


@pytest.fixture
def tokenizer(tmp_path: Path) -> list[str]:
    (tmp_path / "t").mkdir()
    llama().save(str(tmp_path / "t" / "tokenizer.json"))
    return ["--tokenizer", str(tmp_path / "t"), "--eod", "</s>"]


def sidecar(prefix: Path) -> Sidecar:
    described = open_corpus(str(prefix)).sidecar
    assert described is not None
    return described


def test_the_end_of_a_document_is_at_its_end_alone(
    tmp_path: Path, tokenizer: list[str], capsys: pytest.CaptureFixture
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    assert run(tmp_path / "out", path, *tokenizer, "--chunk-mb", 0.00002) == 0
    rows = [row.tolist() for row in documents(tmp_path / "out")]
    assert all(row[-1] == END and END not in row[:-1] and 1 not in row for row in rows)
    reader = Tokenizer.from_file(str(tmp_path / "out.tokenizer.json"))
    assert [reader.decode(row[:-1], skip_special_tokens=False) for row in rows] == TEXTS
    told = "special tokens spelled in 2 documents, encoded as text: 3 '</s>', 1 '<s>'"
    assert told in capsys.readouterr().out.splitlines()
    described = sidecar(tmp_path / "out")
    assert (described.special_text, described.special_spelled) == ("plain", 4)
    scored = text_of(str(path), lambda: Codec(llama(), (END,)))
    assert scored.ids_N.tolist() == [END, *(i for row in rows for i in row)]
    assert scored.spelled == {"</s>": 3, "<s>": 1}


def test_special_makes_each_spelling_the_token(
    tmp_path: Path, tokenizer: list[str], capsys: pytest.CaptureFixture
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    assert run(tmp_path / "out", path, *tokenizer, "--special-text", "special") == 0
    rows = [row.tolist() for row in documents(tmp_path / "out")]
    assert [row.count(END) for row in rows] == [2, 1, 3] and rows[0].count(1) == 1
    told = "special tokens spelled in 2 documents, each became the token: 3 '</s>', 1 '<s>'"
    assert told in capsys.readouterr().out.splitlines()
    assert sidecar(tmp_path / "out").special_text == "special"


def test_text_without_spellings_is_the_same_for_every_choice(
    tmp_path: Path, tokenizer: list[str], capsys: pytest.CaptureFixture
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["fine", "s> </ s"])
    for choice in ("plain", "special", "error"):
        assert run(tmp_path / choice, path, *tokenizer, "--special-text", choice) == 0
    assert len({(tmp_path / f"{c}.bin").read_bytes() for c in ("plain", "special", "error")}) == 1
    assert "spelled" not in capsys.readouterr().out


def test_error_names_file_line_and_token(
    tmp_path: Path, tokenizer: list[str], capsys: pytest.CaptureFixture
) -> None:
    error = ["--special-text", "error"]
    table = pa.table({"text": ["fine", "a <s>"]})
    parquet.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "a.txt").write_text("<s>")
    (tmp_path / "a.json").write_text('[{"text": "a"},\n{"text": "</s>"}]')
    fault = "the special token '<s>' in the text at character"
    for path, told in (
        (
            write_jsonl(tmp_path / "a.jsonl", ["a", "é <s> </s>"]),
            f"a.jsonl:2: {fault} 2 (--special-text plain",
        ),
        (tmp_path / "a.parquet", f"a.parquet: row 2: {fault} 2 (--special-text plain"),
        (tmp_path / "a.txt", f"a.txt: {fault} 0 (--special-text plain"),
        (tmp_path / "a.json", "a.json:2: the special token '</s>' in the text at character 0"),
    ):
        assert run(tmp_path / "out", path, *tokenizer, *error) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert told in line and "; fix it, or leave" in line and left_over(tmp_path) == []
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    assert run(tmp_path / "out", path, *tokenizer, *error, "--skip-bad", 2) == 0
    assert "2 bad: the special token '</s>' in the text" in capsys.readouterr().out
    assert len(documents(tmp_path / "out")) == 1 and sidecar(tmp_path / "out").bad_rows == 2
    nul = lines(tmp_path, '{"text": "a\\u0000"}')
    assert run(tmp_path / "nul", nul, "--bytes", *error) == 1
    assert "a.jsonl:1: the special token '\\x00' in the text at" in capsys.readouterr().err


def test_a_nul_does_not_end_a_document_of_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["a\0b", "c"])
    assert run(tmp_path / "out", path, "--bytes") == 0
    rows = [bytes(row.tolist()) for row in documents(tmp_path / "out")]
    assert rows == [b"a\xc0\x80b\0", b"c\0"]
    assert Codec(None, (0,)).decode(list(rows[0][:-1])) == "a\0b"
    told = "special tokens spelled in 1 document, encoded as text: 1 '\\x00'"
    assert told in capsys.readouterr().out.splitlines()
    described = sidecar(tmp_path / "out")
    assert (described.vocab_size, described.eod, described.text_bytes) == (256, 0, 4)
    assert run(tmp_path / "old", path, "--bytes", "--special-text", "special") == 0
    assert [bytes(row.tolist()) for row in documents(tmp_path / "old")] == [b"a\0b\0", b"c\0"]


def test_a_corpus_of_an_earlier_version_stays_and_says_how_it_was_made(
    tmp_path: Path, tokenizer: list[str], capsys: pytest.CaptureFixture
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    special = [path, *tokenizer, "--special-text", "special"]
    assert run(tmp_path / "out", *special) == 0
    file = tmp_path / "out.json"
    content = json.loads(file.read_text())
    for name in ("special_text", "special_spelled", "tokenizer_meaning", "labels", "packed"):
        del content[name]
    counted = {n: 0 for n in ("documents", "tokens", "text_bytes", "skipped", "bad_rows")}
    sidecar_then = content | counted | {"plan": ""}
    recipe_then = {
        "tokenizer": str(tmp_path / "t" / "tokenizer.json"),
        "eod": END,
        "dtype": "uint16",
        "reading": {"key": "text", "keys": {}, "lines": False},
    }
    stat = os.stat(path)
    inputs = [(str(path), stat.st_size, stat.st_mtime_ns)]
    assert content["plan"] == digest([inputs, recipe_then, sidecar_then, 32.0])
    file.write_text(json.dumps(content))
    assert sidecar(tmp_path / "out").special_text == "special"
    capsys.readouterr()
    assert run(tmp_path / "out", *special) == 0
    assert "complete already" in capsys.readouterr().out
    assert run(tmp_path / "out", path, *tokenizer) == 1
    error = capsys.readouterr().err
    assert "out was made with --special-text special, as by all earlier versions; give" in error
    assert run(tmp_path / "out", path, *tokenizer, "--overwrite") == 0
    assert sidecar(tmp_path / "out").special_text == "plain"


def test_the_folder_of_parts_is_of_one_choice(
    tmp_path: Path, tokenizer: list[str], capsys: pytest.CaptureFixture
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    (tmp_path / "out.parts").mkdir()
    assert run(tmp_path / "one", path, *tokenizer) == 0
    (tmp_path / "out.parts" / "plan").write_text(sidecar(tmp_path / "one").plan)
    assert run(tmp_path / "out", path, *tokenizer, "--special-text", "special") == 1
    assert "is of a run with other inputs or options" in capsys.readouterr().err
