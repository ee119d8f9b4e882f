"""Rows of text files: packed or not, arrays, byte order marks, and what is said of broken ones."""

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from phalanx.moe.data import text_rows
from phalanx.moe.data.host_cache import DataError
from phalanx.moe.data.text_rows import Bad, Reading, cut, listing, read, read_keys, rows
from phalanx.moe.data.tokenizer.codec import Codec
from phalanx.moe.inference.scoring import text_of

TEXTS = ["experts", "数据", "two\nlines", '"quoted" \\ 🙂', ""]
PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": lambda raw: pa.compress(raw, codec="zstd", asbytes=True),
}


def texts_of(path: Path, reading: Reading = Reading(), chunk: int = 1 << 30) -> list[str]:  # noqa: B008
    return [text for piece, _ in cut(str(path), reading, chunk) for text in read(piece, reading)]


def found_in(path: Path, chunk: int = 1 << 30) -> list[str | Bad]:
    reading = Reading()
    return [row for piece, _ in cut(str(path), reading, chunk) for row in rows(piece, reading)]


def jsonl(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def array(texts: list[str]) -> bytes:
    return json.dumps([{"n": i, "text": t} for i, t in enumerate(texts)], indent=1).encode()


@pytest.mark.parametrize("packing", PACK)
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["", "mark"])
def test_the_same_texts_of_every_kind_of_file(tmp_path: Path, mark: bytes, packing: str) -> None:
    """A byte order mark at the beginning of a file is no text."""
    for name, raw in (
        ("a.jsonl", jsonl(TEXTS)),
        ("B.JSONL", jsonl(TEXTS)),
        ("a.json", jsonl(TEXTS)),
        ("b.json", array(TEXTS)),
        ("c.json", b" \r\n" + json.dumps([{"text": t} for t in TEXTS]).encode()),
    ):
        path = tmp_path / f"{name}{packing}"
        path.write_bytes(PACK[packing](mark + raw))
        for chunk in (7, 1 << 30):
            assert texts_of(path, chunk=chunk) == TEXTS, name
    path = tmp_path / f"a.txt{packing}"
    path.write_bytes(PACK[packing](mark + "one\r\n数据\n\n".encode()))
    assert texts_of(path) == ["one\r\n数据\n\n"]
    for chunk in (2, 1 << 30):
        assert texts_of(path, Reading(lines=True), chunk) == ["one", "数据", ""]


def test_packed_files_may_have_several_frames(tmp_path: Path) -> None:
    for packing in (".gz", ".zst"):
        path = tmp_path / f"a.jsonl{packing}"
        path.write_bytes(PACK[packing](jsonl(TEXTS)) + PACK[packing](jsonl(TEXTS)))
        assert texts_of(path) == TEXTS * 2


@pytest.mark.parametrize("packing", [".gz", ".zst"])
def test_packed_files_that_are_damaged_are_named(tmp_path: Path, packing: str) -> None:
    noise = [str(n) for n in np.random.default_rng(0).integers(1 << 60, size=2000)]
    whole = PACK[packing](jsonl(noise))
    for raw in (whole[: len(whole) // 2], b"hello", whole[1:]):
        (tmp_path / f"a.jsonl{packing}").write_bytes(raw)
        with pytest.raises(
            DataError, match=rf"a.jsonl{packing} cannot be decompressed: .*download or co"
        ):
            texts_of(tmp_path / f"a.jsonl{packing}")


def test_without_pyarrow_the_way_to_it_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for name in ("a.txt.zst", "a.parquet"):
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(DataError, match=f"{name} needs pyarrow.*: pip install pyarrow$"):
            texts_of(tmp_path / name)


@pytest.mark.parametrize("block", [1, 2, 5, 64, 1 << 20])
def test_arrays_are_read_block_by_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(text_rows, "_BLOCK", block)
    rows_in: list[Any] = [
        {"text": "a" * 50},
        {"n": -12.5e3, "text": "b"},
        1234567,
        [],
        {"text": None},
    ]
    path = tmp_path / "a.json"
    for indent in (None, 2):
        path.write_text(json.dumps(rows_in, indent=indent) + "\n")
        found = found_in(path)
        lines = path.read_text().splitlines()
        assert [row for row in found if isinstance(row, str)] == ["a" * 50, "b", ""]
        bad = [row for row in found if isinstance(row, Bad)]
        assert [row.reason for row in bad] == ["no key 'text'"] * 2
        for row, text in zip(bad, ("1234567", "[]"), strict=True):
            assert text in lines[row.number - 1]
    path.write_text("[]")
    assert found_in(path) == []


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ('[\n{"text": "a"},\n{"text": b}]', "a.json:3: not JSON: Expecting value"),
        ('[\n{"text": "a"}\n{"text": "b"}]', "a.json:3: not JSON: expecting ',', found '{'"),
        ('[\n{"text": "a"},\n]', "a.json:3: not JSON: a comma before the end"),
        ('[\n{"text": "a"}', "a.json:2: not JSON: expecting ',', found 'the end of the file'"),
        ('[\n{"text": "a', "a.json:2: not JSON: Unterminated string"),
        ('[{"text": "a"}]\n\n]', "a.json:3: not JSON: text after the end"),
        ('[\n{"n": ' + "9" * 5000 + "}]", "a.json:2: not JSON: Exceeds the limit"),
        ("[\n" + "[" * 100_000, "a.json:2: not JSON: maximum recursion"),
        ('[\n{"text": "\udcff"}]', "a.json:2: 'text' is not UTF-8 at character 0"),
        ('{"text":\n"a"}', "a.json:1: not JSON: Expecting value"),
    ],
)
@pytest.mark.parametrize("block", [3, 1 << 20])
def test_broken_arrays_are_reported_by_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raw: str, message: str, block: int
) -> None:
    (tmp_path / "a.json").write_text(raw, errors="surrogateescape")
    if raw[0] == "[":
        monkeypatch.setattr(text_rows, "_BLOCK", block)
    with pytest.raises(DataError) as caught:
        texts_of(tmp_path / "a.json")
    assert message in str(caught.value) and "\n" not in str(caught.value)


