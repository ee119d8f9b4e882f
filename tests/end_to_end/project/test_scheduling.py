"""Two test processes: order of their files, and exclusive use of the machine."""

import importlib.util
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.support.scheduling import SLOW_HELPERS, in_order, is_unit, shared


def item(path: str, *markers: str, **imported: Any) -> Any:
    def closest(name: str) -> str | None:
        return name if name in markers else None

    module = ModuleType("test_module")
    vars(module).update(imported)
    return SimpleNamespace(path=Path(path), get_closest_marker=closest, module=module)


@pytest.mark.extras
def test_unit_tests_are_selected_by_rule() -> None:
    assert is_unit(item("tests/a.py", time=time, sys=sys))
    assert not is_unit(item("tests/end_to_end/a.py"))
    assert not is_unit(item("tests/a.py", subprocess=subprocess))
    assert not is_unit(item("tests/a.py", run=subprocess.run))
    for marker in ("dist", "alone", "slow", "gpu"):
        assert not is_unit(item("tests/a.py", marker))
    assert all(importlib.util.find_spec(name) for name in SLOW_HELPERS)


def test_files_with_ranks_come_first_those_for_an_idle_machine_last() -> None:
    unit, compiles, idle = item("a", "unit"), item("b"), item("c", "dist", "alone")
    mixed = [item("d", "unit"), item("d", "dist")]
    assert in_order([unit, idle, compiles, *mixed]) == [*mixed, compiles, unit, idle]


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
def test_tests_run_beside_others_but_not_beside_one_that_is_alone(
    mine: str, others: str, together: bool, tmp_path: Path
) -> None:
    root = Path(__file__).resolve().parents[3]
    with shared(tmp_path, alone=mine == "alone"):
        other = subprocess.Popen([sys.executable, "-c", OTHER, str(tmp_path), others], cwd=root)
        assert comes(tmp_path / "ready")
        assert comes(tmp_path / "inside", 60 if together else 0.5) == together
    assert comes(tmp_path / "inside")
    (tmp_path / "leave").touch()
    assert other.wait(60) == 0
