"""The import name: one line where a checkout has no links, or where another one would be used."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import phalanx

ROOT = Path(__file__).resolve().parents[1]
INSTALLED = "import sys; sys.path.append(sys.argv[1]); import phalanx; print(phalanx.__file__)"
"""Import of an editable installation, whose folder comes after the standard library."""


@pytest.fixture
def checkouts(tmp_path: Path) -> tuple[Path, Path]:
    """Two checkouts with nothing but the package."""
    for name in ("one", "two"):
        package = tmp_path / name / "phalanx"
        package.mkdir(parents=True)
        shutil.copy(ROOT / "phalanx/__init__.py", package)
        shutil.copy(ROOT / "pyproject.toml", tmp_path / name)
        (package / "moe").symlink_to("../moe")
    return tmp_path / "one", tmp_path / "two"


def imported(installed: Path, folder: Path, pythonpath: Path | None = None) -> str:
    """File that is imported in a folder, or the last line of the error."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    if pythonpath:
        environment["PYTHONPATH"] = str(pythonpath)
    # -P: as a console command, which does not look into the current folder.
    command = [sys.executable, "-P", "-c", INSTALLED, str(installed)]
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return (run.stderr or run.stdout).strip().splitlines()[-1]


def test_an_installed_checkout_does_not_hide_the_one_of_this_folder(
    checkouts: tuple[Path, Path],
) -> None:
    one, two = checkouts
    for folder in (two, two / "phalanx"):
        line = imported(one, folder)
        assert line.startswith(f"ImportError: phalanx would be imported from {one}, ")
        assert f"PYTHONPATH={two}" in line and f"pip install -e {two}" in line


def test_a_checkout_that_is_chosen_or_alone_is_imported(checkouts: tuple[Path, Path]) -> None:
    one, two = checkouts
    first, second = (str(root / "phalanx/__init__.py") for root in checkouts)
    assert imported(one, one) == imported(one, one / "phalanx") == first
    assert imported(one, one.parent) == first
    assert imported(one, two, pythonpath=two) == second
    assert imported(one, two, pythonpath=one) == first
    (one / "pyproject.toml").unlink()  # a wheel
    assert imported(one, two) == first


def test_links_that_are_files_are_named(checkouts: tuple[Path, Path]) -> None:
    link = checkouts[0] / "phalanx/moe"
    link.unlink()
    link.write_text("../moe")
    line = imported(checkouts[0], checkouts[0])
    assert line.startswith(f"ImportError: {link} should be a symbolic link: ")


def test_a_folder_that_was_removed_is_no_obstacle() -> None:
    assert phalanx._import_problem(ROOT / "phalanx", None) is None


@pytest.mark.parametrize("name", ["configs", "extras", "kernels", "moe", "parallel", "scripts"])
def test_short_names_are_refused_by_ruff(name: str) -> None:
    """A second copy of a module would have tables and classes of its own."""
    code = f"from {name}.registry import resolve\n\nresolve()\n"
    command = [
        Path(sys.executable).parent / "ruff",
        "check",
        "--select=TID251,I",
        "--output-format=concise",
    ]
    run = subprocess.run(
        [*command, "--stdin-filename", ROOT / "train.py", "-"],
        input=code,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1 and f"phalanx.{name}" in run.stdout, run.stdout + run.stderr
    long = code.replace(f"from {name}", f"from phalanx.{name}")
    command = [*command, "--stdin-filename", ROOT / "train.py", "-"]
    assert subprocess.run(command, input=long, cwd=ROOT, text=True).returncode == 0


def test_names_of_the_kernels_come_at_their_first_use() -> None:
    code = """
import sys
import phalanx
names = set(phalanx._OF_THE_KERNELS)
assert names <= set(dir(phalanx)) and "torch" not in sys.modules
from phalanx import GroupedMLP, grouped_experts
from phalanx.kernels import api
assert GroupedMLP is api.GroupedMLP and names <= set(api.__all__)
print([getattr(phalanx, name) is getattr(api, name) for name in names].count(True), len(names))
phalanx.grouped_expert
"""
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    named, of = run.stdout.split()
    assert named == of
    assert (
        "module 'phalanx' has no attribute 'grouped_expert'. Did you mean: 'grouped_experts'"
        in (run.stderr)
    )
