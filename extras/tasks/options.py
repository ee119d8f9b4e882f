"""Options of a task, which the first line of its file may have.

{"task": {"fewshot": 5, "baseline": 0.25}}
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from phalanx.moe.data.host_cache import DataError


@dataclass(frozen=True)
class Options:
    """Options of a task."""

    name: str = ""  # in results; that of the file by default
    format: str = ""  # one of `formats.FORMATS`; found by the keys of the first row by default
    fewshot: int = 0  # number of solved examples before a question
    fewshot_file: str = ""
    """File, beside the task's, whose first rows are the examples; by default others of the task."""
    description: str = ""  # text before the examples
    delimiter: str = " "  # between a question and its answer
    separator: str = "\n\n"  # behind an example
    baseline: float | str = ""
    """Score of guessing, as in 0.25, for a centered score; `choices`: one over their number."""
    center: str = ""  # score that is centered; by default acc, or exact_match
    limit: int = 0  # number of first rows that are read; 0 reads all
    until: list[str] = field(default_factory=lambda: ["\n"])  # texts that end an answer
    max_tokens: int = 32  # most tokens of an answer
    strip: bool = True  # blanks around an answer do not count
    ignore_case: bool = False
    ignore_punctuation: bool = False
    ignore_numbers: bool = False
    regexes_to_ignore: list[str] = field(
        default_factory=list
    )  # removed before answers are compared


def options_of(path: Path, given: Mapping[str, Any]) -> Options:
    """Options of a header; a DataError for one that is unknown, of a wrong type or too small."""
    known = {each.name: getattr(Options(), each.name) for each in fields(Options)}
    for name, value in given.items():
        if name not in known:
            raise DataError(f"{path}: the option {name!r} is none of {', '.join(known)}")
        default = known[name]
        kinds = (int, float, str) if name == "baseline" else type(default)
        if not isinstance(value, kinds) or (isinstance(value, bool) != isinstance(default, bool)):
            raise DataError(f"{path}: the option {name!r} must be written like {default!r}")
        if isinstance(value, list) and not all(isinstance(each, str) for each in value):
            raise DataError(f"{path}: the option {name!r} must be a list of strings")
        if isinstance(value, int) and value < (name == "max_tokens"):
            raise DataError(f"{path}: the option {name!r} is {value}, which is too small")
    options = Options(**given)
    guess = options.baseline
    if guess not in ("", "choices") and not (isinstance(guess, int | float) and 0 <= guess < 1):
        raise DataError(f"{path}: the option 'baseline' must be below 1, as in 0.25, or 'choices'")
    for pattern in options.regexes_to_ignore:
        try:
            re.compile(pattern)
        except re.error as error:
            raise DataError(f"{path}: {pattern!r} is no regular expression: {error}") from None
    return options
