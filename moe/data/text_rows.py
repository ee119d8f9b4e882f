"""Rows of text files: texts, and faults of broken rows.

A line belongs to the piece in which it starts, so that every row is read once for any split.
Invariant: a broken row yields a `Bad`, and the next row follows; a broken file raises a DataError.
By default prepare_data fails at the first broken row. With `--skip-bad` they are left out, counted,
and listed in a file next to the data.
"""

import codecs
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from phalanx.moe.data.host_cache import DataError
from phalanx.moe.data.inputs import KINDS, arrow, is_packed, kind_of, opened

ROW = -1  # `Bad.start` of a row of a Parquet file, which has no lines


@dataclass(frozen=True)
class Bad:
    """A broken row, which gives no document."""

    path: str
    start: int  # byte offset at which `number` starts to count
    number: int  # first line of the row, or row of a Parquet file, from 1; 0 for a complete file
    reason: str  # kind of fault, by which bad rows are counted
    detail: str = ""

    def place(self) -> str:
        """path:line, or path: row N. Reads the file up to `start` to count its lines."""
        if self.start == ROW:
            return f"{self.path}: row {self.number}"
        if not self.number:
            return self.path
        return f"{self.path}:{_lines_before(self.path, self.start) + self.number}"

    def __str__(self) -> str:
        return f"{self.place()}: {self.reason}{self.detail}"


class BadRow(DataError):
    """An input has a broken row, and none may be left out."""


class TooManyBad(DataError):
    """An input has more broken rows than may be left out; finished shards are kept."""


@dataclass(frozen=True)
class Limit:
    """Number of broken rows that may be left out: `--skip-bad`."""

    text: str
    count: int | None  # none if a share is set
    share: float = 0.0

    @staticmethod
    def read(text: str) -> "Limit":
        """Parse `100` or `0.1%`. Raises DataError."""
        if re.fullmatch(r"\d{1,18}", text):
            return Limit(text, int(text))
        if re.fullmatch(r"\d{1,3}(\.\d+)?%", text) and float(text[:-1]) <= 100:
            return Limit(text, None, float(text[:-1]) / 100)
        raise DataError(f"--skip-bad {text} is neither a count, as 100, nor a share, as 0.1%")

    def check(self, bad: list[Bad], rows: int | None = None) -> None:
        """Raise BadRow or TooManyBad beyond the limit; a share is checked once `rows` is known."""
        if self.allows(len(bad), rows):
            return
        if self.count == 0:
            raise BadRow(f"{bad[0]}; fix it, or leave such rows out with --skip-bad N")
        of = "" if rows is None else f" of {rows:,}"
        raise TooManyBad(
            f"{len(bad):,} bad rows{of} are more than --skip-bad {self.text}: {summary(bad)}; fix "
            "them, or continue with a higher --skip-bad"
        )

    def allows(self, bad: int, rows: int | None) -> bool:
        if self.count is not None:
            return bad <= self.count
        return rows is None or bad <= self.share * rows


def by_reason(bad: Iterable[Bad]) -> dict[str, list[Bad]]:
    """Bad rows by reason, the most frequent reason first."""
    reasons: dict[str, list[Bad]] = {}
    for each in bad:
        reasons.setdefault(each.reason, []).append(each)
    return dict(sorted(reasons.items(), key=lambda item: -len(item[1])))


def summary(bad: Iterable[Bad]) -> str:
    """Counts by reason, each with the first location."""
    return ", ".join(
        f"{len(some):,} {reason} (first {some[0].place()})"
        for reason, some in by_reason(bad).items()
    )


def listing(bad: Iterable[Bad]) -> Iterable[str]:
    """A line for each: location, tab, fault. `bad` are in the order of the input."""
    path, offset, lines = "", 0, 0
    for each in bad:
        place = each.place() if each.start <= 0 else ""
        if not place:  # count the lines of a file once, not for each of its bad rows
            if path != each.path or each.start < offset:
                path, offset, lines = each.path, 0, 0
            lines += _lines_before(path, each.start, offset)
            offset = each.start
            place = f"{path}:{lines + each.number}"
        yield f"{place}\t{each.reason}{each.detail}\n"


