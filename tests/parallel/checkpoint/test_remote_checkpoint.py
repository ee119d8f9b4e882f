"""Checkpoints in an object store keep the promises of those in a folder.

On fsspec's file system in memory, and on an S3-compatible server. A kill is a `Killed` that nothing
handles, after which the store is as it was at that moment; or the end of the process.
"""

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from phalanx.configs.schema import RunConfig
from phalanx.parallel import object_store
from phalanx.parallel.checkpoint import commit, remote, saved_config
from phalanx.parallel.folder_lock import Taken
from phalanx.parallel.object_store import Remote, place
from tests.parallel.checkpoint.checkpoints import (
    assert_equal,
    build,
    load,
    record,
    save,
    tensors,
    train,
)
from tests.support import s3
from tests.support.distributed import RankFailed, run_distributed
from tests.support.scheduling import matrix, mostly_slow, slow

MEMORY, S3 = "memory://test", f"s3://{s3.BUCKET}"


class Killed(BaseException):
    """This process ends here."""


@contextmanager
def reached(at: str) -> Iterator[None]:
    """The server, without waits between attempts."""
    with s3.credentials(at), pytest.MonkeyPatch.context() as patch:
        patch.setattr(object_store, "WAITS", (0.0, 0.0))
        yield


def saver(root: str, groups: Any, folder: Path, async_save: bool = False, **keep: int) -> Any:
    from phalanx.parallel.checkpoint.checkpointer import Checkpointer

    return Checkpointer(
        place(root),
        **{"keep_last": 2, **keep},
        async_save=async_save,
        dp_cp_group=groups.pg.dp_cp,
        staging=folder / "uploads",
    )


def steps(root: str) -> list[str]:
    """Names below a root, without what tells saves of one step apart."""
    return sorted({name.partition("/")[0].partition(".")[0] for name in place(root).objects()})


# --- saving and loading ---------------------------------------------------------------------------


def _goes_on(root: str, at: str, folder: Path, async_save: bool) -> list[str]:
    with reached(at):
        engine, groups = build(expert=dist.get_world_size())
        first = saver(root, groups, folder, async_save)
        for step in (1, 2):
            train(engine, groups, step - 1, step)
            path = save(first, step, engine)
            assert save(first, step, engine) == path  # a step is saved once
        first.close()
        before, expected = tensors(engine), train(engine, groups, 2, 3)
        engine, _ = build(seed=5, expert=dist.get_world_size())
        second = saver(root, groups, folder)
        assert second.newest() == path
        assert load(second, path, engine)["step"] == 2
        assert_equal(before, tensors(engine))
        assert train(engine, groups, 2, 3) == expected
        save(second, 3, engine)
        dist.barrier()  # the other rank's files are gone as well
        assert not [file for file in folder.rglob("*") if file.is_file()]
        return steps(root)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("ranks", "root", "async_save"),
    [(1, MEMORY, False), *slow((1, S3, True), (2, S3, True), (2, S3, False))],
)
def test_a_run_goes_on_bit_for_bit(tmp_path: Path, ranks: int, root: str, async_save: bool) -> None:
    """The oldest checkpoint goes, and nothing stays of what was written before the uploads."""
    root += f"/goes_on_{ranks}_{async_save}"
    kept, *_ = run_distributed(_goes_on, ranks, root, s3.endpoint(), tmp_path, async_save)
    assert kept == ["OWNER", "step_00000002", "step_00000003"]


def _saves_both(root: str, at: str, folder: Path) -> None:
    from tests.parallel.checkpoint.checkpoints import checkpointer

    with reached(at):
        engine, groups = build(expert=2)
        train(engine, groups, 0, 1)
        save(saver(root, groups, folder), 1, engine)
        save(checkpointer(folder / "local", groups), 1, engine)


