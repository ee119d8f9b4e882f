"""Refusal to import what the core must do without: the extras and the laboratory.

`scripts/test.sh` puts this folder on PYTHONPATH for the tests of the core, so that Python imports
this module when it starts, in every process of a test.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

REFUSED = ("phalanx.extras", "phalanx.scripts.lab")


class Wall(MetaPathFinder):
    """Finder that refuses some packages, before any other looks for them."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raise ImportError for a module of a refused package.

        Not ModuleNotFoundError, which callers take for a package that is not installed.
        """
        if name in REFUSED or name.startswith(tuple(f"{package}." for package in REFUSED)):
            raise ImportError(f"the core imports {name}, which it must do without")
        return None


sys.meta_path.insert(0, Wall())
