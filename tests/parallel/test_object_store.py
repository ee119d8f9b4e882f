"""Objects by their addresses, on fsspec's file system in memory and on an S3-compatible server."""

import os
import threading
import time
from argparse import ArgumentTypeError
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.configs.addresses import flaw, is_address
from phalanx.configs.redact import redacted
from phalanx.parallel import object_store
from phalanx.parallel.checkpoint import commit, remote  # noqa: F401  (the latter for addresses)
from phalanx.parallel.object_store import Refused, Remote, argument, in_order, persist, place
from tests.support import s3


@pytest.fixture(params=["memory", "s3"])
def root(request: pytest.FixtureRequest) -> Iterator[Remote]:
    name = request.node.name.partition("[")[0]
    if request.param == "memory":
        yield Remote(f"memory://{s3.BUCKET}/{name}")
        return
    with s3.credentials(s3.endpoint()):
        yield Remote(f"s3://{s3.BUCKET}/{name}")


def test_objects_below_a_prefix(root: Remote) -> None:
    """And none of a prefix that only begins in the same way; nothing is cached."""
    assert root.objects() == {} and not root.exists() and not root.is_dir()
    (root / "a").write(b"hello")
    (root / "b" / "c").write(b"x" * 100)
    (root.parent / f"{root.name}2").write(b"y")
    found = root.objects()
    assert {name: entry.size for name, entry in found.items()} == {"a": 5, "b/c": 100}
    assert abs(found["a"].changed - time.time()) < 60 and found["a"] == (root / "a").entry()
    assert root.is_dir() and (root / "b").is_dir() and not root.is_file()
    assert (root / "a").is_file() and not (root / "a").is_dir() and not (root / "z").exists()
    (root / "a").write(b"world")
    assert root.objects()["a"].mark != found["a"].mark
    root.delete(["a", "b/c", "gone"])
    (root / "gone").delete()
    assert root.objects() == {}


