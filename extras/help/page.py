"""Help on a group, a section of it or a knob: what docs/configuration.md has, from the same source.

`train.py --help optim model.attention run.steps` prints the texts below, one after the other.
"""

import difflib
import re
import shutil
import textwrap
from collections.abc import Sequence

from phalanx.configs import programs
from phalanx.configs.docs import field_docs
from phalanx.configs.knobs import did_you_mean, get, knobs, sections, suggest, written
from phalanx.configs.load import FOLDER, GROUPS, load, options
from phalanx.configs.schema import Config
from phalanx.configs.validate import ConfigError

_WIDEST = 100  # columns
_SENTENCE = re.compile(r"(?<=[.])\s+(?=[A-Z`0-9])")


def page(topics: Sequence[str]) -> str:
    """Texts on groups, sections and knobs, by their names; defaults are those of config.yaml.

    Raises:
        ConfigError: a name that is none of these, a line each.
    """
    names = {*GROUPS, *sections(), *knobs()}
    if wrong := [topic for topic in topics if topic not in names]:
        raise ConfigError("\n".join(map(_unknown, wrong)))
    defaults, docs = load([]), field_docs()
    texts = [
        _knob(topic, defaults, docs[topic]) if topic in knobs() else _group(topic, defaults, docs)
        for topic in topics
    ]
    return programs.here("\n".join(texts))


def _unknown(topic: str) -> str:
    near = difflib.get_close_matches(topic, GROUPS, n=2, cutoff=0.6)
    near += [name for name in suggest(topic) if name not in near]
    meant = did_you_mean(near[:3]) or f" (groups: {', '.join(GROUPS)})"
    return f"--help {topic}: no such group or knob{meant}"


def _group(name: str, defaults: Config, docs: dict[str, str]) -> str:
    """Options of a group with their first comment, and its knobs with the first sentence."""
    lines = list[str]()
    if name in GROUPS:
        names = options(name)
        width = max(map(len, names))
        lines += [f"Options of {name}, as in {name}={names[0]}:"]
        lines += [
            _indented(f"{each:<{width}}  {_comment(name, each)}", width + 4) for each in names
        ]
        lines += [""]
    if inside := [path for path in knobs() if path.startswith(f"{name}.")]:
        lines += [f"Knobs of {name} and their defaults:"]
        for path in inside:
            lines += [f"  {path}={written(get(defaults, path))}"]
            lines += [_indented(_SENTENCE.split(docs[path])[0], 6, first=6)]
        lines += ["", f"More on one of them: train.py --help {inside[0]}", ""]
    return "\n".join(lines)


def _knob(path: str, defaults: Config, doc: str) -> str:
    """All that is known of a knob."""
    lines = [f"{path}={written(get(defaults, path))}", _indented(doc, 2, first=2)]
    if names := knobs()[path].facts.strings:
        lines.append(_indented(f"Values: {', '.join(names)}.", 2, first=2))
    return "\n".join(lines) + "\n"


def _comment(group: str, option: str) -> str:
    """The first sentence of the comment that a file of a group begins with."""
    text = (FOLDER / group / f"{option}.yaml").read_text(encoding="utf-8")
    lines = [line[1:].strip() for line in text.splitlines() if line.startswith("#")]
    begin = [line for line in lines if not line.startswith("@package")]
    return _SENTENCE.split(" ".join(begin))[0] if begin else ""


def _indented(text: str, rest: int, first: int = 2) -> str:
    width = min(_WIDEST, shutil.get_terminal_size().columns)
    return textwrap.fill(
        text,
        max(width, 40),
        initial_indent=" " * first,
        subsequent_indent=" " * rest,
        break_on_hyphens=False,
        break_long_words=False,
    )
