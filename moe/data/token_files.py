"""Token files on disk: the embedded corpus, and the check of any .bin/.idx pair before it is read.

Invariant: one interpreter gives one embedded corpus on every host. Imports neither torch nor
Megatron-Core, so that prepare_data starts fast.
"""

import functools
import hashlib
import json
import os
import platform
import struct
import sysconfig
from collections.abc import Iterator
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path

import numpy as np

from phalanx.configs.addresses import is_address
from phalanx.configs.knobs import pluralize
from phalanx.moe.data.host_cache import (
    DataError,
    built_once,
    cache_folder,
    digest,
    opened_parts,
    stamp,
)
from phalanx.moe.data.remote_files import RemotePair, described, remote_pair

HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document boundaries
MAGIC = b"MMIDIDX\x00\x00"
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
BYTES = "bytes"  # name of the tokenizer that makes ids of bytes
BYTES_EOD = 0  # ends a document of bytes: no Python source and hardly any text contains it
_LARGEST = 1 << 20  # bytes of a prefix.json
_ENTRIES = 1 << 22  # of an index, checked at a time
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Sidecar:
    """Contents of prefix.json: origin and format of prefix.bin and prefix.idx."""

    tokenizer: str  # name shown in messages; `BYTES` for bytes
    tokenizer_sha256: str  # digest of the tokenizer.json; empty for bytes
    vocab_size: int  # upper bound of the ids
    eod: int  # id that ends each document
    dtype: str  # NumPy dtype of the ids in prefix.bin
    documents: int
    tokens: int
    plan: str = ""  # digest of inputs and options of the preparation
    text_bytes: int = 0  # UTF-8 bytes of all documents; 0 if that is not known
    skipped: int = 0  # rows of the input that gave no document
    bad_rows: int = 0  # skipped rows that were broken
    tokenizer_meaning: str = ""  # `tokenizer.encoder.meaning`; empty for bytes, and in older files
    special_text: str = "special"  # treatment of special tokens that documents spell
    special_spelled: int = 0  # number of them, if that is known
    labels: int = 0  # tokens that count by the loss mask, prefix.mask; 0: all, and there is none
    packed: int = 0  # tokens of the sequences that hold whole rows, each a document; 0: no such

    def same_tokenizer(self, other: "Sidecar") -> bool:
        """Was other data made with the same tokenizer, or with one of the same meaning?"""
        if self.tokenizer_sha256 == other.tokenizer_sha256:
            return True
        return self.tokenizer_meaning != "" and self.tokenizer_meaning == other.tokenizer_meaning

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    @staticmethod
    def read(path: Path) -> "Sidecar":
        """Read a file of `write`. Raises DataError if it is none."""
        try:
            if path.stat().st_size > _LARGEST:
                raise ValueError("it is too large for one")
            content = dict(json.loads(path.read_bytes()))
        except (ValueError, TypeError, RecursionError) as error:
            raise DataError(f"{path} is not a JSON object ({error}); move it away") from None
        kinds = {field.name: field.type for field in fields(Sidecar)}
        later = {f.name: f.default for f in fields(Sidecar) if f.default is not MISSING}
        content = later | content  # older files lack these fields
        bad = [k for k, kind in kinds.items() if type(content.get(k)) is not kind]
        if bad:
            raise DataError(f"{path} does not describe data (no valid {bad[0]!r}); move it away")
        return Sidecar(**{name: content[name] for name in kinds})


@dataclass(frozen=True)
class Corpus:
    """A checked .bin/.idx pair."""

    prefix: str
    lengths: np.ndarray  # tokens of each, int32 [documents]; memory-mapped if each is one sequence
    dtype: str
    sidecar: Sidecar | None
    stamp: str  # digest of samples of both files, equal for equal data at any location
    remote: RemotePair | None = None  # remote files of a pair in an object store
    joined: bool = False  # true if documents have several sequences, or none, in the index

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.lengths)

    @property
    def local(self) -> str:
        """Prefix of the .idx on this host."""
        return self.prefix if self.remote is None else self.remote.prefix


