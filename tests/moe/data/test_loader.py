"""Token files, datasets and the loader: what is read, in which order, and how bad input is refused.

Corpora here are made of ids that tell where they came from: a document of consecutive numbers.
"""

import hashlib
import itertools
import json
import os
import re
import shutil
import sysconfig
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

from phalanx.configs.schema import Config, DataConfig
from phalanx.moe.data.datasets import plan
from phalanx.moe.data.host_cache import DataError, built_once
from phalanx.moe.data.loader import Loader, Samples, build_datasets
from phalanx.moe.data.sources import table
from phalanx.moe.data.token_files import Sidecar, embedded, open_corpus, smallest_dtype, write_index
from phalanx.moe.text import short_names
from tests.support.distributed import run_distributed

VOCAB = 10_000


def write(
    prefix: Path,
    documents: Sequence[Sequence[int]],
    dtype: type = np.uint16,
    cuts: Sequence[int] | None = None,
) -> str:
    """A pair; `cuts` are the lengths of the sequences of every document, one of all by default."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        builder.add_document(np.array(document, dtype), list(cuts or [len(document)]))
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def numbers(first: int, count: int, documents: int = 1) -> list[range]:
    """Documents of `count` consecutive ids each, from `first` on."""
    return [range(first + i * count, first + (i + 1) * count) for i in range(documents)]


def build(
    folder: Path, blend: Sequence[str], train: int, valid: int = 0, vocab: int = VOCAB, **data
) -> tuple[Samples, Samples | None]:
    settings = {"source": "indexed", "sequence_length": 10, "split": "100", **data}
    settings.setdefault("cache", str(folder / "cache"))
    return build_datasets(
        Config(data=DataConfig(blend=list(blend), **settings)), vocab, train, valid
    )


def starts(rows: Samples, indices: range) -> list[int]:
    """First id of rows that must be runs of consecutive ids."""
    for i in indices:
        assert np.array_equal(rows[i], np.arange(rows[i][0], rows[i][0] + len(rows[i])))
    return [int(rows[i][0]) for i in indices]


# --- the embedded corpus --------------------------------------------------------------------------


def test_embedded_corpus_holds_the_standard_library_and_trains(tmp_path: Path) -> None:
    cfg = Config(data=DataConfig(cache=str(tmp_path), sequence_length=512))
    train, valid = build_datasets(cfg, 256, 40, 8)
    (prefix,) = tmp_path.glob("stdlib-*/corpus.bin")
    made = IndexedDataset(str(prefix.with_suffix("")))
    documents = {bytes(made[i].astype(np.uint8)) for i in range(len(made))}
    library = Path(sysconfig.get_path("stdlib"))
    for name in ("argparse.py", "json/decoder.py", "asyncio/tasks.py"):
        assert (library / name).read_bytes() + b"\0" in documents
    assert not any(b"\0" in document[:-1] for document in documents)
    assert 5_000_000 < sum(map(len, documents)) < 60_000_000
    text = b"".join(documents)
    for rows in (train, valid):
        for part in bytes(rows[7].astype(np.uint8)).split(b"\0"):
            assert part in text

    before = prefix.stat()
    again, _ = build_datasets(cfg, 256, 40, 8)
    assert np.array_equal(again[3], train[3]) and again.fingerprint == train.fingerprint
    assert (prefix.stat().st_mtime_ns, prefix.stat().st_ino) == (before.st_mtime_ns, before.st_ino)


def test_embedded_corpus_is_the_same_wherever_the_library_lies(tmp_path: Path) -> None:
    library = tmp_path / "one"
    used = ["a.py", "b/c.py", "b/d.py", "e.py", "g/h/i.py"]
    for name in (*used, "b/test/j.py", "site-packages/k.py", "l.txt", "empty.py"):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text("" if "empty" in name else f"# {name}")
    shutil.copytree(library, tmp_path / "two")
    first = embedded(tmp_path / "cache", library)
    second = embedded(tmp_path / "other cache", tmp_path / "two")
    raw = Path(f"{first}.bin").read_bytes()
    assert raw == Path(f"{second}.bin").read_bytes()
    texts = np.frombuffer(raw, np.uint16).astype(np.uint8).tobytes().decode().split("\0")
    order = sorted(used, key=lambda name: hashlib.sha256(name.encode()).digest())
    assert texts == [*(f"# {name}" for name in order), ""] and order != used
    (library / "a.py").write_text("# changed")
    assert embedded(tmp_path / "cache", library) != first


def test_embedded_corpus_needs_sources(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"{tmp_path} has no .py files.*data.source=indexed"):
        embedded(tmp_path / "cache", tmp_path)


def test_a_damaged_embedded_corpus_says_what_to_delete(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("pass\n")
    folder = Path(embedded(tmp_path / "cache", tmp_path)).parent
    os.truncate(folder / "corpus.bin", 3)
    with pytest.raises(DataError, match=f"corpus.bin is truncated.*delete {folder}"):
        embedded(tmp_path / "cache", tmp_path)


def test_one_of_many_builds_and_nobody_sees_a_part(tmp_path: Path) -> None:
    target, seen = tmp_path / "cache" / "thing", []

    def slowly(folder: Path) -> None:
        for i in range(20):
            (folder / str(i)).write_text(str(i))
            assert not target.exists()
        seen.append(folder)

    with ThreadPoolExecutor(8) as threads:
        found = list(
            threads.map(lambda _: len(list(built_once(target, slowly).iterdir())), range(8))
        )
    assert found == [20] * 8 and len(seen) == 1


def test_a_build_that_dies_leaves_nothing_behind(tmp_path: Path) -> None:
    target = tmp_path / "thing"
    child = os.fork()
    if child == 0:
        built_once(target, lambda folder: os._exit(0 if folder.exists() else 1))
    assert os.waitpid(child, 0)[1] == 0
    assert not target.exists() and len(list(tmp_path.glob(".thing.*"))) == 1
    built_once(target, lambda folder: (folder / "whole").touch())
    assert [p.name for p in tmp_path.iterdir() if p.name != ".lock"] == ["thing"]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
def test_our_index_is_the_one_of_megatron_core(tmp_path: Path, dtype: type) -> None:
    documents = [*numbers(0, 7, 3), range(1), range(200)]
    theirs = Path(f"{write(tmp_path / 'a', documents, dtype)}.idx").read_bytes()
    lengths = np.array([len(document) for document in documents], np.int32)
    write_index(tmp_path / "b.idx", np.dtype(dtype).name, lengths)
    assert (tmp_path / "b.idx").read_bytes() == theirs
    for size in (256, 65499, 65500, 200_000):
        assert smallest_dtype(size) == np.dtype(DType.optimal_dtype(size)).name


# --- sources --------------------------------------------------------------------------------------


def test_sources_say_what_is_read_of_them(tmp_path: Path) -> None:
    """Weight, documents, tokens and epochs of both parts, before anything is built and after."""
    (tmp_path / "x").mkdir()
    paths = [write(tmp_path / "x/text", numbers(0, 50, 100))]
    paths.append(write(tmp_path / "text", numbers(5000, 20, 200)))
    settings = {"source": "indexed", "sequence_length": 10, "split": "90,10"}
    blend = ["3", paths[0], "1", paths[1]]
    cfg = Config(data=DataConfig(blend=blend, cache=str(tmp_path / "cache"), **settings))
    training, validation = plan(cfg.data, VOCAB, (1200, 40)).sources
    assert not (tmp_path / "cache" / "index").exists()
    assert [s.name for s in training] == ["x/text", f"{tmp_path.name}/text"]
    read = [(s.weight, s.documents, s.tokens, round(s.epochs, 3)) for s in training]
    assert read == [(0.75, 90, 4500, round(900 / 449, 3)), (0.25, 180, 3600, round(300 / 359, 3))]
    read = [(s.weight, s.documents, s.tokens, round(s.epochs, 3)) for s in validation]
    assert read == [(0.75, 10, 500, round(30 / 49, 3)), (0.25, 20, 400, round(10 / 39, 3))]
    train, valid = build_datasets(cfg, VOCAB, 1200, 40)
    assert (train.sources, valid.sources) == (training, validation)
    for rows, total in ((train, 1200), (valid, 40)):
        found = [rows.source(i) for i in range(total)]
        assert found == [int(rows[i][0] >= 5000) for i in range(total)]
        assert abs(found.count(0) - 0.75 * total) <= 1
    page = table(training, validation).splitlines()
    assert page[0].split() == ["data", "source", "part", "weight", "documents", "tokens", "epochs"]
    assert page[1].split() == ["x/text", "training", "75.0%", "90", "4,500", "2.00"]
    assert page[4].split()[1:] == ["each", "validation", "25.0%", "20", "400", "0.26"]


def test_what_is_not_read_is_not_in_the_table(tmp_path: Path) -> None:
    train, _ = build(tmp_path, [write(tmp_path / "a", numbers(0, 1001))], 250)
    assert [(s.name, s.weight, s.epochs) for s in train.sources] == [("a", 1.0, 2.5)]
    assert train.source(249) == 0
    data = DataConfig(source="synthetic", cache=str(tmp_path))
    assert [part.sources for part in build_datasets(Config(data=data), 97, 10, 8)] == [(), ()]
    assert table((), ()) == ""


@pytest.mark.parametrize(
    ("described", "expected"),
    [
        (None, None),
        ({}, None),
        ({"text_bytes": 4004}, 4.0),
        ({"tokenizer": "bytes", "tokenizer_sha256": ""}, 1 - 1 / 1001),
    ],
)
def test_bytes_of_text_are_known_or_left_out(
    tmp_path: Path, described: dict[str, object] | None, expected: float | None
) -> None:
    prefix = write(tmp_path / "a", numbers(0, 1001))
    if described is not None:
        sidecar(tmp_path / "a.json", **described)
        content = json.loads((tmp_path / "a.json").read_text())
        unknown = [key for key in ("text_bytes", "skipped", "plan") if not content[key]]
        kept = {key: value for key, value in content.items() if key not in unknown}
        (tmp_path / "a.json").write_text(json.dumps(kept))  # as before these were written
    (source,) = build(tmp_path, [prefix], 10)[0].sources
    assert source.bytes_per_token == (expected and pytest.approx(expected))


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["data/wiki", "data/code"], ["wiki", "code"]),
        (["/a/x/text", "/b/x/text", "c"], ["a/x/text", "b/x/text", "c"]),
        (["a/x", "b/x", "b/y"], ["a/x", "b/x", "y"]),
        (["x", "a/x", "x"], ["x", "a/x", "x (2)"]),
        ([], []),
    ],
)
def test_short_names_tell_paths_apart(paths: list[str], names: list[str]) -> None:
    assert short_names(paths) == names


# --- order ----------------------------------------------------------------------------------------


def test_an_epoch_holds_every_token_once_and_epochs_differ_in_order(tmp_path: Path) -> None:
    rows, _ = build(tmp_path, [write(tmp_path / "a", numbers(0, 1001))], 250)
    epochs = [starts(rows, range(first, first + 100)) for first in (0, 100)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(0, 1000, 10))] * 2
    assert epochs[0] != epochs[1] and epochs[0] != sorted(epochs[0])


@pytest.mark.parametrize("weights", [(), ("0.6", "0.4")], ids=["by size", "weighted"])
def test_a_longer_run_sees_the_same_samples_first(tmp_path: Path, weights: tuple[str]) -> None:
    paths = [write(tmp_path / name, numbers(at, 203, 3)) for name, at in (("a", 0), ("b", 3000))]
    blend = [x for pair in zip(weights, paths, strict=True) for x in pair] if weights else paths
    short, long = (build(tmp_path, blend, samples)[0] for samples in (50, 700))
    assert all(np.array_equal(short[i], long[i]) for i in range(50))
    assert short.fingerprint == long.fingerprint
    other, _ = build(tmp_path, blend, 50, seed=7)
    assert other.fingerprint != short.fingerprint
    assert any(not np.array_equal(short[i], other[i]) for i in range(50))


@pytest.mark.parametrize(
    ("weights", "share"),
    [(("7", "2", "1"), (0.7, 0.2, 0.1)), ((), (0.25, 0.25, 0.5))],
    ids=["weighted", "by size"],
)
def test_blend_has_the_proportions_asked_for(
    tmp_path: Path, weights: tuple[str, ...], share: tuple[float, ...]
) -> None:
    sizes = {"a": 501, "b": 501, "c": 1002}
    paths = [
        write(tmp_path / name, numbers(3000 * i, size))
        for i, (name, size) in enumerate(sizes.items())
    ]
    blend = [x for pair in zip(weights, paths, strict=True) for x in pair] if weights else paths
    rows, _ = build(tmp_path, blend, 400)
    for upto in (40, 133, 400):
        counts = Counter(start // 3000 for start in starts(rows, range(upto)))
        assert all(abs(counts[i] - part * upto) <= 2 for i, part in enumerate(share))


def test_training_and_validation_share_no_document(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", numbers(0, 50, 100))
    train, valid = build(tmp_path, [prefix], 500, 100, split="90,10")
    seen = [{int(t) // 50 for i in range(len(rows)) for t in rows[i]} for rows in (train, valid)]
    assert seen == [set(range(90)), set(range(90, 100))]
    alone, nothing = build(tmp_path, [prefix], 500, 0, split="90,10")
    assert nothing is None
    assert all(np.array_equal(alone[i], train[i]) for i in range(500))


def test_moved_data_gives_the_same_rows_and_changed_data_no_stale_index(tmp_path: Path) -> None:
    rows, _ = build(tmp_path, [write(tmp_path / "a", numbers(0, 1001))], 100)
    expected = starts(rows, range(100))
    indices = set((tmp_path / "cache" / "index").iterdir())
    write(tmp_path / "b", numbers(0, 1001))
    assert starts(build(tmp_path, [str(tmp_path / "b")], 100)[0], range(100)) == expected
    assert set((tmp_path / "cache" / "index").iterdir()) == indices
    del rows
    write(tmp_path / "a", numbers(5000, 301))
    changed, _ = build(tmp_path, [str(tmp_path / "a")], 30)
    assert sorted(starts(changed, range(30))) == list(range(5000, 5300, 10))


def test_synthetic_rows_depend_on_seed_part_and_index_alone(tmp_path: Path) -> None:
    def make(seed: int, samples: int) -> tuple[Samples, Samples | None]:
        data = DataConfig(source="synthetic", seed=seed, sequence_length=64, cache=str(tmp_path))
        return build_datasets(Config(data=data), 97, samples, 8)

    (train, valid), (again, _), (other, _) = make(1, 10), make(1, 99), make(2, 10)
    assert np.array_equal(train[5], again[5]) and train[5].shape == (65,)
    different = [train[5], train[6], valid[5], other[5]]
    assert len({row.tobytes() for row in different}) == 4
    values = np.concatenate([again[i] for i in range(99)])
    assert set(values) == set(range(97)) and not list(tmp_path.iterdir())


# --- the loader -----------------------------------------------------------------------------------


class Rows:
    """Row i is i, i + 1, i + 2, ..."""

    fingerprint = ""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> np.ndarray:
        return np.arange(index, index + 5)


def rank_batches(dp: int, micro: int, steps: int, consumed: int = 0) -> list[list[list[int]]]:
    """[step][micro-batch of any rank] -> sample numbers, over all ranks, global batch 8."""
    result: list[list[list[int]]] = [[] for _ in range(steps)]
    for rank in range(dp):
        loader = Loader(Rows(64), micro, 8, rank, dp, consumed)
        for step in result:
            step += [batch["tokens"][:, 0].tolist() for batch in loader.next_step()]
        loader.close()
    return result


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("dp", [1, 2, 4])
def test_global_and_micro_batches_are_the_same_for_every_dp_size(dp: int, micro: int) -> None:
    for number, step in enumerate(rank_batches(dp, micro, 3)):
        expected = [list(range(at, at + micro)) for at in range(8 * number, 8 * number + 8, micro)]
        assert sorted(step) == expected


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_a_resumed_run_sees_what_it_would_have_seen_with_any_dp_size(dp: int) -> None:
    whole = rank_batches(1, 2, 6)
    first = Loader(Rows(64), 2, 8, 0, 2)
    for _ in range(3):
        first.next_step()
    state = first.state_dict()
    assert state == {"consumed_samples": 24}
    assert [sorted(step) for step in rank_batches(dp, 2, 3, state["consumed_samples"])] == whole[3:]
    first.load_state_dict({"consumed_samples": 8})  # also backwards, over what was read ahead
    assert next(first)["tokens"][:, 0].tolist() == [8, 9]


def test_samples_of_undone_steps_do_not_return() -> None:
    """And steps go on with the size of those that they take the place of."""
    loader = Loader(Rows(64), 1, [(5, 2), (10, 4), (2**62, 8)], 0, 1)
    for _ in range(3):
        loader.next_step()
    state = loader.state_dict()
    assert state == {"consumed_samples": 6}
    for consumed, undone in ((10, 4), (14, 8)):
        loader.next_step()
        loader.roll_back(state)
        assert (loader.consumed_samples, loader.undone_samples) == (consumed, undone)
        assert loader.step_samples == 6 and loader.micro_batches == 4
    assert loader.next_rows() == [14, 15, 16, 17]
    again = Loader(Rows(64), 1, [(5, 2), (10, 4), (2**62, 8)], 0, 1)
    again.load_state_dict(loader.state_dict())
    again.roll_back(loader.state_dict())
    assert (again.consumed_samples, again.undone_samples) == (14, 8)
    for each in (loader, again):
        each.close()


@pytest.mark.parametrize("dp", [1, 2])
def test_sizes_of_steps_follow_the_cursor(dp: int) -> None:
    """Also after a resume, and backwards."""
    sizes = [(5, 2), (10, 4), (2**62, 8)]
    loader = Loader(Rows(64), 1, sizes, 0, dp)
    read = [[b["tokens"][0, 0].item() for b in loader.next_step()] for _ in range(6)]
    starts = [0, 2, 4, 6, 10, 18, 26]
    assert read == [list(range(a, b, dp)) for a, b in itertools.pairwise(starts)]
    for step in (4, 1):
        loader.load_state_dict({"consumed_samples": starts[step]})
        assert loader.next_rows() == read[step]
        assert [b["tokens"][0, 0].item() for b in loader.next_step()] == read[step]
    loader.close()
    with pytest.raises(DataError, match="data.global_batch=2 is not a multiple"):
        Loader(Rows(64), 4, sizes, 0, 1)


def test_a_batch_holds_tokens_and_the_labels_that_follow() -> None:
    batch = next(Loader(Rows(64), 3, 6, 1, 2))
    assert {(b.dtype, tuple(b.shape), b.is_contiguous()) for b in batch.values()} == {
        (torch.int64, (3, 4), True)
    }
    assert batch["tokens"].tolist() == [[3, 4, 5, 6], [4, 5, 6, 7], [5, 6, 7, 8]]
    assert torch.equal(batch["labels"], batch["tokens"] + 1)
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3]] * 3


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_the_rows_of_the_next_step_are_known_before(dp: int) -> None:
    for rank in range(dp):
        loader = Loader(Rows(64), 2, 8, rank, dp)
        for _ in range(3):
            rows = loader.next_rows()
            batches = loader.next_step()
            assert [n for b in batches for n in b["tokens"][:, 0].tolist()] == rows
        loader.close()


def test_the_loader_stops_after_the_last_full_batch() -> None:
    loader = Loader(Rows(22), 2, 8, 0, 2)
    assert len(list(loader)) == 5 and loader.consumed_samples == 20
    with pytest.raises(IndexError, match="ends at sample 22"):
        loader.next_step()


@pytest.mark.gpu
def test_batches_are_pinned() -> None:
    assert all(t.is_pinned() for t in next(Loader(Rows(64), 2, 8, 0, 1, pin=True)).values())


# --- bad input ------------------------------------------------------------------------------------


def patch(path: Path, offset: int, raw: bytes) -> None:
    with path.open("r+b") as stream:
        stream.seek(offset)
        stream.write(raw)


def lose_documents(path: Path) -> None:
    """An index as written by tools that copy sequences only."""
    raw = path.read_bytes()
    patch(path, 26, (1).to_bytes(8, "little"))
    os.truncate(path, len(raw) - 8)


def sidecar(path: Path, **changes: object) -> None:
    whole = {"tokenizer": "t", "tokenizer_sha256": "0", "vocab_size": 2000, "eod": 0}
    whole |= {"dtype": "uint16", "documents": 1, "tokens": 1001, **changes}
    Sidecar(**whole).write(path)


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no bin": (lambda p: p.with_suffix(".bin").unlink(), "a.bin does not exist.*data.blend"),
    "no idx": (lambda p: p.with_suffix(".idx").unlink(), "a.idx does not exist.*data.blend"),
    "bin truncated": (
        lambda p: os.truncate(p.with_suffix(".bin"), 1999),
        "a.bin is truncated: 1999 bytes, .*a.idx describes 2002.*rebuild both",
    ),
    "bin of another": (
        lambda p: patch(p.with_suffix(".bin"), 2002, b"more"),
        "a.bin does not belong to its index.*rebuild both",
    ),
    "idx header cut": (lambda p: os.truncate(p.with_suffix(".idx"), 20), "a.idx is truncated"),
    "idx cut": (
        lambda p: os.truncate(p.with_suffix(".idx"), 50),
        "a.idx is truncated: 50.*rebuild",
    ),
    "idx empty": (
        lambda p: os.truncate(p.with_suffix(".idx"), 0),
        "a.idx is not a Megatron index.*rebuild it",
    ),
    "magic": (lambda p: patch(p.with_suffix(".idx"), 0, b"X"), "a.idx is not a Megatron index"),
    "version": (
        lambda p: patch(p.with_suffix(".idx"), 9, b"\2"),
        "a.idx has format version 2.*rebuild it",
    ),
    "floats": (
        lambda p: patch(p.with_suffix(".idx"), 17, b"\7"),
        "a.idx has dtype code 7.*integer.*rebuild it",
    ),
    "empty": (lambda p: write(p, []), "a.idx describes an empty corpus"),
    "no document boundaries": (
        lambda p: lose_documents(p.with_suffix(".idx")),
        "a.idx has lost its document boundaries: 1 sequences.*rebuild it with scripts/prepare",
    ),
    "empty document": (lambda p: write(p, [[]]), "a.idx describes an empty corpus"),
    "json broken": (lambda p: p.with_suffix(".json").write_text("{"), "a.json is not a JSON obj"),
    "json deep": (
        lambda p: p.with_suffix(".json").write_text("[" * 10**5),
        "a.json is not a JSON object.*move it away",
    ),
    "json foreign": (
        lambda p: p.with_suffix(".json").write_text('{"a": 1}'),
        "a.json does not desc",
    ),
    "json dtype": (lambda p: sidecar(p.with_suffix(".json"), dtype="int32"), "a.json says dtype"),
    "json tokens": (
        lambda p: sidecar(p.with_suffix(".json"), tokens=9),
        "a.json says tokens 9,.*rebuild all",
    ),
    "json vocabulary": (
        lambda p: sidecar(p.with_suffix(".json"), vocab_size=VOCAB + 1),
        f"tokenizer t go up to {VOCAB}.*set model.vocab_size=10112",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_refused_by_name(tmp_path: Path, case: str) -> None:
    write(tmp_path / "a", numbers(0, 1001))
    build(tmp_path, [str(tmp_path / "a")], 10)
    damage, message = BROKEN[case]
    damage(tmp_path / "a")
    with pytest.raises(DataError, match=message) as caught:
        build(tmp_path, [str(tmp_path / "a")], 10)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("blend", "data", "message"),
    [
        ([], {}, "needs data.blend"),
        (["0", "{a}"], {}, "weight 0.0; it must be positive"),
        (["nan", "{a}"], {}, "weight nan; it must be positive"),
        (["0.5", "{a}", "{a}"], {}, "data.blend=.* must be prefixes, or weight,prefix"),
        (["{a}", "0.5"], {}, "data.blend=.* must be prefixes, or weight,prefix"),
        (["{a}"], {"split": "98;2"}, "data.split=98;2 must be one to three weights"),
        (["{a}"], {"split": "0,1"}, "data.split=0,1 must be one to three weights"),
        (["{a}"], {"split": "1", "valid": 4}, "nothing to validate on.*run.eval_interval=0"),
        (["{a}"], {"split": "98,2", "valid": 4}, "the validation part of .*a.bin .* has 0 tokens"),
        (["{a}"], {"sequence_length": 1001}, "data.sequence_length=1001 is longer than the data"),
        (["{a}"], {"cache": "{a}.bin"}, "a.bin.* cannot be written .*set data.cache"),
        (["{a}"], {"source": "web"}, "data.source=web is not"),
    ],
)
def test_bad_settings_are_refused_by_override(
    tmp_path: Path, blend: list[str], data: dict[str, object], message: str
) -> None:
    a = write(tmp_path / "a", numbers(0, 1001))
    filled = {k: v.format(a=a) if isinstance(v, str) else v for k, v in data.items()}
    with pytest.raises(DataError, match=message) as caught:
        build(tmp_path, [entry.format(a=a) for entry in blend], 10, **filled)
    assert "\n" not in str(caught.value)


def test_the_longest_sequence_that_fits(tmp_path: Path) -> None:
    a = write(tmp_path / "a", numbers(0, 1001))
    assert len(build(tmp_path, [a], 1, sequence_length=1000)[0][0]) == 1001


@pytest.mark.parametrize(("dtype", "wrong"), [(np.uint16, 9000), (np.int32, -1)])
def test_ids_outside_the_vocabulary_are_refused_before_use(
    tmp_path: Path, dtype: type, wrong: int
) -> None:
    document = [*range(500), wrong, *range(501, 1001)]
    rows, _ = build(tmp_path, [write(tmp_path / "a", [document], dtype)], 100, vocab=2000)
    loader, batches = Loader(rows, 4, 4, 0, 1), []
    with pytest.raises(DataError, match=rf"sample \d+, .*a.bin, has token id {wrong}.*model.vocab"):
        batches += [batch["tokens"] for batch in loader]
    assert all(batch.min() >= 0 and batch.max() < 2000 for batch in batches)


def test_a_blend_of_two_tokenizers_is_refused(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, numbers(0, 1001)) for name in "ab"]
    sidecar(tmp_path / "a.json")
    sidecar(tmp_path / "b.json", tokenizer="other", tokenizer_sha256="1")
    with pytest.raises(DataError, match="mixes tokenizers: t in .*a.json, other in .*b.json"):
        build(tmp_path, paths, 10)
    same = {"tokenizer_meaning": "m"}
    sidecar(tmp_path / "a.json", **same)
    sidecar(tmp_path / "b.json", tokenizer="other", tokenizer_sha256="1", **same)
    build(tmp_path, paths, 10)


def test_batch_sizes_must_divide() -> None:
    with pytest.raises(DataError, match="data.global_batch=8 is not a multiple.*3 x 2 data"):
        Loader(Rows(64), 3, 8, 0, 2)


def test_signed_and_unsigned_dtypes_are_read(tmp_path: Path) -> None:
    for dtype in (np.uint8, np.uint16, np.int32, np.int64):
        prefix = write(tmp_path / dtype.__name__, numbers(0, 101), dtype)
        assert open_corpus(prefix).dtype == dtype.__name__
        assert sorted(starts(build(tmp_path, [prefix], 10)[0], range(10))) == [*range(0, 100, 10)]


# --- several ranks --------------------------------------------------------------------------------


def on_ranks(folder: Path, other: bool, missing: bool) -> list[int]:
    """Each rank as on a host of its own: own files, own cache."""
    rank = dist.get_rank()
    mine = folder / str(rank)
    mine.mkdir()
    paths = [write(mine / name, numbers(at, 303, 3)) for name, at in (("a", 0), ("b", 3000))]
    if rank == 1 and other:
        write(mine / "b", numbers(3001, 303, 3))
    if rank == 1 and missing:
        (mine / "b.idx").unlink()
    rows, _ = build(mine, ["0.7", paths[0], "0.3", paths[1]], 60)
    return [int(rows[i].sum()) for i in range(60)]


def on_ranks_error(folder: Path, other: bool, missing: bool) -> str:
    with pytest.raises(DataError) as caught:
        on_ranks(folder, other, missing)
    return str(caught.value)


@pytest.mark.dist
def test_hosts_without_a_shared_disk_read_the_same_rows(tmp_path: Path) -> None:
    first, second = run_distributed(on_ranks, 2, tmp_path, False, False)
    assert first == second and len(set(first)) > 30


@pytest.mark.dist
@pytest.mark.parametrize(
    ("other", "missing", "message"),
    [
        (True, False, r"data is \w+ on \S+ \(rank 0\) and \w+ on \S+ \(rank 1\): copy the files"),
        (False, True, r"b.idx .*\(rank 1\)"),
    ],
)
def test_an_error_on_one_rank_ends_all(
    tmp_path: Path, other: bool, missing: bool, message: str
) -> None:
    errors = run_distributed(on_ranks_error, 2, tmp_path, other, missing)
    assert errors[0] == errors[1]
    assert re.search(message, errors[0])
