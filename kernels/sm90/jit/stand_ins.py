"""Names of CuTe DSL without CuTe DSL: the sources of kernels are imported, but nothing is compiled.

The host side of a kernel is in the same file as its device code, whose decorators, annotations and
constants name the compiler's types. Where compiled kernels are installed (`jit.libraries`) and the
compiler is not, or is another version than theirs, `import_kernels` imports all of these files with
placeholders for those names.
"""

import contextlib
import functools
import importlib
import pkgutil
import sys
from collections.abc import Iterator
from importlib.abc import Loader
from importlib.metadata import PackageNotFoundError, version
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

from phalanx.kernels import compiled_libraries as libraries
from phalanx.kernels.availability import CUTLASS_DSL


def compiler_fits() -> bool:
    """True if CuTe DSL is installed, in the version of the sources."""
    package, _, wanted = CUTLASS_DSL.partition("==")
    try:
        return version(package.partition("[")[0]) == wanted
    except PackageNotFoundError:
        return False


@functools.cache
def import_kernels() -> None:
    """Import all kernels of this package with placeholders, where they are needed; once."""
    if compiler_fits() or not libraries.installed():
        return
    package = importlib.import_module("phalanx.kernels.sm90")
    with _placeholders():
        for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if not found.name.endswith("_triton"):
                importlib.import_module(found.name)


class _Placeholder(type):
    """Class of placeholders: types, decorators and functions of any name."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        made = _Placeholder(name, (), {})
        setattr(cls, name, made)
        return made

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and not kwargs and callable(args[0]) else cls

    def __getitem__(cls, key: Any) -> Any:
        return cls

    def __mro_entries__(cls, bases: Any) -> tuple[type, ...]:
        return (object,)


class _Names(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        made = _Placeholder(name, (), {})
        setattr(self, name, made)
        return made


class _Finder(Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return spec_from_loader(name, self) if _is_compiler(name) else None

    def create_module(self, spec: Any) -> ModuleType:
        return _Names(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def _is_compiler(name: str) -> bool:
    return name.partition(".")[0] == "cutlass"


@contextlib.contextmanager
def _placeholders() -> Iterator[None]:
    """Inside, `cutlass` and its modules are placeholders, also if they are imported already."""

    def take() -> dict[str, ModuleType]:
        return {name: sys.modules.pop(name) for name in [*sys.modules] if _is_compiler(name)}

    real, finder = take(), _Finder()
    sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
    try:
        yield
    finally:
        sys.meta_path.remove(finder)  # type: ignore[arg-type]
        take()
        sys.modules |= real
