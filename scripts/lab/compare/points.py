"""Expansion of a command line with sweeps to the points of a comparison, by Hydra's grammar."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from phalanx.configs.load import FOLDER
from phalanx.configs.validate import ConfigError

OWN = {
    "run": "",
    "run.steps": "use --steps",
    "run.device": "use --device",
    "run.dir": "use --out",
    "run.name": "",
    "run.resume": "",
    "run.save_interval": "",
    "run.eval_interval": "",
    "run.log_interval": "",
}
"""Knobs that a comparison sets itself, and the option to use instead."""


@dataclass(frozen=True)
class Point:
    """One configuration of a comparison."""

    label: str  # overrides in which points differ
    overrides: tuple[str, ...]  # all overrides of the point


def expand(overrides: Sequence[str]) -> list[Point]:
    """The product of all sweeps, in the order of Hydra's basic sweeper: the last varies fastest.

    Values may be `a,b`, `choice(a,b)`, `range(1,4)` or `glob(*)`. Words that are no overrides are
    passed on, for `configs.load` to report. Raises ConfigError, one line per mistake.
    """
    lists: list[list[str]] = []
    swept: list[bool] = []
    mistakes: list[str] = []
    with initialize_config_dir(version_base="1.3", config_dir=str(FOLDER)):
        parser = OverridesParser.create(GlobalHydra.instance().config_loader())
        for text in overrides:
            try:
                override = parser.parse_overrides([text])[0]
                values = _values(override, text)
            except HydraException:
                values = [text]
            except ValueError as error:
                mistakes.append(f"{text}: {error}")
                continue
            if values:  # run=bench adds nothing
                lists.append(values)
                swept.append(len(values) > 1)
    points = []
    for words in itertools.product(*lists):
        label = " ".join(text for text, varies in zip(words, swept, strict=True) if varies)
        points.append(Point(label or "as given", words))
    if len(set(points)) < len(points):
        mistakes.append("two points are the same: leave out the value that is there twice")
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return points


def _values(override: Override, text: str) -> list[str]:
    """Overrides that `text` expands to; ValueError if a comparison cannot use it."""
    key = override.get_key_element()
    if text == "run=bench":
        return []
    if key in OWN:
        instead = OWN[key] or "leave it out"
        raise ValueError(f"a comparison sets {key} itself; {instead}")
    if not override.is_sweep_override():
        return [text]
    if not override.is_discrete_sweep():
        raise ValueError("has no list of values; write range(...) or choice(...)")
    values = [f"{key}={value}" for value in override.sweep_string_iterator()]
    if not values:
        raise ValueError("matches nothing")
    return values
