"""Bad input of a program, as lines for its user."""

import functools
import sys
from collections.abc import Callable


def reports_bad_input[**P](script: str) -> Callable[[Callable[P, int]], Callable[P, int]]:
    """Decorator of a `main`: ValueError and OSError become lines on stderr and the exit code 2.

    A line begins with the name of the script; the text of an OSError with its file.
    """

    def decorate(main: Callable[P, int]) -> Callable[P, int]:
        @functools.wraps(main)
        def run(*args: P.args, **kwargs: P.kwargs) -> int:
            try:
                return main(*args, **kwargs)
            except OSError as error:
                where = f"{error.filename}: " if error.filename else ""
                text = f"{where}{error.strerror or error}"
            except ValueError as error:
                text = str(error)
            for line in text.splitlines():
                print(f"{script}: {line}", file=sys.stderr)
            return 2

        return run

    return decorate
