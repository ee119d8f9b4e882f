"""Advice in messages, parsed like a shell does and tried on the real command line."""

import re
import shlex
from collections.abc import Sequence

from phalanx.configs.knobs import knobs
from phalanx.configs.load import GROUPS, load
from phalanx.configs.schema import Config
from phalanx.configs.validate import validate

_WORD = re.compile(r"""(?:'[^']*'|"[^"]*"|[^\s'"])+""")
_OPENS = re.compile(
    r"(?:^|[\s(])(?:(?:write a list|quote it twice|quote the value twice):|set|go on with|use|"
    r"write|is now|did you mean|name a corpus with)\s|, as in "
)


def advised(message: str) -> list[list[str]]:
    """Alternatives that a message names, each as a list of override words.

    Words of one alternative are consecutive; a comma or `or` starts the next one.
    """
    found: list[list[str]] = []
    for line in message.splitlines():
        for opening in _OPENS.finditer(line):
            found += _alternatives(line[opening.end() :])
    return found


def tried(given: Sequence[str], alternative: Sequence[str], world: int = 1) -> Config:
    """Configuration of a command line with advice applied; ConfigError if it is invalid."""
    cfg = load([*given, *alternative])
    validate(cfg, world)
    return cfg


def _alternatives(text: str) -> list[list[str]]:
    found: list[list[str]] = [[]]
    for match in _WORD.finditer(text):
        word = match[0].rstrip(",;.?:)")
        after = match[0][len(word) :]
        if word in ("or", "and"):
            found.append([])
            continue
        if not _is_override(word):
            break
        found[-1] += shlex.split(word)
        if "," in after:
            found.append([])
        elif after:
            break
    return [words for words in found if words]


def _is_override(word: str) -> bool:
    name, sign, value = word.lstrip("'").partition("=")
    return bool(sign and value) and (name in knobs() or name in GROUPS)