def _lines_before(path: str, stop: int, start: int = 0) -> int:
    if stop == start:
        return 0
    lines, left = int(start == 0), stop - start - int(start == 0)
    with opened(path) as stream:
        stream.seek(max(0, start - 1))
        while left > 0 and (block := stream.read(min(left, 1 << 22))):
            lines += block.count(b"\n")
            left -= len(block)
    return lines


_BLOCK = 1 << 20
_SPACE = re.compile(r"[ \t\r\n]*")
_BROKEN = (ValueError, RecursionError)  # of JSON; ValueError also for integers of 4,300 digits


WHOLE = "the row"
"""Key of a reading whose rows are JSON objects, in place of a text of theirs."""


@dataclass(frozen=True)
class Reading:
    """Options that select the text of a row."""

    key: str = "text"  # JSON key or Parquet column of the text; `WHOLE` for all of a JSON object
    keys: dict[str, str] = field(default_factory=dict)  # for kinds of files with another key
    lines: bool = False  # each line of a .txt is a row, not each file

    def key_of(self, path: str) -> str:
        return self.keys.get(kind_of(path) or "", self.key)


@dataclass(frozen=True)
class Piece:
    """A part of an input file: bytes [start, stop), or row groups of a Parquet file."""

    path: str
    form: str  # `lines` of JSON, JSON `array`, `txt` or `parquet`
    start: int
    stop: int


def read_keys(options: list[str]) -> Reading:
    """Parse `--key text`, `--key parquet=content`, or both. Raises DataError."""
    kinds = [kind for kind in KINDS.values() if kind != "txt"]
    by_kind: dict[str, str] = {}
    general: list[str] = []
    for text in options:
        kind, equals, name = text.partition("=")
        if not equals or kind not in kinds:
            general.append(text)
        elif kind in by_kind:
            raise DataError(f"--key {text}: {kind} already has the key {by_kind[kind]}; give one")
        else:
            by_kind[kind] = name
    if len(general) > 1 or "" in (*general, *by_kind.values()):
        raise DataError(
            f"--key {' --key '.join(options)}: give one name for all files, and KIND=NAME for "
            f"{', '.join(kinds)} if it differs there"
        )
    return Reading(general[0] if general else "text", by_kind)


def cut(path: str, reading: Reading, chunk: int) -> Iterator[tuple[Piece, int]]:
    """Pieces of one file of about `chunk` bytes, each with its number of bytes."""
    kind, size = kind_of(path), os.stat(path).st_size
    if kind == "parquet":
        metadata = open_parquet(path, reading.key_of(path)).metadata
        for group in range(metadata.num_row_groups):
            piece = Piece(path, "parquet", group, group + 1)
            yield piece, metadata.row_group(group).total_byte_size
        return
    form = "txt" if kind == "txt" else "lines"
    if kind == "json" and _is_array(path):
        form = "array"
    if form == "array" or is_packed(path) or (form == "txt" and not reading.lines):
        yield Piece(path, form, 0, size), size
        return
    for start in range(0, size, chunk):
        stop = min(start + chunk, size)
        yield Piece(path, form, start, stop), stop - start


Refused = Callable[[str], tuple[str, str] | None]  # kind of a text's fault, and its place


def read(piece: Piece, reading: Reading, refused: Refused = lambda text: None) -> Iterator[str]:
    """Texts of a piece. Raises DataError that names file and line."""
    for row in rows(piece, reading, refused):
        if isinstance(row, Bad):
            raise BadRow(str(row))
        yield row


