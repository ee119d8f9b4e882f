"""Room for checkpoints: what is free, what saves will delete, how many there will be."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx.parallel import disk_space
from phalanx.parallel.disk_space import Room

KIB = 1024


def folder(root: Path, name: str, size: int) -> None:
    (root / name).mkdir(parents=True)
    (root / name / "__0_0.distcp").write_bytes(bytes(size))


@pytest.mark.parametrize(
    ("first", "last", "interval", "number"),
    [
        *((0, 100, 0, 1), (0, 100, 30, 4), (0, 90, 30, 3), (60, 100, 30, 2), (90, 100, 30, 1)),
        *((100, 100, 30, 0), (120, 100, 30, 0), (0, 100, -1, 0), (31, 59, 30, 1)),
    ],
)
def test_checkpoints_are_counted_with_the_last_step(
    first: int, last: int, interval: int, number: int
) -> None:
    saved = [s for s in range(first + 1, last + 1) if s == last or (interval and s % interval == 0)]
    assert disk_space.saves(first, last, interval) == number
    assert number == (len(saved) if interval >= 0 else 0)


def test_what_saves_delete_is_room_to_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "run/checkpoints"
    disk = SimpleNamespace(total=1 << 40, free=100 * KIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)
    assert disk_space.room(root, 0) == Room(100 * KIB, 0)
    for name, size in {"step_00000010": 1, "step_00000020": 2, "step_00000005.old": 4}.items():
        folder(root, name, size * KIB)
    folder(root, "step_00000030.tmp", 8 * KIB)  # deleted before the first save
    folder(root, "step_00000007.bad", 16 * KIB)  # stays
    assert disk_space.room(root, 0) == Room(108 * KIB, 7 * KIB)
    assert disk_space.room(root, 20) == Room(108 * KIB, 5 * KIB)  # step 20 is kept for good
    disk.total = 0  # a file system that does not tell
    assert disk_space.room(root, 0) is None


def test_the_disk_is_that_on_which_the_folder_will_be(tmp_path: Path) -> None:
    free = disk_space.free_bytes(tmp_path / "not/there/yet")
    assert free == pytest.approx(shutil.disk_usage(tmp_path).free, abs=1 << 30)
