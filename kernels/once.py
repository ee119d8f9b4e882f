"""A call that happens once."""

from collections.abc import Callable


class Once[**P, T]:
    """A function that runs at the first call with some arguments and then returns that result."""

    def __init__(self, fn: Callable[P, T]) -> None:
        self._fn = fn
        self._results: dict[tuple[object, ...], T] = {}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of the first call with these arguments."""
        key = (*args, *kwargs.items())
        if key not in self._results:
            self._results[key] = self._fn(*args, **kwargs)
        return self._results[key]