def _loads_both(root: str, at: str, folder: Path) -> tuple[int, int]:
    """(bytes read of shards, bytes that there are)."""
    from tests.parallel.checkpoint.checkpoints import checkpointer

    with reached(at):
        local, groups = build(seed=3)
        checkpoints = checkpointer(folder / "local", groups)
        load(checkpoints, checkpoints.newest(), local)
        engine, _ = build(seed=4)
        checkpoints = saver(root, groups, folder)
        path, read = checkpoints.newest(), []
        with pytest.MonkeyPatch.context() as patch:
            original = Remote.read

            def counted(self: Remote, start: int = 0, stop: int | None = None) -> bytes:
                read.append((self.name, stop and stop - start))
                return original(self, start, stop)

            patch.setattr(Remote, "read", counted)
            checkpoints.load(path, engine.chunks)  # the model only
        held = sum(size for size, _ in commit.read_commit(path).files.values())
        load(checkpoints, path, engine)
        assert_equal(tensors(local), tensors(engine))
        return sum(size for name, size in read if name.endswith(".distcp")), held


@pytest.mark.dist
def test_another_layout_reads_what_it_needs(tmp_path: Path) -> None:
    root, at = f"{S3}/layouts", s3.endpoint()
    run_distributed(_saves_both, 2, root, at, tmp_path)
    ((read, held),) = run_distributed(_loads_both, 1, root, at, tmp_path)
    assert 0 < read < held / 3  # weights are 2 of the 14 bytes of a parameter


# --- kills ----------------------------------------------------------------------------------------


def upload_in_part(file: Path, folder: Remote) -> None:
    """A PUT that does not end leaves nothing, or on S3 a part that no listing shows."""
    if folder.address.startswith("s3"):
        import s3fs

        store, (bucket, _, key) = s3fs.S3FileSystem(), folder.address[5:].partition("/")
        where = {"Bucket": bucket, "Key": f"{key}/{file.name}"}
        begun = store.call_s3("create_multipart_upload", **where)
        part = {"UploadId": begun["UploadId"], "PartNumber": 1, "Body": file.read_bytes()[:1000]}
        store.call_s3("upload_part", **where, **part)


class Phase(NamedTuple):
    """The end comes with a call of a function; with how many saves that were never completed."""

    module: str
    name: str
    call: int
    stale: int


PHASES = {
    "nothing is uploaded": Phase("parallel.checkpoint.writer", "upload", 1, 0),
    "a shard is uploaded in part": Phase("parallel.checkpoint.remote", "upload", 1, 0),
    "shards are there, metadata is not": Phase("parallel.checkpoint.remote", "complete", 1, 1),
    "metadata is there in part": Phase("parallel.checkpoint.remote", "upload", 3, 1),
    "no COMMIT.json": Phase("parallel.checkpoint.commit", "with_checksum", 1, 1),
    "the older one is there": Phase("parallel.checkpoint.commit", "delete", 1, 0),
    "the older one is there in part": Phase("parallel.object_store", "Remote.delete", 2, 1),
}
KILLS = [
    *[(MEMORY, "nothing is uploaded"), (S3, "a shard is uploaded in part")],
    *[(MEMORY, "no COMMIT.json"), (MEMORY, "the older one is there in part")],
]
"""Kills of default tests, one for each kind of state that is left."""


def _killed(root: str, at: str, folder: Path, phase: str, end: Callable[[], None]) -> None:
    module, name, call, _ = PHASES[phase]
    with reached(at):
        engine, groups = build()
        checkpoints = saver(root, groups, folder, keep_last=1)
        train(engine, groups, 0, 1)
        save(checkpoints, 1, engine)
        train(engine, groups, 1, 2)
        owner: Any = importlib.import_module(f"phalanx.{module}")
        *outer, name = name.split(".")
        for part in outer:
            owner = getattr(owner, part)
        original, calls = getattr(owner, name), []

        def die(*args: Any, **kw: Any) -> Any:
            calls.append(args)
            if len(calls) < call:
                return original(*args, **kw)
            if "in part" in phase and name == "upload":
                upload_in_part(*args)
            end()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, die)
            patch.setattr("threading.Thread.start", lambda self: self.run())  # the cleaner's
            patch.setattr("threading.Thread.join", lambda self: None)
            save(checkpoints, 2, engine)


