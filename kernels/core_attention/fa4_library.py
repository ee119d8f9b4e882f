"""flash-attn-4 with its compiled kernels in the cache of `kernels.cache`.

The library has four dictionaries of compiled kernels, one for each kernel of an attention layer, by
keys of all choices that are compiled in. `Programs` replaces them: a key is looked up in this
process, then on disk, and of several processes that miss an entry one compiles it. The library's
own cache on disk would let all of them compile, and fails when a lock is held for 15 seconds or its
folder cannot be written.
"""

import contextlib
import functools
import warnings
from collections.abc import Iterator
from typing import Any

from phalanx.kernels.cache import Cache, folder
from phalanx.kernels.library_objects import entry_name, exported, loaded, replaced

_KERNELS = {
    "_flash_attn_fwd": "AttentionForward",
    "_bwd_preprocess": "AttentionBackwardStart",
    "_flash_attn_bwd": "AttentionBackward",
    "_bwd_postprocess_convert": "AttentionBackwardEnd",
}
"""Functions of the library that compile one kernel each, and the labels of their entries."""


@functools.cache
def library() -> Any:
    """The module `flash_attn.cute.interface`, with its kernels cached by this module."""
    from flash_attn.cute import interface

    for function, label in _KERNELS.items():
        getattr(interface, function).compile_cache = Programs(label)
    return interface


class Programs(dict[Any, Any]):
    """Compiled functions by the library's keys, which it looks up by `in` and `[]`."""

    def __init__(self, label: str) -> None:
        super().__init__()
        self._label = label
        self._claims: dict[Any, contextlib.ExitStack] = {}

    def __contains__(self, key: Any) -> bool:
        """True if it is cached, which then stays so; otherwise the caller compiles it."""
        if super().__contains__(key):
            return True
        with contextlib.ExitStack() as claim:
            data = claim.enter_context(Cache(folder()).claimed(entry_name(self._label, key)))
            if data is not None:
                super().__setitem__(key, loaded(data))
                return True
            claim.enter_context(_without_warnings())
            self._claims[key] = claim.pop_all()
        return False

    def __setitem__(self, key: Any, function: Any) -> None:
        with self._claims.pop(key):
            Cache(folder()).write(entry_name(self._label, key), exported(function))
        super().__setitem__(key, function)

    def release(self, error: BaseException) -> None:
        while self._claims:
            _, claim = self._claims.popitem()
            claim.__exit__(type(error), error, error.__traceback__)


class _Names(dict[Any, Any]):
    """Pretends that each kernel is cached, and records the name of its entry."""

    def __init__(self, label: str, names: set[str]) -> None:
        super().__init__()
        self._label, self._names = label, names

    def __contains__(self, key: Any) -> bool:
        self._names.add(entry_name(self._label, key))
        return True

    def release(self, error: BaseException) -> None:
        """Nothing is claimed."""


@contextlib.contextmanager
def named() -> Iterator[set[str]]:
    """Inside a `FakeTensorMode`, collect names of entries that are looked up; compiles nothing."""
    names: set[str] = set()
    with contextlib.ExitStack() as stack:
        for function, label in _KERNELS.items():
            cache = _Names(label, names)
            stack.enter_context(replaced(getattr(library(), function), "compile_cache", cache))
        yield names


@contextlib.contextmanager
def calling() -> Iterator[Any]:
    """Inside, the library; an error releases the kernels that this process was compiling."""
    interface = library()
    try:
        yield interface
    except BaseException as error:
        for function in _KERNELS:
            getattr(interface, function).compile_cache.release(error)
        raise


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Argument aux_data .* cannot be converted")
        yield
