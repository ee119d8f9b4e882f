"""Declaration of a knob: the default of a field of `configs.schema`, with its valid values.

`configs.bounds` checks them, and `configs.docs` shows the meanings of the entries of a table.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

_METADATA = "knob"


@dataclass(frozen=True)
class KnobFacts:
    """Facts of a knob besides its type and default."""

    choices: tuple[str | Mapping[str, Any], ...] = ()
    """Valid strings, and tables whose keys are valid; empty: any string is."""
    at_least: int = 0  # smallest valid number
    above_zero: bool = False  # the number must be above 0, whatever `at_least` is
    below_one: bool = False  # the number must be below 1
    largest_published: int | None = None  # largest size of any published model
    formerly: str = ""  # earlier name, dotted; a command line with it is told the present one
    group: str = ""  # option group that is set in place of the knob; empty: the knob itself is set

    @property
    def strings(self) -> tuple[str, ...]:
        """Valid strings in order, with the present keys of tables; empty if any is valid."""
        names = ((c,) if isinstance(c, str) else tuple(c) for c in self.choices)
        return tuple(itertools.chain.from_iterable(names))

    @property
    def meanings(self) -> dict[str, str]:
        tables = (table for table in self.choices if not isinstance(table, str))
        entries = itertools.chain.from_iterable(table.items() for table in tables)
        return {name: text for name, entry in entries if (text := getattr(entry, "meaning", ""))}


def knob[T](
    default: T,
    *,
    choices: tuple[str | Mapping[str, Any], ...] = (),
    at_least: int = 0,
    above_zero: bool = False,
    below_one: bool = False,
    largest_published: int | None = None,
    formerly: str = "",
    group: str = "",
) -> T:
    """A field of a dataclass with this default, whose metadata are `KnobFacts`."""
    facts = KnobFacts(choices, at_least, above_zero, below_one, largest_published, formerly, group)
    metadata = {_METADATA: facts}
    if isinstance(default, list):
        return cast(T, field(default_factory=default.copy, metadata=metadata))
    return cast(T, field(default=default, metadata=metadata))


def facts_of(metadata: Mapping[Any, Any]) -> KnobFacts:
    """Facts of a field, by its metadata; those of a plain field are the defaults."""
    return cast(KnobFacts, metadata.get(_METADATA, KnobFacts()))
