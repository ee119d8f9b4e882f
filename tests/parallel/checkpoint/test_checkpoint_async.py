"""Background saves: of their step, the same as others, reported when they fail, never orphaned."""

import os
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from phalanx.parallel.checkpoint import writer
from tests.parallel.checkpoint.checkpoints import (
    assert_equal,
    build,
    checkpointer,
    load,
    save,
    stored,
    tensors,
    train,
)
from tests.support.distributed import RankFailed, run_distributed

PIECES = [b"ab", b"", b"c" * 100, bytearray(b"def"), memoryview(b"g" * 50), b"h"]
WHOLE = b"".join(bytes(piece) for piece in PIECES)


def _background(folder: Path) -> list[tuple[str, ...]]:
    engine, groups = build()
    checkpoints = checkpointer(folder, groups, async_save=True)
    seen = []
    train(engine, groups, 0, 1)
    save(checkpoints, 1, engine)
    seen.append(tuple(path.name for path in folder.iterdir()))
    before = tensors(engine)
    train(engine, groups, 1, 2)  # the save must not see this step
    deadline = time.monotonic() + 30
    while not (folder / "step_00000001").exists() and time.monotonic() < deadline:
        checkpoints.poll()
    seen.append(tuple(path.name for path in folder.iterdir()))
    load(checkpoints, folder / "step_00000001", engine)
    assert_equal(before, tensors(engine))
    return seen


@pytest.mark.dist
def test_background_save_is_of_its_step_and_committed_by_poll(tmp_path: Path) -> None:
    seen = run_distributed(_background, 2, tmp_path)[0]
    assert seen == [("step_00000001.tmp",), ("step_00000001",)]


def _both_ways(folder: Path) -> None:
    engine, groups = build(expert=2)
    ways = {
        way: checkpointer(folder / way, groups, async_save=way == "on") for way in ("on", "off")
    }
    for step in (1, 2):
        train(engine, groups, step - 1, step)
        for checkpoints in ways.values():
            save(checkpoints, step, engine)
    ways["on"].close()


@pytest.mark.dist
def test_the_same_bytes_as_a_save_that_training_waits_for(tmp_path: Path) -> None:
    run_distributed(_both_ways, 2, tmp_path)
    for step in (1, 2):
        on, off = (tmp_path / way / f"step_{step:08d}" for way in ("on", "off"))
        shards = sorted(path.name for path in on.glob("*.distcp"))
        assert shards == sorted(path.name for path in off.glob("*.distcp")) and len(shards) == 2
        for name in shards:
            assert (on / name).read_bytes() == (off / name).read_bytes()
        assert_equal(stored(on), stored(off))


# --- what may go wrong ----------------------------------------------------------------------------


def _at_call(number: int, act: Callable[[], object], original: Callable[..., Any]) -> Any:
    calls = []

    def counted(*args: Any, **kw: Any) -> Any:
        calls.append(args)
        if len(calls) == number:
            act()
        return original(*args, **kw)

    return counted


def _writer_killed(folder: Path, name: str, call: int, found_by: str) -> str:
    from phalanx.parallel.checkpoint import writer

    engine, groups = build()
    checkpoints = checkpointer(folder, groups, async_save=True)
    save(checkpoints, 1, engine)
    checkpoints.close()
    train(engine, groups, 1, 2)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == dist.get_world_size() - 1:
            original = getattr(writer, name)
            patch.setattr(writer, name, _at_call(call, lambda: os._exit(9), original))
        save(checkpoints, 2, engine)
    train(engine, groups, 2, 3)
    with pytest.raises(RuntimeError) as caught:
        if found_by == "next save":
            save(checkpoints, 3, engine)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            checkpoints.poll()
    dist.barrier()
    left = [path.name for path in folder.iterdir()]
    assert left == ["step_00000001"], left
    dist.barrier()
    save(checkpoints, 3, engine)
    checkpoints.close()
    assert checkpoints.newest() == folder / "step_00000003"
    return str(caught.value)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "call", "found_by"), [("_write", 1, "poll"), ("_write_item", 5, "next save")]
)
def test_a_killed_writer_is_reported_and_the_next_save_is_sound(
    tmp_path: Path, name: str, call: int, found_by: str
) -> None:
    first, second = run_distributed(_writer_killed, 2, tmp_path, name, call, found_by)
    assert first == second and "\n" not in first
    assert "step 2" in first and "writer was killed (rank 1)" in first and str(tmp_path) in first


def _process_killed(folder: Path, note: Path) -> None:
    from phalanx.parallel.checkpoint import writer

    def hang() -> None:
        note.with_suffix(".part").write_text(str(os.getpid()))
        note.with_suffix(".part").rename(note)
        time.sleep(100)

    engine, groups = build()
    checkpoints = checkpointer(folder, groups, async_save=True)
    train(engine, groups, 0, 1)
    save(checkpoints, 1, engine)
    checkpoints.close()
    writer._write_item = _at_call(5, hang, writer._write_item)
    save(checkpoints, 2, engine)
    while not note.exists():
        time.sleep(0.01)
    os._exit(9)


