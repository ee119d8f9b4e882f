"""Data in an object store: the same rows as from files, and one line for what is wrong there."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from phalanx.configs.schema import Config, DataConfig
from phalanx.moe.data import remote_files
from phalanx.moe.data.host_cache import DataError
from phalanx.moe.data.loader import Loader, Samples, build_datasets
from phalanx.moe.data.token_files import BYTES, Sidecar, open_corpus
from phalanx.parallel import object_store
from phalanx.parallel.object_store import Remote
from tests.support import s3
from tests.support.runs import text, write_corpus

FILES = (".bin", ".idx", ".json")


@pytest.fixture(params=["memory", "s3"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A prefix of which nothing is there yet."""
    monkeypatch.setattr(object_store, "WAITS", ())
    if request.param == "memory":
        yield f"memory://{request.node.name}"
        return
    with s3.credentials(s3.endpoint()):
        yield f"s3://{s3.BUCKET}/{request.node.name.partition('[')[0]}"


def put(local: str, address: str) -> None:
    for ending in FILES:
        if Path(local + ending).is_file():
            Remote(address + ending).upload(Path(local + ending))


def corpus(folder: Path, name: str = "text") -> str:
    prefix = write_corpus(folder / name)
    size = Path(f"{prefix}.bin").stat().st_size // 2
    Sidecar(BYTES, "", 256, 0, "uint16", len(text()), size).write(Path(f"{prefix}.json"))
    return prefix


def rows(blend: list[str], cache: Path, samples: int = 12) -> tuple[Samples, list[np.ndarray]]:
    data = DataConfig(source="indexed", blend=blend, sequence_length=32, cache=str(cache))
    train, valid = build_datasets(Config(data=data), 256, samples, 2)
    assert valid is not None
    return train, [train[i] for i in range(samples)] + [valid[0], valid[1]]


def test_the_rows_are_those_of_the_files(store: str, tmp_path: Path) -> None:
    """And so is the fingerprint; a blend may mix both; nothing but the index is copied."""
    local = [corpus(tmp_path, name) for name in ("one", "two")]
    remote = [f"{store}/one", f"{store}/two"]
    for pair in zip(local, remote, strict=True):
        put(*pair)
    expected, from_files = rows(["0.7", local[0], "0.3", local[1]], tmp_path / "a")
    for blend in (["0.7", *remote[:1], "0.3", remote[1]], ["0.7", remote[0], "0.3", local[1]]):
        found, same = rows(blend, tmp_path / "b")
        assert found.fingerprint == expected.fingerprint
        assert all(map(np.array_equal, same, from_files))
        assert [s.bytes_per_token for s in found.sources] == [
            s.bytes_per_token for s in expected.sources
        ]
    assert {path.stat().st_size for path in (tmp_path / "b").rglob("*.bin")} == {0}


def test_batches_are_read_ahead_by_several_threads_in_their_order(
    store: str, tmp_path: Path
) -> None:
    local = corpus(tmp_path)
    put(local, f"{store}/text")
    (a, _), (b, _) = rows([local], tmp_path), rows([f"{store}/text"], tmp_path)
    loaders = [Loader(dataset, 2, 8, 0, 1) for dataset in (a, b)]
    assert loaders[1]._thread._max_workers == remote_files.READERS
    for first, second in zip(*(loader.next_step() for loader in loaders), strict=True):
        assert first["tokens"].equal(second["tokens"]) and first["labels"].equal(second["labels"])
    for loader in loaders:
        loader.close()


def test_a_copy_is_made_once_and_again_when_the_object_has_changed(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, copies = f"{store}/text", []
    put(corpus(tmp_path), address)
    original = remote_files._copy
    monkeypatch.setattr(remote_files, "_copy", lambda *a: (copies.append(a), original(*a)))
    first = open_corpus(address, tmp_path / "cache")
    assert open_corpus(address, tmp_path / "cache").stamp == first.stamp and len(copies) == 2
    put(write_corpus(tmp_path / "text", [[1, 2, 3]] * 50), address)
    (tmp_path / "text.json").unlink()
    Remote(f"{address}.json").delete()
    again = open_corpus(address, tmp_path / "cache")
    assert again.documents == 50 and again.stamp != first.stamp and again.sidecar is None


def test_data_that_changes_under_a_run_is_noticed(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(corpus(tmp_path), f"{store}/text")
    train, _ = rows([f"{store}/text"], tmp_path)
    binary = Remote(f"{store}/text.bin")
    whole = binary.read()
    binary.write(bytes(len(whole)))
    train[0]  # the next look is half a minute away
    monkeypatch.setattr(remote_files, "_CHECK_SECONDS", 0.0)
    with pytest.raises(DataError, match=r"text\.bin was changed while this run reads it"):
        train[1]
    binary.write(whole[:100])
    with pytest.raises(DataError, match=r"text\.bin"):
        train[2]
    binary.delete()
    with pytest.raises(DataError, match=r"text\.bin: no such object|No such object|no such object"):
        train[3]


@pytest.mark.parametrize(
    ("ending", "change", "message"),
    [
        (".idx", None, r"text\.idx does not exist; data\.blend takes prefixes"),
        (".bin", None, r"text\.bin does not exist; data\.blend takes prefixes"),
        (".bin", lambda raw: raw[:-2], r"text\.bin is truncated: \d+ bytes, .*text\.idx describes"),
        (".idx", lambda raw: raw[:-1], r"text\.idx is truncated: \d+ bytes, its header announces"),
        (".idx", lambda raw: b"x" * len(raw), r"text\.idx is not a Megatron index"),
        (".json", lambda raw: b"[", r"corpus\.json is not a JSON object"),
    ],
)
def test_what_is_wrong_is_one_line(
    store: str, ending: str, change: object, message: str, tmp_path: Path
) -> None:
    put(corpus(tmp_path), f"{store}/text")
    path = Remote(f"{store}/text{ending}")
    if change is None:
        path.delete()
    else:
        path.write(change(path.read()))  # type: ignore[operator]
    with pytest.raises(DataError, match=message) as caught:
        open_corpus(f"{store}/text", tmp_path / "cache")
    assert "\n" not in str(caught.value)


def test_a_store_that_fails_is_reported_as_such_and_not_as_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(corpus(tmp_path), "memory://failing/text")
    monkeypatch.setattr(object_store, "WAITS", (0.0, 0.0))
    calls = []

    def fails(self: Remote, start: int = 0, stop: int | None = None) -> bytes:
        calls.append(start)
        raise object_store.Refused(f"cannot read {self}: the line is down", ConnectionError())

    with monkeypatch.context() as patch:
        patch.setattr(Remote, "read", fails)
        with pytest.raises(DataError, match=r"cannot read .*idx: the line is down \(data\.blend\)"):
            open_corpus("memory://failing/text", tmp_path / "cache")
    assert len(calls) == 3  # and two more attempts
    assert open_corpus("memory://failing/text", tmp_path / "cache").documents == len(text())
    shutil.rmtree(tmp_path / "cache")