def test_a_part_is_read_from_anywhere(root: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    """And little besides it; never what lies behind the end."""
    data, asked = os.urandom(300_000), list[int]()
    (root / "file").write(data)
    read = Remote.read

    def counting(path: Remote, start: int = 0, stop: int | None = None) -> bytes:
        assert stop is not None and stop <= len(data)
        asked.append(stop - start)
        return read(path, start, stop)

    monkeypatch.setattr(Remote, "read", counting)
    with commit.open_checked(root / "file", len(data)) as file:
        for start, count in ((0, 10), (5, 90_000), (250_000, 100), (250_100, 100), (299_999, 9)):
            file.seek(start)
            assert file.read(count) == data[start : start + count]
        file.seek(-3, os.SEEK_END)
        assert file.read() == data[-3:] and file.read(1) == b""
    assert sum(asked) <= 90_000 + 5 * (64 << 10) and len(asked) < 9


def test_reads(root: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges, also those that take several requests."""
    monkeypatch.setattr(object_store, "CHUNK", 1000)
    data = bytes(range(256)) * 40
    (tmp_path / "file").write_bytes(data)
    (root / "file").upload(tmp_path / "file")
    for start, stop in [(0, None), (3, 3), (5, 9), (0, 1000), (7, 8003), (10_239, 10_240)]:
        assert (root / "file").read(start, stop) == data[start:stop]
    with pytest.raises(FileNotFoundError) as caught:
        (root / "none").read(0, 10)
    assert caught.value.filename == str(root / "none")
    with pytest.raises(FileNotFoundError):
        (root / "none").read(0, 5000)


def test_what_a_store_cannot_do_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/none")
    for address, message in [
        (
            "gs://b/x",
            "cannot read gs://b/x: gs:// needs gcsfs, which is not installed: pip install",
        ),
        ("nope://b/x", "cannot read nope://b/x: fsspec knows no nope://"),
        ("s3://b/x", "cannot read s3://b/x: Unable to locate credentials (AWS_ACCESS_KEY_ID and"),
    ]:
        with pytest.raises(OSError) as caught:
            Remote(address).read()
        assert str(caught.value).startswith(message) and "\n" not in str(caught.value)
        assert isinstance(caught.value, Refused) and not caught.value.again


def test_no_secret_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the name of an object, and not by what the server answers."""
    with s3.credentials(s3.endpoint()):

        async def fails(*args: object, **kw: object) -> bytes:
            raise OSError(f"bad key {s3.SECRET} of {s3.ACCESS}")

        monkeypatch.setattr("s3fs.S3FileSystem._cat_file", fails)
        with pytest.raises(OSError) as caught:
            Remote("s3://bucket/x").read()
        assert str(caught.value) == "cannot read s3://bucket/x: bad key *** of ***"
        assert str(Remote(f"s3://{s3.ACCESS}:{s3.SECRET}@bucket/x")) == "s3://***@bucket/x"
        assert s3.SECRET not in repr(caught.value)
    assert redacted(f"s3://{s3.ACCESS}:{s3.SECRET}@bucket/x") == "s3://***@bucket/x"


def test_an_argument_with_a_password_is_not_repeated() -> None:
    with pytest.raises(ArgumentTypeError) as caught:
        argument(f"s3://me:{s3.SECRET}@bucket/x")
    assert str(caught.value).startswith("s3://***@bucket/x has a user or password in it")
    assert str(caught.value).endswith("give s3://bucket/x")
    assert argument("runs/x") == Path("runs/x") and argument("s3://b/x") == Remote("s3://b/x")
    with s3.credentials(s3.endpoint()), pytest.raises(OSError) as refused:
        Remote("s3://me:hunter22@bucket/x").read()
    assert "hunter22" not in str(refused.value)


def test_attempts_end_with_success_or_with_what_no_other_could_mend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(object_store, "WAITS", (0.0, 0.0))
    calls: list[int] = []

    def fails(times: int, cause: Exception) -> str:
        calls.append(times)
        if len(calls) <= times:
            raise Refused("no", cause)
        return "done"

    assert persist(lambda: fails(2, OSError())) == "done" and len(calls) == 3
    for cause, most in ((OSError(), 3), (PermissionError(), 1)):
        calls.clear()
        with pytest.raises(Refused):
            persist(lambda cause=cause: fails(9, cause))
        assert len(calls) == most
    calls.clear()
    with pytest.raises(FileNotFoundError):
        persist(lambda: (_ for _ in ()).throw(FileNotFoundError()))


def test_work_is_done_ahead_in_its_order_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "CHUNK", 10)  # of which 8 may be held
    lock, running, most = threading.Lock(), 0, 0

    def work(item: int) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.01)
        with lock:
            running -= 1
        return item * item

    with in_order(work, range(30), lambda _: 20) as results:
        assert list(results) == [i * i for i in range(30)]
    assert 1 < most <= 4
    with in_order(work, [1, 2], lambda _: 999) as results:
        assert list(results) == [1, 4]
    with (
        pytest.raises(ZeroDivisionError),
        in_order(lambda n: 1 // n, [1, 0, 1], lambda _: 1) as results,
    ):
        list(results)


def test_a_reader_of_shards_keeps_no_thread_when_it_has_read() -> None:
    """It asks for as many ranges as there are, and never for the end behind the last."""
    with in_order(lambda n: n, range(3), lambda _: 1) as results:
        assert [next(results) for _ in range(3)] == [0, 1, 2]
    assert not [t for t in threading.enumerate() if t.name.startswith("object-store")]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("s3://bucket/a", None),
        ("memory://a", None),
        ("s3://bucket/a@b", None),
        ("s3://bucket/a/", None),
        ("s3://me:pass@bucket/a", "s3://bucket/a"),
        ("s3://me:pa/ss@bucket/a", "s3://bucket/a"),
        ("s3://token@bucket/a", "s3://bucket/a"),
        ("s3://", "s3://bucket/prefix"),
        ("s3:///a", "s3://bucket/a"),
        ("s3://bucket/a?b=c", "s3://bucket/a"),
        ("s3://bucket/a b", "s3://bucket/a"),
        ("s3://bucket/a\nb", "s3://bucket/a"),
        ("s3://bucket/ä", "s3://bucket"),
        ("s3://?", "s3://bucket/prefix"),
        ("s3://bucket//a/../b", "s3://bucket/a/b"),
        ("file:///tmp/x", "/tmp/x"),
        ("local://x", "x"),
    ],
)
def test_forms_of_addresses(text: str, found: str | None) -> None:
    assert is_address(text)
    problem = flaw(text)
    assert (problem and problem[1]) == found
    assert found is None or not is_address(found) or flaw(found) is None


def test_places() -> None:
    assert place("runs/x") == Path("runs/x") and not is_address("C:/x") and not is_address("a:b")
    assert place(" s3://bucket/x/ ") == Remote("s3://bucket/x")
    assert (place("s3://bucket/x") / "y").parent == Remote("s3://bucket/x")
    assert Remote("s3://bucket/x/y").name == "y"
