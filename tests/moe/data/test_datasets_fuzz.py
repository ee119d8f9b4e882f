"""Damaged .idx and .json files: each is refused as a DataError, or read without harm.

Every case is a function of its number. `slow` runs all of them.
"""

import json
import random
import struct
from pathlib import Path

import numpy as np
import pytest

from phalanx.moe.data.datasets import BinReader
from phalanx.moe.data.host_cache import DataError
from phalanx.moe.data.token_files import DTYPES, HEADER, MAGIC, open_corpus

NUMBERS = [0, 1, 2, 3, 5, 8, 2**8, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1]


def pair(rng: random.Random) -> tuple[bytes, bytes, bytes]:
    """.bin, .idx and .json that fit together."""
    lengths = [rng.randrange(5) for _ in range(rng.randrange(1, 9))] + [1]
    code = rng.choice(list(DTYPES))
    width = np.dtype(DTYPES[code]).itemsize
    starts = [sum(lengths[:i]) * width for i in range(len(lengths))]
    documents = sorted({0, len(lengths), *rng.sample(range(len(lengths)), rng.randrange(3))})
    index = HEADER.pack(MAGIC, 1, code, len(lengths), len(documents))
    index += struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(starts)}q", *starts)
    index += struct.pack(f"<{len(documents)}q", *documents)
    tokens = sum(lengths)
    sidecar = {"tokenizer": "bytes", "tokenizer_sha256": "", "vocab_size": 256, "eod": 0}
    sidecar |= {"dtype": DTYPES[code], "documents": len(documents) - 1, "tokens": tokens}
    return bytes(tokens * width), index, json.dumps(sidecar | {"plan": ""}).encode()


def damaged(rng: random.Random, raw: bytes) -> bytes:
    act, spot = rng.randrange(6), rng.randrange(len(raw) + 1)
    if act == 0:
        return raw[:spot]
    if act == 1:
        return raw[:spot] + rng.randbytes(rng.randrange(1, 20)) + raw[spot:]
    if act == 2:
        return raw[:spot] + raw[spot + rng.randrange(1, 20) :]
    if act == 3:
        return rng.randbytes(rng.randrange(200))
    if act == 4:  # a number in its place
        fields = [9, 17, 18, 26, *range(34, max(35, len(raw) - 8), 4)]
        start, kind = rng.choice(fields), rng.choice(["<Q", "<I", "<B"])
        number = rng.choice(NUMBERS) % (1 << 8 * struct.calcsize(kind))
        return raw[:start] + struct.pack(kind, number) + raw[start + struct.calcsize(kind) :]
    start = min(spot, len(raw) - 1)
    return raw[:start] + bytes([raw[start] ^ 1 << rng.randrange(8)]) + raw[start + 1 :]


def odd_json(rng: random.Random, raw: bytes) -> bytes:
    odd = [None, [], {}, "x", -1, 1.5, 10**400, True, {"a": []}]
    texts = [b"[" * 10**5, b'{"a":' * 10**5, b"nul", b"\xff\xfe", b"{}", b"[]", b"1", b""]
    if rng.random() < 0.3:
        return rng.choice(texts)
    content = json.loads(raw)
    content[rng.choice(list(content))] = rng.choice(odd)
    return json.dumps(content).encode()


def refused(number: int, folder: Path) -> bool:
    """True if the pair of a number is refused; reads all of one that is not."""
    rng, prefix = random.Random(number), folder / "x"
    binary, index, sidecar = pair(rng)
    part = rng.randrange(10)
    if part == 0:
        sidecar = (odd_json if rng.random() < 0.5 else damaged)(rng, sidecar)
    elif part == 1:
        binary = damaged(rng, binary)
    else:
        for _ in range(rng.choice([1, 1, 2, 4])):
            index = damaged(rng, index) if index else index
    for ending, raw in (("bin", binary), ("idx", index), ("json", sidecar)):
        Path(f"{prefix}.{ending}").write_bytes(raw)
    if rng.random() < 0.8 and part:
        Path(f"{prefix}.json").unlink()
    try:
        corpus = open_corpus(str(prefix))
    except DataError as error:
        assert len(str(error).splitlines()) == 1 and str(prefix) in str(error)
        return True
    assert corpus.lengths.min() >= 0
    reader, offset = BinReader(Path(f"{prefix}.bin")), 0
    for length in corpus.lengths.tolist():
        assert len(reader.read(np.dtype(corpus.dtype).type, length, offset)) == length
        offset += length * np.dtype(corpus.dtype).itemsize
    assert offset == len(binary)
    return False


def fuzz(cases: range, folder: Path) -> int:
    """How many were refused."""
    count = 0
    for number in cases:
        try:
            count += refused(number, folder)
        except Exception as error:
            raise AssertionError(f"case {number}") from error
    return count


def test_pairs_that_fit_are_taken(tmp_path: Path) -> None:
    for number in range(100):
        rng = random.Random(number)
        for ending, raw in zip(("bin", "idx", "json"), pair(rng), strict=True):
            (tmp_path / f"x.{ending}").write_bytes(raw)
        assert open_corpus(str(tmp_path / "x")).documents >= 1


def test_damaged_files_are_refused_or_read(tmp_path: Path) -> None:
    cases = 600
    assert 0.7 * cases < fuzz(range(cases), tmp_path) < cases


@pytest.mark.slow
def test_many_damaged_files_are_refused_or_read(tmp_path: Path) -> None:
    cases = 40_000
    count = fuzz(range(cases), tmp_path)
    print(f".idx: {cases} cases, {count} refused")
    assert 0.7 * cases < count < cases