def rows(
    piece: Piece, reading: Reading, refused: Refused = lambda text: None
) -> Iterator[str | Bad]:
    """Texts of a piece, empty for rows without text, and faults of broken or refused rows."""
    for row, at in _placed(piece, reading):
        fault = refused(row) if isinstance(row, str) else None
        yield row if fault is None else _wrong(at, *fault)


_Placed = tuple[str | Bad, Bad]  # a row, and a fault at its place


def _placed(piece: Piece, reading: Reading) -> Iterator[_Placed]:
    key = reading.key_of(piece.path)
    if piece.form == "parquet":
        yield from _parquet(piece, key)
        return
    with opened(piece.path) as stream:
        if piece.form == "array":
            yield from _array(piece.path, stream, key)
        elif piece.form == "txt" and not reading.lines:
            at = Bad(piece.path, 0, 0, "")
            yield _decoded(_without_mark(stream.read()), at), at
        else:
            for number, line in enumerate(_lines(piece, stream), start=1):
                at = Bad(piece.path, piece.start, number, "")
                if piece.form == "txt":
                    yield _decoded(line, at), at
                elif line.strip():
                    yield _parsed(line, key, at), at


def _lines(piece: Piece, stream: BinaryIO) -> Iterator[bytes]:
    """Lines that start in a piece, without line ends and a byte order mark."""
    at, entire = 0, is_packed(piece.path)
    if piece.start:
        stream.seek(piece.start - 1)
        at = piece.start - 1 + len(stream.readline())  # the rest of the previous piece's last line
    while (entire or at < piece.stop) and (line := stream.readline()):
        yield (line if at else _without_mark(line)).rstrip(b"\r\n")
        at += len(line)


def _without_mark(raw: bytes) -> bytes:
    return raw.removeprefix(codecs.BOM_UTF8)


def _wrong(at: Bad, reason: str, detail: object = "") -> Bad:
    return Bad(at.path, at.start, at.number, reason, f"{detail}")


def _decoded(raw: bytes, at: Bad) -> str | Bad:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        detail = f" at byte {error.start}"
        if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            detail += " but UTF-16; convert the file with iconv -f UTF-16 -t UTF-8"
        return _wrong(at, "not UTF-8", detail)


def _parsed(line: bytes, key: str, at: Bad) -> str | Bad:
    text = _decoded(line, at)
    if isinstance(text, Bad):
        return text
    try:
        return _text(json.loads(text), key, at)
    except _BROKEN as error:
        return _wrong(at, "not JSON", f": {error}")


def _text(record: Any, key: str, at: Bad) -> str | Bad:
    if key == WHOLE:
        if not isinstance(record, dict):
            return _wrong(at, "no JSON object")
        record = {WHOLE: json.dumps(record, ensure_ascii=False)}
    if not isinstance(record, dict) or key not in record:
        names = list(record)[:20] if isinstance(record, dict) else []
        keys = ", ".join(name.encode("unicode_escape").decode() for name in names) or "none"
        return _wrong(at, f"no key {key!r}", f" (keys: {keys}); give --key")
    text = record[key]
    if text is not None and not isinstance(text, str):
        return _wrong(at, f"{key!r} is {type(text).__name__}, not text")
    try:
        (text or "").encode()
    except UnicodeEncodeError as error:
        if "\udc80" <= error.object[error.start] <= "\udcff":  # as `_array` reads such bytes
            return _wrong(at, f"{key!r} is not UTF-8", f" at character {error.start}")
        reason = f"{key!r} has half of a surrogate pair"
        return _wrong(at, reason, f" at character {error.start}")
    return text or ""


# --- JSON arrays ----------------------------------------------------------------------------------


def _is_array(path: str) -> bool:
    with opened(path) as stream:
        return _without_mark(stream.read(_BLOCK)).lstrip()[:1] == b"["


