"""A machine by its name, or by a YAML file that says what is different about a cluster.

    kind: h100            # a kind of GPU: all that the file leaves out
    network_gbs: 25.4     # any field of `Machine` but its name
    measured: [network_gbs]

`measured` names fields that were measured on the cluster; others that the file changes are
assumptions.
"""

import contextlib
import difflib
import functools
import math
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import yaml

from phalanx.configs.tables.machines import MACHINES, Machine
from phalanx.extras.clusters.kinds import KINDS

GPUS: dict[str, Machine] = MACHINES | KINDS
KEPT = ("name", "measured", "only_memory")
"""Fields of a kind that a file cannot set as numbers."""
RATES = {f.name: f.type for f in fields(Machine) if f.name not in KEPT}
_MOST_TIMES = 3  # a value of a kind: its boards differ by less
_MAY_BE_ZERO = ("latency_us", "launch_us", "reserved_gib")


def machine(name: str) -> Machine:
    """The machine of a kind, or of a YAML file by its path.

    Raises ValueError: there is no such kind or file, or the file says something impossible.
    """
    if name.lower() in GPUS:
        return GPUS[name.lower()]
    path = Path(os.path.expanduser(name))  # of an unknown user too, unlike that of Path
    if path.suffix not in (".yaml", ".yml"):
        raise ValueError(f"is none of {', '.join(GPUS)}, and no YAML file of a machine")
    try:
        return _read(path, path.stat().st_mtime_ns)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ValueError(f"cannot be read: {reason}") from error
    except ValueError as error:
        raise ValueError(f"{error}: correct the file, or do without it") from error


@functools.lru_cache(maxsize=8)
def _read(path: Path, changed: int) -> Machine:
    """The machine of a file; `changed` is when it was written, so that it is read once."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where else ""
        raise ValueError(f"is no YAML{line}") from error
    if not isinstance(found, dict):
        raise ValueError("must have lines like `kind: h100` and `network_gbs: 25`")
    kind = str(found.pop("kind", "")).lower()
    if kind not in GPUS:
        has = f", not {kind}" if kind else ""
        raise ValueError(f"must have a line `kind:` with one of {', '.join(GPUS)}{has}")
    base, measured = GPUS[kind], found.pop("measured", [])
    if not isinstance(measured, list) or (wrong := [m for m in measured if str(m) not in RATES]):
        raise ValueError(
            f"has measured: {wrong[0] if isinstance(measured, list) else measured!r}, "
            f"which must be a list of fields: {', '.join(RATES)}"
        )
    values = {name: _number(name, value) for name, value in found.items()}
    rates = [name for name in values if not name.endswith("_gib") and name != "node_gpus"]
    if base.only_memory and rates:
        raise ValueError(f"has {rates[0]}, but of kind {kind} the memory alone is estimated")
    kept = base.measured - {name for name in values if values[name] != getattr(base, name)}
    own = replace(
        base, name=f"{base.name} of {path.name}", measured=kept | frozenset(measured), **values
    )
    _check_units(own, base)
    return own


def _check_units(own: Machine, base: Machine) -> None:
    """Refuse MiB for GiB and Gb for GB: what is far above the kind, or above a line."""
    for name in RATES:
        value, usual = getattr(own, name), getattr(base, name)
        if name.endswith("_tflops") or name in ("memory_gib", "memory_gbs"):
            if value > _MOST_TIMES * usual:
                raise ValueError(
                    f"has {name}: {value:g}, more than {_MOST_TIMES} times the {usual:g} of its "
                    "kind, as if in another unit"
                )
    for link in ("node", "network"):
        rate, line = getattr(own, f"{link}_gbs"), getattr(own, f"{link}_line_gbs")
        if rate > line:
            raise ValueError(
                f"has {link}_gbs: {rate:g} above {link}_line_gbs: {line:g}, as if in another unit "
                "(400 Gb/s are 50 GB/s)"
            )


def _number(name: Any, value: Any) -> Any:
    if name not in RATES:
        near = difflib.get_close_matches(str(name), RATES, n=1)
        known = (
            f"which is no field and near {near[0]}"
            if near
            else f"none of kind, measured, {', '.join(RATES)}"
        )
        raise ValueError(f"has {name!s}, {known}")
    whole = RATES[name] in (int, "int")
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)  # YAML 1.1 takes 2e+04, without a point, for a text
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise ValueError(
            f"has {name}: {value!r}, which must be a {'whole ' if whole else ''}number"
        )
    least = "at least" if name in _MAY_BE_ZERO else "above"
    if not (math.isfinite(value) and (value > 0 or (value == 0 and least == "at least"))):
        raise ValueError(f"has {name}: {value}, which must be {least} 0")
    return value
