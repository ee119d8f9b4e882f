"""Phalanx: mixture-of-experts pretraining on Megatron-Core. All imports begin with this package.

Its folders are links to those of the repository, so that a checkout, a wheel and an editable
installation have the same names, and `kernels`, which is also a package of Hugging Face, stays
theirs: without an `__init__.py` the folders beside this one never come before an installed package.
"""

import itertools as _itertools
import os as _os
import sys as _sys
from pathlib import Path as _Path
from typing import TYPE_CHECKING as _TYPE_CHECKING

if _TYPE_CHECKING:
    from phalanx.kernels.api import GroupedMLP as GroupedMLP
    from phalanx.kernels.api import MoE as MoE
    from phalanx.kernels.api import experts as experts
    from phalanx.kernels.api import grouped_experts as grouped_experts
    from phalanx.kernels.api import linear_cross_entropy as linear_cross_entropy
    from phalanx.kernels.api import router_topk as router_topk

__version__ = "0.2.0"
_OF_THE_KERNELS = "GroupedMLP MoE experts grouped_experts linear_cross_entropy router_topk".split()


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


def __getattr__(name: str) -> object:
    """Names of `phalanx.kernels.api` at their first use: `import phalanx` alone needs no torch."""
    if name not in _OF_THE_KERNELS:
        raise AttributeError(f"module 'phalanx' has no attribute {name!r}")
    from phalanx.kernels import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_OF_THE_KERNELS})


def _is_checkout(folder: _Path) -> bool:
    return (folder / "pyproject.toml").is_file() and (folder / "phalanx/__init__.py").is_file()


def _current_folder() -> _Path | None:
    try:
        return _Path.cwd()
    except FileNotFoundError:  # it was removed
        return None


if _problem := _import_problem(_Path(__file__).resolve().parent, _current_folder()):
    raise ImportError(_problem)