ODD = {
    "digits": '{"text": "x", "n": ' + "9" * 5000 + "}",
    "nested": '{"text": "x", "n": ' + "[" * 100_000 + "}",
}


@pytest.mark.parametrize("odd", ODD)
def test_json_that_python_refuses_is_a_broken_line(tmp_path: Path, odd: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + ODD[odd] + "\n")
    for chunk in (10, 1 << 30):
        with pytest.raises(DataError, match="^[^\n]*a.jsonl:2: not JSON: [^\n]*$"):
            texts_of(path, chunk=chunk)
    with pytest.raises(DataError, match="^[^\n]*a.jsonl:2: not JSON: [^\n]*$"):  # evaluate.py
        text_of(str(path), lambda: Codec(None, (0,)))


def test_utf16_is_reported_as_that(tmp_path: Path) -> None:
    for name in ("a.txt", "a.jsonl"):
        (tmp_path / name).write_text('{"text": "x"}\n', encoding="utf-16")
        with pytest.raises(DataError, match="not UTF-8 at byte 0 but UTF-16; .*iconv -f UTF-16"):
            texts_of(tmp_path / name)


def test_rows_of_parquet_that_are_no_text_are_numbered(tmp_path: Path) -> None:
    raw, ends = b"fineok\xff\xfe", np.array([0, 4, 4, 6, 8], np.int32)
    column = pa.Array.from_buffers(pa.string(), 4, [None, pa.py_buffer(ends), pa.py_buffer(raw)])
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": column}), path, row_group_size=3)
    *good, bad = found_in(path)
    assert good == ["fine", "", "ok"] and isinstance(bad, Bad)
    assert str(bad) == f"{path}: row 4: not UTF-8 at byte 0"
    coded = pa.array(["a", "b", "a", None]).dictionary_encode()
    parquet.write_table(pa.table({"text": coded}), path)
    assert texts_of(path) == ["a", "b", "a", ""]
    whole = bytearray(path.read_bytes())
    whole[4:40] = b"\xff" * 36
    path.write_bytes(whole)
    with pytest.raises(DataError, match="a.parquet: its row groups cannot be read: "):
        texts_of(path)


def test_keys_by_kind_of_file() -> None:
    reading = read_keys(["text", "parquet=content", "json=a=b"])
    for name, key in (
        ("a.jsonl", "text"),
        ("a.JSONL.gz", "text"),
        ("a.parquet", "content"),
        ("a.json", "a=b"),
        ("a.json.zst", "a=b"),
    ):
        assert reading.key_of(name) == key
    assert read_keys([]) == Reading() and read_keys(["x=y"]).key == "x=y"
    assert read_keys(["jsonl=body"]).key_of("a.parquet") == "text"
    for wrong in (["a", "b"], ["jsonl="], ["jsonl=a", "jsonl=b"], [""], ["txt=a", "b"]):
        with pytest.raises(DataError, match="^--key .*give one"):
            read_keys(wrong)


def test_places_of_bad_rows_are_lines_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join(b"{}\n" if i % 3 else b'{"text": "x"}\n\n' for i in range(30)))
    lines = path.read_text().splitlines()
    expected = [i for i, line in enumerate(lines, start=1) if line == "{}"]
    for chunk in (1, 5, 40, 1 << 30):
        bad = [row for row in found_in(path, chunk=chunk) if isinstance(row, Bad)]
        assert [int(row.place().rpartition(":")[2]) for row in bad] == expected
        reported = [line.partition("\t")[0] for line in listing([*bad, *bad])]
        assert reported == [f"{path}:{n}" for n in expected] * 2
