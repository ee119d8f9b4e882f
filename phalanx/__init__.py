"""Phalanx: mixture-of-experts pretraining on Megatron-Core. All imports begin with this package.

Its folders are links to those of the repository, so that a checkout, a wheel and an editable
installation have the same names, and `kernels`, which is also a package of Hugging Face, stays
theirs: without an `__init__.py` the folders beside this one never come before an installed package.
"""

import itertools as _itertools
import os as _os
import sys as _sys
from pathlib import Path as _Path

__version__ = "0.2.0"


def _import_problem(package: _Path, folder: _Path | None) -> str | None:
    """Reason why importing from `package` while in `folder` would fail or surprise, or None."""
    if (package / "moe").is_file():  # a link that was written as a file with its target in it
        return (
            f"{package / 'moe'} should be a symbolic link: clone with `git -c core.symlinks=true "
            "clone`, or unpack an archive with a program that keeps links"
        )
    root = package.parent
    if folder is None or not _is_checkout(root):
        return None
    other = next((f for f in (folder, *folder.parents) if _is_checkout(f)), root)
    # Entries before the standard library are the script's folder, PYTHONPATH and what a program
    # inserts: a choice that somebody made. An editable installation comes after it.
    library = _os.path.dirname(_os.__file__)
    chosen = _itertools.takewhile(lambda entry: entry != library, _sys.path)
    if other == root or any(_Path(entry or folder).resolve() == root for entry in chosen):
        return None
    return (
        f"phalanx would be imported from {root}, where it is installed, but this folder belongs to "
        f"the checkout {other}: `pip install -e {other}`, or set PYTHONPATH={other}, or {root} to "
        "keep that one"
    )


def _is_checkout(folder: _Path) -> bool:
    return (folder / "pyproject.toml").is_file() and (folder / "phalanx/__init__.py").is_file()


def _current_folder() -> _Path | None:
    try:
        return _Path.cwd()
    except FileNotFoundError:  # it was removed
        return None


if _problem := _import_problem(_Path(__file__).resolve().parent, _current_folder()):
    raise ImportError(_problem)