def _killed_and_goes_on(
    root: str, at: str, folder: Path, phase: str
) -> tuple[int, list[tuple[float, float]], list[str]]:
    def end() -> None:
        raise Killed

    if root.startswith("memory"):  # which is the process's
        with pytest.raises(Killed):
            _killed(root, at, folder, phase, end)
    with reached(at):
        engine, groups = build(seed=5)
        lines = record()
        checkpoints = saver(root, groups, folder, keep_last=1)
        step = load(checkpoints, checkpoints.newest(), engine)["step"]
        losses = train(engine, groups, step, 3)
        save(checkpoints, 3, engine)
        assert steps(root) == ["OWNER", "step_00000003"]
        return step, losses, lines


def ended() -> None:
    os._exit(9)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("root", "phase"),
    [*KILLS, *slow(*(kill for kill in product((MEMORY, S3), PHASES) if kill not in KILLS))],
)
def test_killed_while_saving(
    tmp_path: Path, root: str, phase: str, expected: list[tuple[float, float]]
) -> None:
    """The run goes on from the newest complete checkpoint, bit for bit, and clears what is left."""
    root += f"/killed/{list(PHASES).index(phase)}"
    if root.startswith("s3"):
        with pytest.raises(RankFailed, match="exit code 9"):
            run_distributed(_killed, 1, root, s3.endpoint(), tmp_path, phase, ended)
    ((step, losses, lines),) = run_distributed(
        _killed_and_goes_on, 1, root, s3.endpoint(), tmp_path, phase
    )
    assert step == (2 if "older" in phase else 1)
    assert losses == expected[step:]
    assert len(lines) == PHASES[phase].stale
    assert all(line.endswith("was never completed: ignored") for line in lines)


def _killed_in_background(root: str, at: str, folder: Path, whom: str) -> str:
    from phalanx.parallel.checkpoint import upload

    with reached(at):
        engine, groups = build()
        checkpoints = saver(root, groups, folder, async_save=True)
        train(engine, groups, 0, 1)
        save(checkpoints, 1, engine)
        checkpoints.close()
        train(engine, groups, 1, 2)
        begin = "import os; os._exit(7)" if whom == "upload" else "import time; time.sleep(60)"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(upload, "_BEGIN", begin)
            save(checkpoints, 2, engine)
            if whom == "run":
                os._exit(9)
            with pytest.raises(RuntimeError) as caught:
                checkpoints.close()
        assert steps(root) == ["OWNER", "step_00000001"]
        save(checkpoints, 2, engine)
        checkpoints.close()
        assert steps(root) == ["OWNER", "step_00000001", "step_00000002"]
        return str(caught.value)


@pytest.mark.dist
def test_an_upload_is_killed_in_the_background(tmp_path: Path) -> None:
    at = s3.endpoint()
    (told,) = run_distributed(_killed_in_background, 1, f"{S3}/upload", at, tmp_path, "upload")
    assert "checkpoint of step 2 not written to s3://" in told and "run.checkpoints" in told
    assert "ended with 7" in told and "\n" not in told


@pytest.mark.dist
@pytest.mark.slow
def test_a_run_is_killed_during_an_upload_in_the_background(
    tmp_path: Path, expected: list[tuple[float, float]]
) -> None:
    at = s3.endpoint()
    with pytest.raises(RankFailed, match="exit code 9"):
        run_distributed(_killed_in_background, 1, f"{S3}/run", at, tmp_path, "run")
    step, losses, _ = run_distributed(
        _killed_and_goes_on, 1, f"{S3}/run", at, tmp_path, "nothing is uploaded"
    )[0]
    assert (step, losses) == (1, expected[1:])


# --- damage ---------------------------------------------------------------------------------------


def _cut(path: Remote) -> None:
    path.write(path.read()[:-9])


