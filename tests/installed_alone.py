"""A folder with a package and what it requires, for programs that find no other one.

An interpreter that is started as `python -I -S` looks for packages only where it is told to.
"""

import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]


def link_into(folder: Path, *requirements: str) -> None:
    """Link the files of packages, and of all that they require on this machine, into a new folder.

    Args:
        folder: to be made.
        requirements: as pip knows them.

    Raises:
        PackageNotFoundError: one of them is not installed.
    """
    folder.mkdir()
    seen: set[str] = set()
    needs = [need for one in requirements for need in _needs(Requirement(one), seen)]
    for name in {need.name for need in needs}:
        installed = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in installed.files or ()} - {"..", "__pycache__"}:
            if not (folder / top).is_symlink():  # several packages share `nvidia`
                (folder / top).symlink_to(Path(str(installed.locate_file(top))))


def command(program: Path, folder: Path, *words: str) -> list[str]:
    """Command line of a program that finds phalanx and the packages of a folder."""
    lines = f"import runpy, sys; sys.path += {[str(folder), str(ROOT)]}; del sys.argv[0]"
    run = f"{lines}; runpy.run_path(sys.argv[0], run_name='__main__')"
    return [sys.executable, "-I", "-S", "-c", run, str(program), *words]


def _needs(requirement: Requirement, seen: set[str]) -> Iterator[Requirement]:
    if str(requirement) in seen:
        return
    seen.add(str(requirement))
    yield requirement
    for line in importlib.metadata.requires(requirement.name) or ():
        need = Requirement(line)
        extras = requirement.extras or {""}
        if need.marker is None or any(need.marker.evaluate({"extra": e}) for e in extras):
            yield from _needs(need, seen)
