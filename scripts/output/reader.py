"""Output for a reader that may close the pipe early, like `head`."""

import functools
import os
import sys
from collections.abc import Callable
from typing import Any


def may_leave[**P](main: Callable[P, int]) -> Callable[P, int]:
    """Wrap a `main` so that it finishes its work after its output pipe was closed."""

    @functools.wraps(main)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        before = sys.stdout
        out: Any = _Output(before)
        sys.stdout = out
        try:
            return main(*args, **kwargs)
        finally:
            out.flush()
            sys.stdout = before

    return run


class _Output:
    """A text stream that is redirected to /dev/null once its pipe has no reader."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return int(self._stream.write(text))
        except BrokenPipeError:
            self._leave()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._leave()

    def _leave(self) -> None:
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, self._stream.fileno())
        os.close(devnull)
