"""Walls between the core and what is optional, and the size of the core."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.imports import (
    ROOT,
    circles,
    closure,
    file_of,
    lines,
    mutual,
    reached,
    sources,
)
from tests.support.runs import SMALL

ROOMS = ("extras", "scripts/lab", "moe/hf", "kernels/adapters")
"""Folders that no file of the core imports."""
MOST_LINES, MOST_FILES = 41_960, 322
"""Size of what train.py can import without these, comments aside; these numbers may only shrink."""
MOST_PAIRS = 1
"""Pairs of folders that import each other; may only shrink."""


def of_rooms(file: str) -> bool:
    return file.startswith(tuple(f"{room}/" for room in ROOMS))


def test_only_tables_name_what_is_optional() -> None:
    _, crossing = closure("train.py", ROOMS)
    assert {file for file, _ in crossing if not file.startswith("configs/tables/")} == set()
    assert {other.split("/")[1] for _, other in crossing} >= {"muon", "overlap", "replication"}


def test_no_file_of_the_core_imports_an_extra_or_the_laboratory() -> None:
    """Programs among them too: scripts convert and adapt, and do neither."""
    walls = ("extras/", "scripts/lab/")
    core = [file for file in sources().values() if not of_rooms(file)]
    tables = [file for file in core if file.startswith("configs/tables/")]
    found = {file: [f for f in reached(file) if f.startswith(walls)] for file in core}
    assert [file for file, others in found.items() if others and file not in tables] == []


def test_every_room_is_a_folder_and_every_extra_has_its_page() -> None:
    extras = {file.split("/")[1] for file in sources().values() if file.startswith("extras/")}
    assert extras == {
        *("baseline", "between_nodes", "blackwell", "chat", "clusters", "context"),
        *("help", "host_states", "jax", "linear_attention", "microscaling", "muon", "overlap"),
        *("phases", "planner", "recorded_routing", "replication", "serving", "sharded_params"),
        *("sparse_attention", "tasks", "trackers", "transfer", "variants", "watching"),
    }


def test_the_core_does_not_grow() -> None:
    files, _ = closure("train.py", ROOMS)
    assert file_of("phalanx.moe.layer") in files
    assert len(files) <= MOST_FILES
    assert lines(files) <= MOST_LINES


def test_folders_do_not_import_each_other() -> None:
    assert len(mutual()) <= MOST_PAIRS, mutual()


def test_files_do_not_import_each_other() -> None:
    assert circles() == []


@pytest.mark.dist
def test_a_run_trains_resumes_and_validates_without_the_extras(tmp_path: Path) -> None:
    """With an import hook that refuses them (tests/support/walls), as an import shows."""
    walls = ROOT / "tests/support/walls"
    env = os.environ | {"PYTHONPATH": f"{walls}{os.pathsep}{ROOT}"}
    given = ["run.eval_interval=2", "run.eval_batches=1", "run.save_interval=1"]
    for steps in (2, 3):
        command = [*SMALL, *given, f"run.steps={steps}", f"run.dir={tmp_path}"]
        ended = subprocess.run(
            [sys.executable, ROOT / "train.py", *command], env=env, capture_output=True, text=True
        )
        assert ended.returncode == 0, ended.stderr
    assert "resumed from step 2" in ended.stdout
    used = "import phalanx.moe.run.entry, phalanx.extras.muon"
    refused = subprocess.run([sys.executable, "-c", used], env=env, capture_output=True, text=True)
    assert refused.returncode != 0 and "the core imports phalanx.extras" in refused.stderr