@pytest.mark.dist
def test_a_writer_ends_with_the_process_that_wants_it(tmp_path: Path) -> None:
    """Else it could still write into the folder while the restarted run saves the same step."""
    folder, note = tmp_path / "checkpoints", tmp_path / "writer"
    with pytest.raises(RankFailed, match="exit code 9"):
        run_distributed(_process_killed, 1, folder, note)
    deadline = time.monotonic() + 10
    while psutil.pid_exists(int(note.read_text())) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not psutil.pid_exists(int(note.read_text()))
    assert sorted(path.name for path in folder.iterdir()) == ["step_00000001", "step_00000002.tmp"]
    run_distributed(_goes_on, 1, folder)


def _goes_on(folder: Path) -> None:
    engine, groups = build(seed=3)
    checkpoints = checkpointer(folder, groups, async_save=True)
    path = checkpoints.newest()
    assert path == folder / "step_00000001"
    load(checkpoints, path, engine)
    save(checkpoints, 2, engine)
    checkpoints.close()
    assert checkpoints.newest() == folder / "step_00000002"


def _no_memory(folder: Path) -> str:
    from phalanx.parallel.checkpoint.writer import Staging

    def fail(*args: Any) -> Any:
        raise OSError("Cannot allocate memory")

    engine, groups = build()
    checkpoints = checkpointer(folder, groups, async_save=True)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError) as caught:
        if dist.get_rank() == 1:
            patch.setattr(Staging, "hold", fail)
        save(checkpoints, 1, engine)
    save(checkpoints, 1, engine)
    checkpoints.close()
    assert checkpoints.newest() == folder / "step_00000001"
    return str(caught.value)


@pytest.mark.dist
def test_no_memory_for_the_copy(tmp_path: Path) -> None:
    first, second = run_distributed(_no_memory, 2, tmp_path)
    assert first == second and "\n" not in first
    assert "Cannot allocate memory (rank 1)" in first and "run.async_save=off" in first


# --- the copy -------------------------------------------------------------------------------------


def test_copies_are_exact_and_of_their_own_size() -> None:
    from phalanx.parallel.checkpoint.writer import Staging

    staging, base = Staging(), torch.arange(24.0)
    given = [
        base.view(4, 6).T,
        base[3:5],
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.empty(0, 3),
        torch.tensor([True, False, True]),
        torch.tensor([2**40], dtype=torch.int64),
        torch.randn(100, dtype=torch.float64).to(torch.float8_e4m3fn),
    ]
    copies = staging.hold(given)
    for tensor, copy in zip(given, copies, strict=True):
        assert copy.dtype == tensor.dtype and copy.shape == tensor.shape and copy.is_contiguous()
        assert copy.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        assert torch.equal(copy.float(), tensor.float())
    base.zero_()
    assert copies[1].tolist() == [3.0, 4.0]


def test_memory_is_kept_and_grows() -> None:
    from phalanx.parallel.checkpoint.writer import Staging

    staging = Staging()
    (first,) = staging.hold([torch.zeros(1000)])
    (again,) = staging.hold([torch.ones(500)])
    assert first.data_ptr() == again.data_ptr() and first[:500].eq(1).all()
    (large,) = staging.hold([torch.full((5000,), 2.0)])
    assert large.eq(2).all() and first[:500].eq(1).all()  # what is in use is not unmapped


def test_forks_see_what_was_copied_and_nothing_later() -> None:
    from phalanx.parallel.checkpoint.writer import Staging

    source = torch.full((100_000,), 7.0)
    (copy,) = Staging().hold([source])
    child = os.fork()
    if not child:
        time.sleep(0.1)
        os._exit(0 if bool(copy.eq(7).all()) else 1)
    source.zero_()
    assert os.waitpid(child, 0)[1] == 0


def _written(path: Path) -> tuple[bytes, tuple[int, int]]:
    with writer._File(str(path)) as file:
        for piece in PIECES:
            file.write(piece)
    return path.read_bytes(), file.sums


def test_the_disk_begins_block_by_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes what there is of a file before the file is complete."""
    begun: list[tuple[int, int]] = []

    def begin(number: int, start: int, length: int, flags: int) -> int:
        assert length == 0 and flags == writer._SYNC_FILE_RANGE_WRITE
        begun.append((start, (tmp_path / "file").stat().st_size))
        return 0

    monkeypatch.setattr(writer, "_BLOCK", 50)
    monkeypatch.setattr(writer, "_sync_file_range", begin)
    assert _written(tmp_path / "file") == (WHOLE, (len(WHOLE), zlib.crc32(WHOLE)))
    # Each block is in the kernel's hands by then, and starts where the one before ended.
    assert begun == [(0, 102), (102, 155)]


@pytest.mark.parametrize("function", [None, lambda *_: -1], ids=["absent", "refused"])
def test_a_file_system_that_does_not_offer_it(
    function: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_BLOCK", 1)
    monkeypatch.setattr(writer, "_sync_file_range", function)
    assert _written(tmp_path / "file") == (WHOLE, (len(WHOLE), zlib.crc32(WHOLE)))


@pytest.mark.parametrize("size", [0, 1, 4096, 100_003])
@pytest.mark.parametrize("threads", [1, 3])
def test_all_pages_are_touched(size: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer.os, "sched_getaffinity", lambda _: set(range(threads)))
    memory = torch.ones(size + 2, dtype=torch.uint8)
    writer._touch(memory.data_ptr() + 1, size)
    assert memory.tolist() == [1, *[0] * size, 1]
