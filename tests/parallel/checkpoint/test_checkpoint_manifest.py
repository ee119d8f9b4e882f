"""COMMIT.json and retention: what is read, what is refused, and that nothing else is raised."""

import contextlib
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from phalanx.parallel.checkpoint import commit
from phalanx.parallel.checkpoint.commit import Commit, Invalid, NewerFormat

FILES = {".metadata": [9, 1], "metadata.json": [3, 2], "__0_0.distcp": [4096, 3]}


def written(**changes: Any) -> bytes:
    """A COMMIT.json whose seal is right."""
    record = {"step": 7, "world": 2, "files": FILES, "saved": "2026-01-01"} | changes
    return json.dumps(record | {"seal": commit._seal(record)}).encode()


def test_what_was_written_is_read() -> None:
    files = {name: (size, crc) for name, (size, crc) in FILES.items()}
    assert commit.parse(written()) == Commit(7, 2, files)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_each_file_is_checked_by_one_rank(world: int) -> None:
    files = {f"__{i}_0.distcp": (i * 7 % 5, i) for i in range(7)}
    shares = [commit.share(files, rank, world) for rank in range(world)]
    assert sorted(name for share in shares for name in share) == sorted(files)
    assert all(files[name] == sums for share in shares for name, sums in share.items())
    assert {len(share) for share in shares} <= {7 // world, -(-7 // world)}


@pytest.mark.parametrize("version", ["0.9", "1.0", "1.7"])
def test_older_formats_and_newer_ones_of_this_major_version_are_read(version: str) -> None:
    assert commit.parse(written(format=version)).step == 7


@pytest.mark.parametrize(
    "data", [written(format="2.0"), b'{"format": "12.3", "parts": ["of another kind"]}']
)
def test_a_newer_format_is_refused_with_both_versions(data: bytes) -> None:
    """Before anything else is read, which it may have changed."""
    with pytest.raises(NewerFormat) as caught:
        commit.parse(data, Path("runs/one/checkpoints/step_00000007"))
    version = json.loads(data)["format"]
    assert str(caught.value) == (
        f"runs/one/checkpoints/step_00000007/COMMIT.json has format {version}, and this version "
        "reads formats up to 1.0: use the version that wrote it, or a newer one"
    )


def test_what_is_sealed_has_a_format() -> None:
    data = commit.with_checksum(Commit(7, 2, {name: (1, 1) for name in FILES}))
    assert json.loads(data)["format"] == "1.0" and commit.parse(data).step == 7


@pytest.mark.parametrize("version", [2, None, "", "two", "1", "1.0.0", "²", ["1.0"]])
def test_a_format_that_is_none(version: Any) -> None:
    with pytest.raises(Invalid, match="not readable"):
        commit.parse(written(format=version))


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd",
        "../step_00000001/__0_0.distcp",
        "a/__0_0.distcp",
        "..",
        "",
        "common.pt",
        "__0_0.distcp\n",
        "__٠_0.distcp",  # noqa: RUF001
        "__0_0.distcp\x00",
        "COMMIT.json",
    ],
)
def test_a_name_that_is_no_file_of_a_checkpoint(name: str) -> None:
    with pytest.raises(Invalid) as caught:
        commit.parse(written(files=FILES | {name: [1, 1]}))
    assert repr(name) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"step": -1},
        {"step": True},
        {"step": "7"},
        {"world": 0},
        {"files": []},
        {"files": {k: v for k, v in FILES.items() if k != ".metadata"}},
        {"files": FILES | {"__0_0.distcp": [1]}},
        {"files": FILES | {"__0_0.distcp": [1, -1]}},
        {"files": FILES | {"__0_0.distcp": 5}},
    ],
)
def test_values_of_another_kind(changes: dict[str, Any]) -> None:
    with pytest.raises(Invalid, match=commit.COMMIT):
        commit.parse(written(**changes))


