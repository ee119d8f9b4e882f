"""Runs that the command line names: folders of runs, and folders of them."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from phalanx.extras.watching.run import Run

NAME = "metrics.jsonl"
_OF_A_RUN = ("config.yaml", "launches", "console.log", "checkpoints")
_DEPTH = 3  # folders below one of runs, as run.name may have folders in it


class Runs:
    """Runs by name. Raises ValueError for a path that cannot be meant.

    A path that does not exist yet is waited for: what is there decides whether it is that of a run
    or of several.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        for path in paths:
            if path.is_file() and path.suffix != ".jsonl":
                raise ValueError(f"{path} is no {NAME}: give that of a run, or a folder of runs")
            if not path.exists() and not (path.parent.exists() or path.parent.parent.exists()):
                raise ValueError(f"{path}: there is no such folder; give that of a run, or of runs")
        self._paths = paths
        self._lock, self._opened = threading.Lock(), dict[Path, Run]()

    def listed(self) -> list[dict[str, Any]]:
        """The named runs, then the newest: `name`, `time` of its last record, whether `chosen`.

        A page begins with the named ones, or else with the newest.
        """
        single = self._single()
        return [
            {"name": name, "time": _time(path), "chosen": path in single or not (single or i)}
            for i, (name, path) in enumerate(self._found().items())
        ]

    def missing(self) -> list[Path]:
        """Named paths that do not exist yet."""
        return [path for path in self._paths if not path.exists()]

    def get(self, name: str) -> Run:
        """Raises KeyError for a name that is not listed."""
        path = self._found()[name]
        with self._lock:
            return self._opened.setdefault(path, Run(path))

    def _folders(self) -> list[Path]:
        return [path for path in self._paths if path.is_dir() and not _is_run(path)]

    def _single(self) -> list[Path]:
        folders = self._folders()
        single = [path for path in self._paths if path not in folders]
        return [path if path.suffix == ".jsonl" else path / NAME for path in single]

    def _found(self) -> dict[str, Path]:
        single, folders = self._single(), self._folders()
        newest = sorted(
            (path for folder in folders for path in _below(folder, _DEPTH)),
            key=lambda path: -(_time(path) or 0),
        )
        found: dict[str, Path] = {}
        for path in dict.fromkeys([*single, *newest]):
            name = _name(path, single, folders)
            while name in found:
                name += "'"
            found[name] = path
        return found


def _name(path: Path, single: list[Path], folders: list[Path]) -> str:
    """Name in the folder of runs; else that of its folder, with as many above it as tell."""
    for folder in folders:
        if path.is_relative_to(folder):
            return path.parent.relative_to(folder).as_posix()
    parts = path.resolve().parent.parts
    others = [other.resolve().parent.parts for other in single if other != path]
    for count in range(1, len(parts)):
        if all(other[-count:] != parts[-count:] for other in others):
            return "/".join(parts[-count:])
    return path.as_posix()


def _is_run(path: Path) -> bool:
    return any((path / name).exists() for name in (NAME, *_OF_A_RUN))


def _below(folder: Path, depth: int) -> Iterator[Path]:
    """The metrics.jsonl of each run in a folder of runs."""
    try:
        children = [path for path in folder.iterdir() if path.is_dir()]
    except OSError:
        return  # removed, or not for this user
    for child in children:
        if _is_run(child):
            yield child / NAME
        elif depth > 1:
            yield from _below(child, depth - 1)


def _time(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
