"""The schema as a flat table: every knob by its dotted path, and near misses of a mistyped one.

`load` answers mistakes with it, `validate` and `docs` walk it. A leaf of `schema.Config` is a knob,
an inner dataclass a section.
"""

import difflib
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Any

from configs.schema import Config

# What people write who come from other trainers.
_ALIASES = {
    "tp": "parallel.tensor",
    "pp": "parallel.pipeline",
    "vp": "parallel.virtual_pipeline",
    "vpp": "parallel.virtual_pipeline",
    "cp": "parallel.context",
    "ep": "parallel.expert",
    "mbs": "data.micro_batch",
    "gbs": "data.global_batch",
    "batch_size": "data.global_batch",
    "seq_length": "data.sequence_length",
    "seq_len": "data.sequence_length",
    "num_experts": "model.moe.experts",
    "learning_rate": "optim.lr",
    "max_steps": "run.steps",
    "train_iters": "run.steps",
}


@dataclass(frozen=True)
class Knob:
    """One leaf of the schema: dotted path, type, and the default before any YAML file."""

    path: str
    type: Any
    default: Any


def knobs() -> dict[str, Knob]:
    """All knobs by dotted path, in the order of the schema."""
    return {path: Knob(path, f.type, _default(f)) for path, f in _walk(Config, "")}


def sections() -> dict[str, type]:
    """All inner dataclasses by dotted path: `model`, `model.attention`, ..."""
    return dict(_sections(Config, ""))


def get(config: Config, path: str) -> Any:
    """Value of the knob `path`."""
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def put(config: Config, path: str, value: Any) -> None:
    """Set the knob `path`."""
    owner, _, name = path.rpartition(".")
    setattr(get(config, owner), name, value)


def fault(cfg: Config, path: str, reason: str, repaired: Any, at: str = "") -> str:
    """`<path>=<value> <reason>; set <at or path>=<repaired>`: how every problem reads."""
    value = get(cfg, path)
    shown = value if isinstance(value, str) else written(value)
    return f"{path}={shown} {reason}; set {at or path}={written(repaired)}"


def written(value: Any) -> str:
    """A value as it is written after `<knob>=` on a command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    # The outer quotes are for the shell, the inner ones for Hydra.
    if isinstance(value, str) and not re.fullmatch(r"[\w./:-]+", value):
        return f"\"'{value}'\""
    return str(value)


def suggest(word: str) -> list[str]:
    """Up to three knobs or sections that `word` may have meant, the likeliest first."""
    paths = [*knobs(), *sections()]
    last = word.rpartition(".")[2]
    by_name: dict[str, list[str]] = {}
    for path in paths:
        by_name.setdefault(path.rpartition(".")[2], []).append(path)
    found = [*by_name.get(last, [])]
    found += [_ALIASES[last]] if last in _ALIASES else []
    found += difflib.get_close_matches(word, paths, n=2, cutoff=0.8)
    for name in difflib.get_close_matches(last, list(by_name), n=2, cutoff=0.7):
        found += by_name[name]
    unique = list(dict.fromkeys(found))
    # Of equally good names the one in the section that was written comes first.
    section = word.rpartition(".")[0]
    return (
        sorted(unique, key=lambda p: p.rpartition(".")[0] != section)[:3] if section else unique[:3]
    )


def did_you_mean(options: list[str]) -> str:
    """`; did you mean a, b or c?`, or nothing without options."""
    if not options:
        return ""
    return f"; did you mean {listed(options)}?"


def listed(options: list[str]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    return " or ".join(part for part in (", ".join(options[:-1]), options[-1]) if part)


def _walk(owner: type, prefix: str) -> Iterator[tuple[str, Field[Any]]]:
    for f in fields(owner):
        if isinstance(f.type, type) and is_dataclass(f.type):
            yield from _walk(f.type, f"{prefix}{f.name}.")
        else:
            yield f"{prefix}{f.name}", f


def _sections(owner: type, prefix: str) -> Iterator[tuple[str, type]]:
    for f in fields(owner):
        if isinstance(f.type, type) and is_dataclass(f.type):
            yield f"{prefix}{f.name}", f.type
            yield from _sections(f.type, f"{prefix}{f.name}.")


def _default(f: Field[Any]) -> Any:
    if f.default_factory is not MISSING:
        return f.default_factory()
    return f.default