@pytest.mark.parametrize("data", [b"[" * 100_000, b"\xff\xfe", b"", b"null", b"[]", b"1" * 5000])
def test_no_record_at_all(data: bytes) -> None:
    with pytest.raises(Invalid, match="not readable"):
        commit.parse(data)


def test_links_and_devices_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "outside").write_bytes(b"data")
    folder = tmp_path / "step_00000001"
    folder.mkdir()
    (folder / "__0_0.distcp").symlink_to(tmp_path / "outside")
    os.mkfifo(folder / "__1_0.distcp")
    (folder / "__2_0.distcp").mkdir()
    files = {f"__{i}_0.distcp": commit.checksum(tmp_path / "outside") for i in range(3)}
    assert commit.verify(folder, files) == [f"{name} is a link or no file" for name in files]
    (folder / commit.COMMIT).symlink_to(tmp_path / "outside")
    with pytest.raises(Invalid, match="not readable"):
        commit.read_commit(folder)


# --- fuzz -----------------------------------------------------------------------------------------

ODD = [None, True, -1, 0, 2**70, 1.5, float("nan"), "", "..", "\ud800", [], [1, 2], {}, {"a": 1}]
TOKENS = [b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\u", b"NaN", b"1e999", b"\x00", b"\xff"]


def fuzz(cases: int, seed: int) -> tuple[int, int]:
    """(read, refused) of that many mutated records and random bytes."""
    rng, read, refused = random.Random(seed), 0, 0
    for case in range(cases):
        kind = (_bytes_changed, _values_changed, _noise)[case % 3]
        data = kind(rng)
        try:
            record = commit.parse(data)
        except Invalid as error:
            assert "\n" not in str(error) and len(str(error)) < 1000
            refused += 1
            continue
        read += 1
        assert type(record.step) is int and record.step >= 0 and record.world > 0
        for name, (size, crc) in record.files.items():
            assert Path("/here", name).parent == Path("/here") and ".." not in name
            assert type(size) is int and type(crc) is int and min(size, crc) >= 0
    return read, refused


def _bytes_changed(rng: random.Random) -> bytes:
    data = bytearray(written())
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        how = rng.randrange(4)
        if how == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif how == 1:
            data[at:at] = rng.choice(TOKENS) * rng.choice([1, 1, 2, 3000])
        elif how == 2:
            del data[at : at + rng.randint(1, 40)]
        else:
            data[at:at] = data[rng.randrange(len(data) + 1) :][: rng.randint(1, 60)]
    return bytes(data)


def _values_changed(rng: random.Random) -> bytes:
    """The seal is right, the values are not."""
    files: dict[str, Any] = dict(FILES)
    changes: dict[str, Any] = {}
    for _ in range(rng.randint(0, 3)):
        name = rng.choice(
            [*files, "/a", "../b", "__1_0.distcp", f"__{rng.getrandbits(70)}_1.distcp"]
        )
        how = rng.randrange(4)
        if how == 0:
            files[name] = rng.choice([*ODD, [rng.getrandbits(40), rng.getrandbits(32)]])
        elif how == 1:
            files.pop(name, None)
        else:
            changes[rng.choice(["step", "world", "saved", "files", "more"])] = rng.choice(ODD)
    return written(**({"files": files} | changes))


def _noise(rng: random.Random) -> bytes:
    start = rng.choice([b"", b"{", b'{"seal": 1, "files": {', b"\xef\xbb\xbf", b"\xff\xfe{\x00"])
    return start + rng.randbytes(rng.randrange(200))


def test_fuzz() -> None:
    read, refused = fuzz(10_000, seed=1)
    assert read > 300 and refused > 6_000


@pytest.mark.slow
def test_fuzz_at_length() -> None:
    read, refused = fuzz(200_000, seed=2)
    assert read + refused == 200_000 and read > 6_000 and refused > 120_000


# --- crashes --------------------------------------------------------------------------------------


class Crash(BaseException):
    """The process ends here."""


OPERATIONS = ("os.replace", "sync", "shutil.rmtree")


def checkpoint(folder: Path, text: str) -> Commit:
    """Files of a checkpoint that is not committed."""
    folder.mkdir(parents=True)
    for name in (".metadata", "metadata.json", "__0_0.distcp"):
        (folder / name).write_text(text)
    return Commit(3, 1, {path.name: commit.checksum(path) for path in folder.iterdir()})


def crashing(monkeypatch: pytest.MonkeyPatch, call: int, after: bool) -> list[str]:
    """Have file operation number `call` be the last, done or not; those that were called."""
    called: list[str] = []

    def hooked(name: str, original: Any) -> Any:
        def operation(*args: Any, **kw: Any) -> None:
            called.append(name)
            if len(called) == call and not after:
                raise Crash
            original(*args, **kw)
            if len(called) == call:
                raise Crash

        return operation

    for name in OPERATIONS:
        *parents, last = name.split(".")
        target = getattr(commit, parents[0]) if parents else commit
        monkeypatch.setattr(target, last, hooked(name, getattr(target, last)))
    return called


def replace_and_crash(root: Path, call: int, after: bool) -> tuple[bool, list[str]]:
    """(crashed, operations) where step 3, which is there, is saved again."""
    final, unfinished = root / "step_00000003", root / "step_00000003.tmp"
    commit.commit(first := root / "first.tmp", final, checkpoint(first, "old"))
    record = checkpoint(unfinished, "new")
    with pytest.MonkeyPatch.context() as patch:
        called = crashing(patch, call, after)
        try:
            commit.commit(unfinished, final, record)
        except Crash:
            return True, called
    return False, called


def test_a_crash_while_a_checkpoint_is_replaced_loses_neither(tmp_path: Path) -> None:
    """After a start that follows, one of the two has the name and is whole."""
    found = []
    for call in range(1, 30):
        for after in (False, True):
            root = tmp_path / f"{call}_{after}"
            root.mkdir()
            crashed, called = replace_and_crash(root, call, after)
            for again in range(1, 6 if crashed else 1):  # crashes of the starts that follow
                with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Crash):
                    crashing(patch, again, after)
                    commit.recover(root)
            commit.recover(root)
            ((step, folder),) = commit.committed(root)
            record = commit.read_commit(folder)
            assert step == 3 and folder.name == "step_00000003"
            assert not commit.verify(folder, record.files)
            found.append((folder / "__0_0.distcp").read_text())
        if not crashed:
            break
    assert len(called) >= 7 and "old" in found
    assert found == ["old"] * found.count("old") + ["new"] * found.count(
        "new"
    )  # once new, never old again


# --- which are kept -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "last", "every", "gone"),
    [
        ([1, 2, 3], 2, 0, [1]),
        ([1], 1, 0, []),
        ([], 1, 0, []),
        ([100, 150, 200, 250, 300], 1, 100, [150, 250]),
        ([100, 150, 200, 250], 2, 100, [150]),
        ([5, 10, 15], 1, 5, []),
        ([30, 10, 20], 1, 7, [20, 10]),
    ],
)
def test_superseded(steps: list[int], last: int, every: int, gone: list[int]) -> None:
    folders = [(step, Path(f"step_{step}")) for step in steps]
    found = commit.superseded(folders, last, every)
    assert sorted(found) == sorted(Path(f"step_{step}") for step in gone)


def test_the_newest_is_never_superseded() -> None:
    rng = random.Random(0)
    for _ in range(500):
        steps = rng.sample(range(1, 60), rng.randint(1, 12))
        folders = [(step, Path(str(step))) for step in steps]
        gone = commit.superseded(folders, rng.randint(1, 4), rng.randint(0, 9))
        assert Path(str(max(steps))) not in gone and len(gone) < len(steps)