def _array(path: str, stream: BinaryIO, key: str) -> Iterator[_Placed]:
    """Rows of a JSON array, read incrementally; a DataError where the next row cannot be found."""
    text = _Growing(io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline=""))
    try:
        text.take("[")
        while text.next() != "]":
            at = Bad(path, 0, text.line, "")
            yield _text(text.value(), key, at), at
            if text.next() != "]":
                text.take(",")
                if text.next() == "]":
                    raise ValueError("a comma before the end of the array")
        text.take("]")
        if text.next():
            raise ValueError("text after the end of the array")
    except _BROKEN as error:
        raise DataError(f"{path}:{text.line}: not JSON: {error}") from None


class _Growing:
    def __init__(self, stream: io.TextIOWrapper) -> None:
        self._stream, self._buffer, self._at = stream, "", 0
        self._decode = json.JSONDecoder().raw_decode
        self.line = 1  # of the next character

    def next(self) -> str:
        """The next character that is not whitespace; empty at the end."""
        while True:
            spaces = _SPACE.match(self._buffer, self._at)
            assert spaces is not None
            self._advance(len(spaces[0]))
            if self._at < len(self._buffer) or not self._read():
                return self._buffer[self._at : self._at + 1]

    def take(self, expected: str) -> None:
        """Skip a character, which must come next."""
        if (character := self.next()) != expected:
            found = character or "the end of the file"
            raise ValueError(f"expecting {expected!r}, found {found!r}")
        self._advance(1)

    def value(self) -> Any:
        """Parse the next value."""
        while True:
            try:
                value, end = self._decode(self._buffer, self._at)
            except json.JSONDecodeError as error:
                # An error near the end of the buffer may only mean that the value is incomplete.
                cut = error.msg.startswith("Unterminated") or error.pos > len(self._buffer) - 32
                wrong = error.pos - self._at
                if not cut or not self._read():
                    self._advance(wrong)
                    raise ValueError(error.msg) from None
                continue
            # A number at the end of the buffer may continue in the next block.
            length, complete = end - self._at, end < len(self._buffer)
            if complete or not self._read():
                self._advance(length)
                return value

    def _advance(self, count: int) -> None:
        self.line += self._buffer.count("\n", self._at, self._at + count)
        self._at += count

    def _read(self) -> bool:
        self._buffer, self._at = self._buffer[self._at :], 0
        block = self._stream.read(max(_BLOCK, len(self._buffer)))
        self._buffer += block
        return bool(block)


# --- Parquet --------------------------------------------------------------------------------------


def open_parquet(path: str, key: str) -> Any:
    """Open a pyarrow.parquet.ParquetFile, which must have the text column."""
    types = arrow(path).types
    from pyarrow import ArrowException, parquet

    try:
        file = parquet.ParquetFile(path)
    except (ArrowException, OSError) as error:
        raise DataError(f"{path} is not a Parquet file: {error}") from None
    names = file.schema_arrow.names
    if key not in names:
        raise DataError(f"{path}: no column {key!r} (columns: {', '.join(names)}); give --key")
    kind = inner = file.schema_arrow.field(key).type
    if types.is_dictionary(kind):
        inner = kind.value_type
    texts = (types.is_string, types.is_large_string, types.is_string_view, types.is_null)
    if not any(is_text(inner) for is_text in texts):
        raise DataError(f"{path}: column {key!r} is {kind}, not text; give --key")
    return file


def _parquet(piece: Piece, key: str) -> Iterator[_Placed]:
    """Values of the text column; null counts as empty."""
    from pyarrow import ArrowException

    file, groups = open_parquet(piece.path, key), range(piece.start, piece.stop)
    row = sum(file.metadata.row_group(group).num_rows for group in range(piece.start))
    try:
        for batch in file.iter_batches(batch_size=1024, row_groups=list(groups), columns=[key]):
            for value in batch.column(0):
                row += 1
                at = Bad(piece.path, ROW, row, "")
                try:
                    yield value.as_py() or "", at
                except UnicodeDecodeError as error:
                    yield _wrong(at, "not UTF-8", f" at byte {error.start}"), at
    except (ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{piece.path}: its row groups cannot be read: {reason}") from None