def _flip(path: Remote) -> None:
    data = bytearray(path.read())
    data[len(data) // 2] ^= 1
    path.write(bytes(data))


def _edit(path: Remote) -> None:
    path.write(path.read().replace(b'"world": 1', b'"world": 2'))


DAMAGE: dict[str, tuple[str, Callable[[Remote], None], str]] = {
    "torn marker": ("COMMIT.json", _cut, "COMMIT.json is not readable"),
    "edited marker": ("COMMIT.json", _edit, "COMMIT.json was changed after it was written"),
    "missing shard": ("__0_0.distcp", Remote.delete, "__0_0.distcp is missing"),
    "shorter shard": ("__0_0.distcp", _cut, "__0_0.distcp has "),
    "changed shard": ("__0_0.distcp", _flip, "__0_0.distcp is another object than the one"),
    "missing metadata": (".metadata", Remote.delete, ".metadata is missing"),
}


def _damaged(root: str, at: str, folder: Path, kind: str) -> tuple[list[str], str]:
    name, change, _ = DAMAGE[kind]
    with reached(at):
        engine, groups = build()
        checkpoints = saver(root, groups, folder)
        paths = []
        for step in (1, 2):
            paths.append(save(checkpoints, step, engine))
        change(paths[1] / name)
        lines = record()
        assert saved_config.newest(place(root)) == paths[0]  # which sets nothing aside
        assert saver(root, groups, folder).newest() == paths[0]
        assert saver(root, groups, folder).newest() == paths[0] and len(lines) == 1
        assert (paths[1] / "BAD").is_file()
        change(paths[0] / name)
        with pytest.raises(saved_config.NoUsableCheckpoint) as caught:
            saver(root, groups, folder).newest()
        return lines, str(caught.value)


@pytest.mark.dist
@matrix(("root", "kind"), *((MEMORY, kind) for kind in DAMAGE), (S3, "changed shard"))
def test_damage_is_found_and_set_aside(tmp_path: Path, root: str, kind: str) -> None:
    root += f"/damage/{list(DAMAGE).index(kind)}"
    ((lines, told),) = run_distributed(_damaged, 1, root, s3.endpoint(), tmp_path, kind)
    assert DAMAGE[kind][2] in lines[0] and "is not valid" in lines[0]
    assert lines[0].endswith("Marked as bad")
    assert "no checkpoint in" in told and "run.resume=never" in told


def _copies(root: str, at: str, folder: Path) -> str:
    """To another prefix, where the store's marks are others, and to a folder."""
    with reached(at):
        engine, groups = build()
        train(engine, groups, 0, 1)
        path = save(saver(root, groups, folder), 1, engine)
        copied = Remote(f"{root}_copy") / path.name
        (folder / "copy").mkdir()
        for name in path.objects():
            (copied / name).write((path / name).read())
            (folder / "copy" / name).write_bytes((path / name).read())
        for other in (saver(f"{root}_copy", groups, folder).newest(), folder / "copy"):
            assert saved_config.lacking(other) == ""
            twin, _ = build(seed=5)
            load(saver(f"{root}_copy", groups, folder), other, twin)
            assert_equal(tensors(engine), tensors(twin))
        assert saved_config.lacking(path) == ""
        (path / "metadata.json").write((path / "metadata.json").read())  # replaced, the same
        return saved_config.lacking(path)


@pytest.mark.dist
def test_copies_stay_valid(tmp_path: Path) -> None:
    (told,) = run_distributed(_copies, 1, f"{MEMORY}/copies", s3.endpoint(), tmp_path)
    assert told == "metadata.json is another object than the one that was committed"


def _changed_unseen(root: str, at: str, folder: Path) -> list[str]:
    """A store whose marks stay the same tells no change: the checksum does."""
    with reached(at), pytest.MonkeyPatch.context() as patch:
        original = object_store._entry

        def unmarked(info: dict[str, Any]) -> object_store.Entry:
            entry = original(info)
            return object_store.Entry(entry.size, "", entry.changed)

        patch.setattr(object_store, "_entry", unmarked)
        engine, groups = build()
        checkpoints = saver(root, groups, folder)
        _flip(save(checkpoints, 1, engine) / "__0_0.distcp")
        lines = record()
        with pytest.raises(saved_config.NoUsableCheckpoint):
            saver(root, groups, folder).newest()
        return lines


@pytest.mark.dist
def test_checksums_do_not_need_the_marks_of_a_store(tmp_path: Path) -> None:
    ((line,),) = run_distributed(_changed_unseen, 1, f"{MEMORY}/unmarked", s3.endpoint(), tmp_path)
    assert "as it should, but its contents changed" in line


# --- two launches ---------------------------------------------------------------------------------


def _two_savers(root: str, at: str, folder: Path) -> str:
    with reached(at):
        engine, groups = build()
        first = saver(root, groups, folder / "a")
        train(engine, groups, 0, 1)
        path = save(first, 1, engine)
        second = saver(root, groups, folder / "b")
        begin = second.start(RunConfig())
        assert begin.path == path
        load(second, path, engine)
        first._check()  # while the second may still be refused, it takes nothing
        second.started(begin)
        with pytest.raises(Taken) as caught:
            save(first, 2, engine)
        assert steps(root) == ["OWNER", "step_00000001"]
        train(engine, groups, 1, 2)
        save(second, 2, engine)
        return str(caught.value)


@pytest.mark.dist
@mostly_slow("root", [MEMORY, S3], MEMORY)
def test_the_later_launch_has_the_prefix(tmp_path: Path, root: str) -> None:
    (told,) = run_distributed(_two_savers, 1, f"{root}/two", s3.endpoint(), tmp_path)
    assert "this run has lost" in told and "has taken it over" in told and "\n" not in told


def _race(root: str, at: str, folder: Path, moment: str) -> tuple[list[str], str]:
    """The second saves the same step while the first is about to put its COMMIT.json."""
    with reached(at):
        engine, groups = build()
        train(engine, groups, 0, 1)
        first, paths, told = saver(root, groups, folder / "a"), [], ""
        with pytest.MonkeyPatch.context() as patch:
            owner: Any = remote if moment == "complete" else commit
            original = getattr(owner, moment)

            def late(*args: Any, **kw: Any) -> Any:
                patch.undo()
                paths.append(save(saver(root, groups, folder / "b"), 1, engine))
                return original(*args, **kw)

            patch.setattr(owner, moment, late)
            try:
                paths.append(save(first, 1, engine))
            except RuntimeError as error:
                told = str(error)
        assert saver(root, groups, folder).newest() == paths[0]
        return [saved_config.lacking(path) for path in paths], told


@pytest.mark.dist
@matrix(("root", "moment"), (MEMORY, "complete"), (S3, "with_checksum"))
def test_an_earlier_launch_cannot_harm_a_later_one(tmp_path: Path, root: str, moment: str) -> None:
    """Its uploads are gone when it looks; if it has looked already, its commit lacks files and is
    set aside. The later one's checkpoint of the same step is whole."""
    root += f"/race/{moment}"
    ((lacking, told),) = run_distributed(_race, 1, root, s3.endpoint(), tmp_path, moment)
    if moment == "complete":
        assert lacking == [""] and "is not there after its upload" in told
    else:
        assert lacking == ["", "__0_0.distcp is missing"] and not told


def _starts_over(root: str, at: str, folder: Path) -> list[str]:
    with reached(at):
        engine, groups = build()
        train(engine, groups, 0, 1)
        old = save(saver(root, groups, folder), 5, engine)
        again = saver(root, groups, folder)
        again.started(again.start(RunConfig(resume="never", start_over="1")))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(remote, "complete", _full)
            with pytest.raises(RuntimeError, match="no space"):
                save(again, 1, engine)
        assert (old / "OLD").is_file() and saver(root, groups, folder).newest() is None
        assert load(saver(root, groups, folder), old, engine)["step"] == 5  # by run.resume
        save(saver(root, groups, folder), 1, engine)
        return steps(root)


def _full(*args: object) -> None:
    raise OSError("no space")


@pytest.mark.dist
def test_an_earlier_run_is_set_aside_until_there_is_another_checkpoint(tmp_path: Path) -> None:
    (left,) = run_distributed(_starts_over, 1, f"{MEMORY}/over", s3.endpoint(), tmp_path)
    assert left == ["OWNER", "START", "step_00000001"]


# --- failing stores -------------------------------------------------------------------------------


def _fails(root: str, at: str, folder: Path, victim: int) -> str:
    """Two uploads of a save, then all of another."""
    with reached(at), pytest.MonkeyPatch.context() as patch:
        engine, groups = build(expert=2)
        checkpoints = saver(root, groups, folder)
        original, left = Remote.upload, 2

        def fails(self: Remote, file: Path) -> None:
            nonlocal left
            left -= 1
            if dist.get_rank() == victim and left >= 0:
                raise object_store.Refused(f"cannot write {self}: the line is down", OSError())
            original(self, file)

        patch.setattr(Remote, "upload", fails)
        save(checkpoints, 1, engine)
        dist.barrier()
        assert steps(root) == ["OWNER", "step_00000001"]
        left = 99
        with pytest.raises(RuntimeError) as caught:
            save(checkpoints, 2, engine)
        dist.barrier()
        assert steps(root) == ["OWNER", "step_00000001"]
        return str(caught.value)


@pytest.mark.dist
@mostly_slow("victim", [0, 1], 1)
def test_a_store_that_fails(tmp_path: Path, victim: int) -> None:
    """For a moment: nothing is told. For good: one line on every rank, and no debris."""
    root = f"{S3}/fails{victim}"
    first, second = run_distributed(_fails, 2, root, s3.endpoint(), tmp_path, victim)
    assert first == second and "\n" not in first
    assert "the line is down" in first and "earlier checkpoints are intact" in first


def _no_store(at: str, folder: Path) -> str:
    with reached(at):
        _, groups = build()
        with pytest.raises(saved_config.CheckpointError) as caught:
            saver("s3://no-such-bucket/x", groups, folder)
        return str(caught.value)


@pytest.mark.dist
def test_a_bucket_that_is_not_there(tmp_path: Path) -> None:
    (told,) = run_distributed(_no_store, 1, s3.endpoint(), tmp_path)
    assert told.startswith("cannot write to s3://no-such-bucket/x (run.checkpoints): cannot write")
    assert told.endswith("bucket does not exist")


def _fails_to_load(root: str, at: str, folder: Path) -> list[str]:
    """The store fails one of the ranks once the checkpoint has been verified."""
    with reached(at):
        engine, groups = build(expert=2)
        checkpoints = saver(root, groups, folder)
        path = save(checkpoints, 1, engine)
        assert checkpoints.newest() == path
        original, told = Remote.read, []
        for name in (".metadata", ".distcp"):

            def fails(
                self: Remote, start: int = 0, stop: int | None = None, name: str = name
            ) -> bytes:
                if dist.get_rank() == 1 and self.name.endswith(name):
                    raise object_store.Refused(f"cannot read {self}: the line is down", OSError())
                return original(self, start, stop)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Remote, "read", fails)
                with pytest.raises(saved_config.NoUsableCheckpoint) as caught:
                    load(checkpoints, path, engine)
            told.append(str(caught.value))
        assert (path / "COMMIT.json").is_file() and not (path / "BAD").is_file()
        return told


@pytest.mark.dist
def test_a_store_that_fails_a_load(tmp_path: Path) -> None:
    """One line on every rank, and nothing is said against the checkpoint."""
    ranks = run_distributed(_fails_to_load, 2, f"{S3}/load", s3.endpoint(), tmp_path)
    for first, second in zip(*ranks, strict=True):
        assert first == second and "\n" not in first
        assert "cannot be read: " in first and "the line is down (rank 1)" in first
