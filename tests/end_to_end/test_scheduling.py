"""Two test processes: order of their files, and exclusive use of the machine."""

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.scheduling import in_order, shared


def item(path: str, *markers: str) -> Any:
    def closest(name: str) -> str | None:
        return name if name in markers else None

    return SimpleNamespace(path=path, get_closest_marker=closest)


def test_files_with_ranks_come_first_and_stay_whole() -> None:
    plain, idle = item("a"), item("b", "dist", "alone")
    mixed = [item("c"), item("c", "dist")]
    assert in_order([plain, idle, *mixed]) == [*mixed, idle, plain]


OTHER = """
import sys, time
from pathlib import Path
from tests.support.scheduling import shared
folder = Path(sys.argv[1])
(folder / "ready").touch()
with shared(folder, alone=sys.argv[2] == "alone"):
    (folder / "inside").touch()
    while not (folder / "leave").exists():
        time.sleep(0.01)
"""


def comes(path: Path, timeout: float = 60) -> bool:
    until = time.monotonic() + timeout
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.01)
    return path.exists()


@pytest.mark.parametrize(
    ("mine", "others", "together"),
    [("beside", "beside", True), ("beside", "alone", False), ("alone", "beside", False)],
)
def test_ranks_run_beside_ranks_but_not_beside_one_who_is_alone(
    mine: str, others: str, together: bool, tmp_path: Path
) -> None:
    root = Path(__file__).resolve().parents[2]
    with shared(tmp_path, alone=mine == "alone"):
        other = subprocess.Popen([sys.executable, "-c", OTHER, str(tmp_path), others], cwd=root)
        assert comes(tmp_path / "ready")
        assert comes(tmp_path / "inside", 60 if together else 0.5) == together
    assert comes(tmp_path / "inside")
    (tmp_path / "leave").touch()
    assert other.wait(60) == 0
