"""The schema as a flat table: every knob by its dotted path, and near misses of a mistyped one.

A leaf of `schema.Config` is a knob, an inner dataclass a section.
"""

import difflib
import functools
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Any, get_origin

from phalanx.configs.fields import KnobFacts, facts_of
from phalanx.configs.schema import Config

Changes = dict[str, Any]  # values by knob

# What people write who come from other trainers.
_ALIASES: dict[str, tuple[str, ...]] = {
    "tp": ("parallel.tensor",),
    "pp": ("parallel.pipeline",),
    "vp": ("parallel.virtual_pipeline",),
    "vpp": ("parallel.virtual_pipeline",),
    "cp": ("parallel.context",),
    "ep": ("parallel.expert",),
    "mbs": ("data.micro_batch",),
    "gbs": ("data.global_batch",),
    "batch_size": ("data.global_batch",),
    "seq_length": ("data.sequence_length",),
    "seq_len": ("data.sequence_length",),
    "num_experts": ("model.moe.experts",),
    "learning_rate": ("optim.lr",),
    "max_steps": ("run.steps",),
    "train_iters": ("run.steps",),
}


@dataclass(frozen=True)
class Removed:
    """A knob that no longer exists."""

    always: str  # clause on what is always done instead
    value: Any = None  # asked for what is always done; None: no value


REMOVED: dict[str, Removed] = {
    "kernels.dynamic": Removed("fused kernels always claim tiles at run time"),
    "optim.nesterov": Removed("momentum always has Nesterov's form", True),
    "run.tensorboard": Removed("run.trackers=[tensorboard] writes its events", False),
    "precision.wgrad_blocks": Removed(
        "operands of weight gradients always have blocks of 128 tokens x 128 channels", "square"
    ),
}
"""Knobs that no longer exist, by dotted path."""


@dataclass(frozen=True)
class Knob:
    """One leaf of the schema: dotted path, type, default before any YAML file, and its facts."""

    path: str
    type: Any
    default: Any
    facts: KnobFacts


@functools.cache
def knobs() -> dict[str, Knob]:
    """All knobs by dotted path, in the order of the schema."""
    return {
        path: Knob(path, f.type, _default(f), facts_of(f.metadata)) for path, f in _walk(Config, "")
    }


@functools.cache
def renamed() -> dict[str, Knob]:
    """Knobs by their earlier dotted paths."""
    return {knob.facts.formerly: knob for knob in knobs().values() if knob.facts.formerly}


@functools.cache
def sections() -> dict[str, type]:
    """All inner dataclasses by dotted path: `model`, `model.attention`, ..."""
    return dict(_sections(Config, ""))


def has_fields(path: str) -> bool:
    """Return whether a path is a knob whose value has fields."""
    return path in knobs() and knobs()[path].type == dict[str, Any]


def get(config: Config, path: str) -> Any:
    """Value of the knob `path`."""
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def values(config: Config) -> Iterator[tuple[str, Any]]:
    """Every knob with its value, in the order of the schema."""
    for owner, names in _owned().items():
        section: Any = get(config, owner)
        for name, path in names:
            yield path, getattr(section, name)


@functools.cache
def _owned() -> dict[str, list[tuple[str, str]]]:
    """Name and dotted path of the knobs of every section."""
    found: dict[str, list[tuple[str, str]]] = {}
    for path in knobs():
        owner, _, name = path.rpartition(".")
        found.setdefault(owner, []).append((name, path))
    return found


def put(config: Config, path: str, value: Any) -> None:
    """Set the knob `path`."""
    owner, _, name = path.rpartition(".")
    setattr(get(config, owner), name, value)


def copied(config: Config) -> Config:
    """A copy that shares no section and no list, in a tenth of the time of `copy.deepcopy`."""
    return _copied(config)


def _copied[T](section: T) -> T:
    new = object.__new__(type(section))
    values = vars(new)
    values.update(vars(section))
    kind: type = type(section)
    inner, lists = _parts(kind)
    for name in inner:
        values[name] = _copied(values[name])
    for name in lists:
        values[name] = [_copied(each) if is_dataclass(each) else each for each in values[name]]
    return new


@functools.cache
def _parts(section: type) -> tuple[list[str], list[str]]:
    """Fields that a copy must not share: those with a section, and those with a list."""
    inner = [f.name for f in fields(section) if is_dataclass(f.type)]
    return inner, [f.name for f in fields(section) if get_origin(f.type) is list]


def changed(config: Config, values: Mapping[str, Any]) -> Config:
    """A copy of a configuration with other values of some knobs."""
    config = copied(config)
    for path, value in values.items():
        put(config, path, value)
    return config


def repair(cfg: Config, path: str, reason: str, value: Any, at: str = "") -> str:
    """The line `<path>=<present value> <reason>; set <at or path>=<value>`; and sets it in `cfg`.

    A list of problems so holds no consequences of others, and all its overrides together give a
    valid configuration.
    """
    present = get(cfg, path)
    put(cfg, at or path, value)
    return f"{path}={shown(present)} {reason}; set {overrides({at or path: value})}"


def overrides(values: Mapping[str, Any]) -> str:
    """Knobs with their values as a command line takes them, which is how all advice is spelled."""
    return " ".join(f"{path}={written(value)}" for path, value in values.items())


def written(value: Any) -> str:
    """A value as a shell takes it after `<knob>=`."""
    return shlex.quote(visible(spelled(value)))


def spelled(value: Any) -> str:
    """A value as Hydra takes it after `<knob>=`."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(spelled, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{name}:{spelled(each)}' for name, each in value.items())}}}"
    if isinstance(value, str) and not _is_plain(value):
        # A $ before a brace would take the value of another knob.
        # Kernels are used without Hydra.
        from hydra.core.override_parser.types import Quote, QuotedString

        return QuotedString(value.replace("${", r"\${"), Quote.double).with_quotes()
    return str(value)


def shown(value: Any) -> str:
    """A value as a person reads it."""
    return visible(value if isinstance(value, str) else spelled(value))


def _is_plain(text: str) -> bool:
    if text.lower() in ("true", "false", "null") or not re.fullmatch(r"[\w./:@-]+", text, re.ASCII):
        return False
    try:
        return text in (repr(float(text)), str(int(float(text))))
    except (ValueError, OverflowError):
        return True


def visible(text: str) -> str:
    """The text on one line: what cannot be printed as it is written in Python."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def suggest(word: str) -> list[str]:
    """Up to three knobs or sections that `word` may have meant, the likeliest first."""
    section, _, name = word.rpartition(".")
    paths: dict[str, list[str]] = {}
    for path in (*knobs(), *sections()):
        paths.setdefault(path.rpartition(".")[2], []).append(path)
    found = [*paths.get(name, []), *_ALIASES.get(name, ())]
    if not found:
        near = difflib.get_close_matches(name, list(paths), n=3, cutoff=0.7)
        found = [path for match in near for path in paths[match]]
    here = [path for path in found if path.rpartition(".")[0] == section]
    return (here or found)[:3]


def did_you_mean(options: list[str]) -> str:
    """`; did you mean a, b or c?`, or nothing without options."""
    if not options:
        return ""
    return f"; did you mean {listed(options)}?"


def pluralize(number: int | str, noun: str) -> str:
    """`1 shard`, `2 shards`, `3 batches`, `2 processes`."""
    ending = "" if str(number) == "1" else "es" if noun.endswith(("ch", "ss")) else "s"
    return f"{number} {noun}{ending}"


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
