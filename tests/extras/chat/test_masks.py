"""Rows with a loss mask: which labels count, blends, resumes, and files that do not fit."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phalanx import train
from phalanx.configs.schema import Config, DataConfig
from phalanx.extras.chat.masks import BEGINS, COUNTS
from phalanx.moe.data.host_cache import DataError
from phalanx.moe.data.loader import Loader, Samples, build_datasets
from phalanx.moe.data.token_files import open_corpus
from phalanx.parallel import object_store
from phalanx.parallel.object_store import Remote
from tests.extras.chat.chats import CHATS, chat, prepare
from tests.support.runs import TINY, write_corpus

LENGTH = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chats")
    rows = [{"messages": chat(*map(str, range(2 + 2 * (i % 3))))} for i in range(60)]
    prepare(folder, "chats", rows)
    prepare(folder, "others", [{"messages": CHATS[i % 3]} for i in range(40)])
    write_corpus(folder / "text", [range(i, i + 30) for i in range(200)])
    return folder


def build(folder: Path, *blend: str, train: int = 20, valid: int = 0, **data: Any) -> list[Samples]:
    settings = {"source": "indexed", "sequence_length": LENGTH, "split": "100"} | data
    settings |= {"cache": str(folder / "cache")}
    named = [each if each[0].isdigit() else str(folder / each) for each in blend]
    both = build_datasets(Config(data=DataConfig(blend=named, **settings)), 400, train, valid)
    return [rows for rows in both if rows is not None]


def flags_by_row(prefix: Path) -> dict[bytes, np.ndarray]:
    """Flags of each sequence of a pair, by its tokens."""
    ids = np.fromfile(f"{prefix}.bin", np.uint16).reshape(-1, LENGTH)
    flags = np.fromfile(f"{prefix}.mask.bin", np.uint8).reshape(-1, LENGTH)
    return {row.tobytes(): flag for row, flag in zip(ids, flags, strict=True)}


def test_rows_are_whole_sequences_in_every_epoch(folder: Path) -> None:
    known = flags_by_row(folder / "chats")
    (rows,) = build(folder, "chats", train=3 * len(known))
    for i in range(len(rows)):
        flags = known[rows[i][:-1].astype(np.uint16).tobytes()]
        assert np.array_equal(rows.counted(i)[:-1], flags & COUNTS != 0)
        assert not rows.counted(i)[-1]  # the first token of another sequence
        begins = np.append(flags & BEGINS != 0, True)
        assert np.array_equal(rows.positions(i) == 0, begins)
        assert np.array_equal(np.diff(rows.positions(i)) == 1, ~begins[1:])


@pytest.mark.parametrize("documents", [False, True])
def test_batches_count_the_labels_of_answers(folder: Path, documents: bool) -> None:
    known = flags_by_row(folder / "chats")
    (rows,) = build(folder, "chats")
    loader = Loader(rows, 2, 4, 0, 1, documents=documents)
    plain = Loader(build(folder, "chats", loss_mask=False)[0], 2, 4, 0, 1, documents=documents)
    for batch, other in zip(loader.next_step(), plain.next_step(), strict=True):
        assert batch["loss_mask"].dtype == torch.bool and batch["loss_mask"].is_contiguous()
        assert ("loss_mask" in other) == documents
        for name in ("tokens", "labels"):
            assert torch.equal(batch[name], other[name])
        for tokens, mask in zip(batch["tokens"], batch["loss_mask"], strict=True):
            flags = known[tokens.numpy().astype(np.uint16).tobytes()]
            assert np.array_equal(mask.numpy(), np.append(flags[1:] & COUNTS != 0, False))
    loader.close(), plain.close()


def test_a_cursor_goes_on_with_the_same_masks(folder: Path) -> None:
    whole, resumed = (Loader(build(folder, "chats")[0], 2, 4, 0, 1) for _ in range(2))
    whole.next_step()
    resumed.load_state_dict(whole.state_dict())
    for a, b in zip(whole.next_step(), resumed.next_step(), strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    whole.close(), resumed.close()


@pytest.mark.parametrize("weights", [(), ("0.3", "0.4", "0.3")])
def test_sources_with_and_without_masks_are_mixed(folder: Path, weights: tuple[str, ...]) -> None:
    names = ["chats", "text", "others"]
    blend = [x for pair in zip(weights, names, strict=True) for x in pair] if weights else names
    rows, valid = build(folder, *blend, train=60, valid=10, split="80,20")
    known = {0: flags_by_row(folder / "chats"), 2: flags_by_row(folder / "others")}
    assert {rows.source(i) for i in range(60)} == {0, 1, 2}
    for part in (rows, valid):
        assert [source.labels < 1 for source in part.sources] == [True, False, True]
        assert [source.bytes_per_token for source in part.sources] == [None] * 3
        for i in range(len(part)):
            counted, source = part.counted(i), part.source(i)
            if source == 1:
                assert counted.all() and (part.positions(i)[:30] < 30).all()
                continue
            flags = known[source][part[i][:-1].astype(np.uint16).tobytes()]
            assert np.array_equal(counted[:-1], flags & COUNTS != 0)


def test_validation_data_has_its_own_mask(folder: Path) -> None:
    held = [str(folder / "others")]
    for blend, masked in (("text", [False, True]), ("chats", [True, True])):
        parts = build(folder, blend, train=9, valid=9, split="1", validation=held)
        assert [not part.counted(0).all() for part in parts] == masked
    known = flags_by_row(folder / "others")
    assert all(parts[1][i][:-1].astype(np.uint16).tobytes() in known for i in range(9))


def test_a_sequence_may_hold_several(folder: Path) -> None:
    known = flags_by_row(folder / "chats")
    (rows,) = build(folder, "chats", train=4, sequence_length=2 * LENGTH)
    for i in range(4):
        halves = rows[i][:-1].astype(np.uint16).reshape(2, LENGTH)
        flags = np.concatenate([known[half.tobytes()] for half in halves])
        assert np.array_equal(rows.counted(i)[:-1], flags & COUNTS != 0)


def test_the_fingerprint_tells_the_mask(folder: Path, tmp_path: Path) -> None:
    for file in folder.glob("chats.*"):
        shutil.copy(file, tmp_path)
    assert build(tmp_path, "chats")[0].fingerprint == build(folder, "chats")[0].fingerprint
    flags = np.fromfile(tmp_path / "chats.mask.bin", np.uint8)
    flags[5] ^= COUNTS
    flags.tofile(tmp_path / "chats.mask.bin")
    assert build(tmp_path, "chats")[0].fingerprint != build(folder, "chats")[0].fingerprint


def test_files_that_do_not_fit_are_named(folder: Path, tmp_path: Path) -> None:
    for name in ("chats", "others"):
        for file in folder.glob(f"{name}.*"):
            shutil.copy(file, tmp_path)
    chats, others = tmp_path / "chats", tmp_path / "others"
    with pytest.raises(DataError) as error:
        build(tmp_path, "chats", sequence_length=LENGTH + 1)
    assert str(error.value) == (
        f"data.sequence_length=65 would cut the rows of {chats}.bin, which are packed into "
        "sequences of 64 tokens; set data.sequence_length=64, or prepare them with "
        "--sequence-length 65"
    )
    for end in ("bin", "idx"):
        shutil.copy(f"{others}.mask.{end}", f"{chats}.mask.{end}")
    there, wanted = open_corpus(f"{others}.mask"), open_corpus(str(chats))
    with pytest.raises(DataError) as error:
        build(tmp_path, "chats")
    assert str(error.value) == (
        f"{chats}.mask.bin is not the loss mask of {chats}.bin: {LENGTH * there.documents:,} of "
        f"uint8 in {there.documents} documents, where the tokens are "
        f"{LENGTH * wanted.documents:,} of uint16 in {wanted.documents} documents; prepare the "
        "data again, or set data.loss_mask=false"
    )
    Path(f"{chats}.mask.bin").write_bytes(b"short")
    with pytest.raises(DataError, match=r"chats.mask.bin is truncated: 5 bytes, .*; rebuild both"):
        build(tmp_path, "chats")
    Path(f"{chats}.mask.bin").unlink()
    with pytest.raises(DataError, match=r"chats.mask.bin is missing, which has the loss mask of"):
        build(tmp_path, "chats")
    assert not hasattr(build(tmp_path, "chats", loss_mask=False)[0], "counted")


def test_masks_are_read_from_an_object_store(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "WAITS", ())
    address = f"memory://{tmp_path.name}/chats"
    for ending in (".bin", ".idx", ".json", ".mask.bin", ".mask.idx"):
        Remote(address + ending).upload(Path(f"{folder}/chats{ending}"))
    (local,) = build(folder, "chats")
    settings = {"source": "indexed", "sequence_length": LENGTH, "split": "100"}
    data = DataConfig(blend=[address], cache=str(tmp_path / "cache"), **settings)
    remote, _ = build_datasets(Config(data=data), 400, 20, 0)
    assert remote.fingerprint == local.fingerprint
    for i in range(20):
        assert np.array_equal(remote.counted(i), local.counted(i))
        assert np.array_equal(remote.positions(i), local.positions(i))
    Remote(f"{address}.mask.bin").delete()
    with pytest.raises(DataError, match=r"chats\.mask\.bin does not exist"):
        build_datasets(Config(data=data), 400, 20, 0)


def test_the_check_of_a_launch_reports_a_missing_mask(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in folder.glob("chats.*"):
        shutil.copy(file, tmp_path)
    command = ["--check", *TINY, "data=indexed", f"data.blend=[{tmp_path}/chats]", "run.steps=1"]
    command += [f"data.sequence_length={LENGTH}", f"run.dir={tmp_path}", "model.vocab_size=384"]
    assert train.main(command) == 0
    (tmp_path / "chats.mask.idx").unlink()
    capsys.readouterr()
    assert train.main(command) != 0
    assert capsys.readouterr().err == (
        f"error: {tmp_path}/chats.mask.idx is missing, which has the loss mask of "
        f"{tmp_path}/chats.bin: copy it there, prepare the data again, or set "
        "data.loss_mask=false\n"
    )
