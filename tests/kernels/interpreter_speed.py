"""A several times faster Triton interpreter, without repeated work for every operation.

For a process that only interprets (`tests.kernels.interpreter`). Results do not change; patches
stay in place instead of being undone and redone, and types are created once.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any


def hasten() -> None:
    """Install the patches; called once after `triton` was imported in interpreter mode."""
    from triton.runtime import interpreter

    _patch_once(interpreter)
    _name_types_once(interpreter)
    _make_shapes_once()
    # Every integer operation is done again in 64 bits for an assertion that only `debug` makes.
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def _patch_once(interpreter: Any) -> None:
    """Patch the language's functions at a module's first call, permanently.

    Triton patches it at every call of a function, even of one kernel's helper.
    """
    patch, seen = interpreter._patch_lang, set()

    def patched(fn: Any) -> Any:
        if fn.__module__ not in seen:
            patch(fn)
            seen.add(fn.__module__)
        return interpreter._LangPatchScope()  # of nothing to undo

    interpreter._patch_lang = patched


def _name_types_once(interpreter: Any) -> None:
    """NumPy type of a Triton type, by name."""
    find, found = interpreter._get_np_dtype, {}

    def numpy_type(of: Any) -> Any:
        if of.name not in found:
            found[of.name] = find(of)
        return found[of.name]

    interpreter._get_np_dtype = numpy_type


def _make_shapes_once() -> None:
    """Cache types of blocks and shapes of tensors, which are immutable."""
    from triton.language import core

    core.block_type.__init__ = _remembered(
        core.block_type.__init__, lambda element, shape: (element.name, *map(_number, shape))
    )
    shape_of = _remembered(core.tensor.__init__, lambda handle, of: of.name)

    def initialise(self: Any, handle: Any, type: Any) -> None:
        shape_of(self, handle, type)
        self.handle, self.type, self.dtype = handle, type, type.scalar

    core.tensor.__init__ = initialise


def _remembered(initialise: Callable, key_of: Callable) -> Callable:
    """An `__init__` that copies the attributes of the first object with the same key."""
    known: dict[Any, dict[str, Any]] = {}

    def again(self: Any, *args: Any) -> None:
        key = key_of(*args)
        if key not in known:
            initialise(self, *args)
            known[key] = dict(vars(self))
        vars(self).update(known[key])

    return again


def _number(size: Any) -> int:
    return getattr(size, "value", size)