def open_corpus(prefix: str, cache: Path | None = None) -> Corpus:
    """Check that prefix.bin, prefix.idx and an optional prefix.json are complete and agree.

    Args:
        prefix: path without the ending, or an address of an object store.
        cache: folder of data.cache, for the index of an address; None is the default one.

    Raises:
        DataError: they are missing or damaged, or do not agree.

    Layout of .idx: header, int32 length and int64 byte offset of each sequence, int64 document
    boundaries (megatron/core/datasets/indexed_dataset.py, _IndexWriter).
    """
    remote, local, beside = None, prefix, prefix
    if is_address(prefix):
        remote = remote_pair(prefix, cache or cache_folder(""))
        local, beside = remote.prefix, described(prefix, cache or cache_folder(""))
    else:
        for ending in (".bin", ".idx"):
            if not Path(prefix + ending).is_file():
                raise DataError(
                    f"{prefix}{ending} does not exist; data.blend takes prefixes of .bin/.idx "
                    "without the ending"
                )
    binary, index, copied = f"{prefix}.bin", f"{prefix}.idx", Path(f"{local}.idx")
    sequences, boundaries, dtype = _read_header(index, copied)
    size, expected = copied.stat().st_size, HEADER.size + 12 * sequences + 8 * boundaries
    if size not in (
        expected,
        expected + sequences,
    ):  # multimodal files have one more array of bytes
        state = "truncated" if size < expected else "damaged"
        raise DataError(
            f"{index} is {state}: {size} bytes, its header announces {expected}; rebuild it"
        )
    if sequences == 0:
        raise DataError(f"{index} describes an empty corpus: no sequences")
    if boundaries < 2:
        raise DataError(
            f"{index} has lost its document boundaries: {sequences} sequences and no end of a "
            "document; rebuild it with scripts/prepare_data.py, or with end_document() after "
            "each document if Megatron-Core's IndexedDatasetBuilder writes it"
        )
    raw = np.memmap(copied, mode="r")
    lengths = np.frombuffer(raw, np.int32, sequences, HEADER.size)
    offsets = np.frombuffer(raw, np.int64, sequences, HEADER.size + 4 * sequences)
    documents = np.frombuffer(raw, np.int64, boundaries, HEADER.size + 12 * sequences)
    if documents[-1] != sequences:
        raise DataError(
            f"{index} is damaged: documents end at {documents[-1]} of {sequences} sequences"
        )
    _check_order(index, lengths, offsets, documents, np.dtype(dtype).itemsize)
    announced = int(offsets[-1]) + int(lengths[-1]) * np.dtype(dtype).itemsize
    if announced == 0:
        raise DataError(f"{index} describes an empty corpus: no tokens")
    actual = os.stat(binary).st_size if remote is None else remote.entry.size
    if actual != announced:
        problem = "is truncated" if actual < announced else "does not belong to its index"
        raise DataError(
            f"{binary} {problem}: {actual} bytes, {index} describes {announced}; rebuild both"
        )
    sidecar_file = Path(f"{beside}.json")
    sidecar = Sidecar.read(sidecar_file) if sidecar_file.is_file() else None
    mark = remote.stamp if remote else _stamp(Path(binary), Path(index))
    if joined := not _one_each(documents, sequences):
        lengths = _joined(index, offsets, documents, announced, np.dtype(dtype).itemsize)
        mark = digest([mark, "by document"])  # rows by sequence would differ
    corpus = Corpus(prefix, lengths, dtype, sidecar, mark, remote, joined)
    _check_sidecar(corpus, announced // np.dtype(dtype).itemsize)
    return corpus


def tokenizer_beside(prefix: str) -> Path:
    """Copy of the tokenizer.json of prefix.bin, written by scripts/prepare_data.py."""
    return Path(f"{prefix}.tokenizer.json")


def _read_header(index: str, file: Path) -> tuple[int, int, str]:
    with file.open("rb") as stream:
        raw = stream.read(HEADER.size)
    if raw[: len(MAGIC)] != MAGIC:
        raise DataError(
            f"{index} is not a Megatron index: it starts with {raw[:9]!r}, not {MAGIC!r}; "
            "rebuild it"
        )
    if len(raw) < HEADER.size:
        raise DataError(
            f"{index} is truncated: {pluralize(len(raw), 'byte')}, "
            f"the header alone has {HEADER.size}"
        )
    _, version, code, sequences, boundaries = HEADER.unpack(raw)
    if version != 1:
        raise DataError(
            f"{index} has format version {version}; only version 1 is known; rebuild it"
        )
    if code not in DTYPES:
        raise DataError(f"{index} has dtype code {code}, which is no integer type; rebuild it")
    return sequences, boundaries, DTYPES[code]


def _check_order(
    index: str, lengths: np.ndarray, offsets: np.ndarray, documents: np.ndarray, width: int
) -> None:
    """Check that sequences (`width` bytes per token) and documents are contiguous and ordered."""
    ordered = offsets[0] == 0 and documents[0] == 0
    for start in range(0, len(lengths), _ENTRIES):
        block, following = slice(start, start + _ENTRIES), offsets[start + 1 : start + 1 + _ENTRIES]
        ends = offsets[block] + lengths[block].astype(np.int64) * width
        ordered &= lengths[block].min() >= 0 and (ends[: len(following)] == following).all()
    for start in range(0, len(documents), _ENTRIES):
        ordered &= (np.diff(documents[start : start + _ENTRIES + 1]) >= 0).all()
    if not ordered:
        raise DataError(
            f"{index} is damaged: its sequences or documents are out of order; rebuild it"
        )


def _one_each(documents: np.ndarray, sequences: int) -> bool:
    return len(documents) == sequences + 1 and all(
        (np.diff(documents[start : start + _ENTRIES + 1]) == 1).all()
        for start in range(0, sequences, _ENTRIES)
    )


def _joined(
    index: str, offsets: np.ndarray, documents: np.ndarray, size: int, width: int
) -> np.ndarray:
    """Tokens of each document, int32 [documents], whose sequences are contiguous in the .bin."""
    starts = np.full(len(documents), size, np.int64)
    inside = documents < len(offsets)
    starts[inside] = offsets[documents[inside]]
    lengths = np.diff(starts) // width
    if lengths.max() > np.iinfo(np.int32).max:
        raise DataError(
            f"{index} has a document of {lengths.max()} tokens; the most is 2**31 - 1: split it"
        )
    return lengths.astype(np.int32)


def _check_sidecar(corpus: Corpus, tokens: int) -> None:
    described = corpus.sidecar
    if described is None:
        return
    expected = (described.dtype, described.documents, described.tokens)
    actual = (corpus.dtype, corpus.documents, tokens)
    for name, a, b in zip(("dtype", "documents", "tokens"), expected, actual, strict=True):
        if a != b:
            raise DataError(
                f"{corpus.prefix}.json says {name} {a}, but .bin and .idx have {b}; rebuild all"
            )


def _stamp(*paths: Path) -> str:
    with opened_parts(*paths) as parts:
        return stamp(parts)


def embedded(cache: Path, library: Path | None = None) -> str:
    """Build the embedded corpus in `cache` unless it exists; return its prefix.

    Documents are the .py files of the running interpreter's standard library (or of `library`)
    without tests and files generated for one machine. A token is a byte; byte 0 ends a document.
    Documents are ordered by a digest of their relative path: the same order on every host, and
    mixed, so that both parts of `data.split` are similar. Processes may call this concurrently.
    """
    root = _library(library)
    name = _own_name() if library is None else _name(root)
    target = built_once(
        cache / name, lambda folder: _write_bytes(folder / "corpus", list(_texts(root)))
    )
    try:
        open_corpus(str(target / "corpus"))
    except DataError as error:
        raise DataError(f"{error} (delete {target}, and it will be rebuilt)") from None
    return str(target / "corpus")


@functools.cache
def _own_name() -> str:
    """Name of the corpus of the running interpreter, whose library stays as it is."""
    return _name(_library(None))


def _name(root: Path) -> str:
    digest, empty = hashlib.sha256(), True
    for text in _texts(root):
        digest.update(len(text).to_bytes(8, "little") + text)
        empty = False
    if empty:
        raise DataError(
            f"{root} has no .py files to train on; set data.source=indexed and data.blend"
        )
    return f"stdlib-{platform.python_version()}-{digest.hexdigest()[:16]}"


@functools.cache
def embedded_tokens(library: Path | None = None) -> int:
    """Tokens of the embedded corpus, counted without building it."""
    return sum(len(text) + 1 for text in _texts(_library(library)))


def _library(library: Path | None) -> Path:
    return Path(sysconfig.get_path("stdlib")) if library is None else library


def _texts(root: Path) -> Iterator[bytes]:
    for path in _sources(root):
        if (text := path.read_bytes()) and 0 not in text:
            yield text


def _sources(root: Path) -> list[Path]:
    paths: list[str] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [
            f for f in folders if f not in SKIPPED_FOLDERS and not f.startswith("config-")
        ]
        names = [f for f in files if f.endswith(".py") and not f.startswith("_sysconfigdata")]
        inside = Path(folder).relative_to(root).as_posix()
        paths += [name if inside == "." else f"{inside}/{name}" for name in names]
    paths.sort(key=lambda path: hashlib.sha256(path.encode()).digest())
    return [source for path in paths if (source := root / path).is_file()]


def _write_bytes(prefix: Path, documents: list[bytes]) -> None:
    dtype = smallest_dtype(256)
    with Path(f"{prefix}.bin").open("wb") as stream:
        for text in documents:
            ids = np.frombuffer(text + bytes([BYTES_EOD]), np.uint8)
            stream.write(ids.astype(dtype).tobytes())
    lengths = np.array([len(text) + 1 for text in documents], np.int32)
    write_index(Path(f"{prefix}.idx"), dtype, lengths)
    tokens = int(lengths.sum(dtype=np.int64))
    Sidecar(
        BYTES, "", 256, BYTES_EOD, dtype, len(documents), tokens, text_bytes=tokens - len(documents)
    ).write(Path(f"{prefix}.json"))


def smallest_dtype(vocab_size: int) -> str:
    """NumPy dtype of ids below `vocab_size`, as in Megatron-Core's DType.optimal_dtype."""
    return "uint16" if vocab_size < 65500 else "int32"


def write_index(path: Path, dtype: str, lengths: np.ndarray) -> None:
    """Write the .idx of a .bin in which each document is one sequence; `lengths` are int32.

    The bytes equal those of Megatron-Core's IndexedDatasetBuilder.finalize, which needs torch.
    """
    code = next(code for code, name in DTYPES.items() if name == dtype)
    ends = np.cumsum(lengths, dtype=np.int64) * np.dtype(dtype).itemsize
    offsets = np.concatenate((np.zeros(1, np.int64), ends))[:-1]
    with path.open("wb") as stream:
        stream.write(HEADER.pack(MAGIC, 1, code, len(lengths), len(lengths) + 1))
        stream.write(lengths.astype(np.int32).tobytes())
        stream.write(offsets.tobytes())
        stream.write(np.arange(len(lengths) + 1, dtype=np.int64).tobytes())
