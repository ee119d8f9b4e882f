"""Texts for people: numbers with units, names of paths, and tables."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import PurePath

from phalanx.configs.arithmetic.accounting import active_parameters, parameters
from phalanx.configs.knobs import pluralize
from phalanx.configs.schema import ModelConfig


def count(number: float) -> str:
    """`671.0 B`, `20.9 M`, `512`."""
    return _scaled(number, (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3))) or f"{number:.0f}"


def work(flops: float) -> str:
    """`56.4 GFLOP`."""
    units = [(f"{unit}FLOP", 1000.0 ** (6 - i)) for i, unit in enumerate("EPTGMk")]
    return _scaled(flops, units) or f"{flops:.0f} FLOP"


def storage(size: int) -> str:
    """`139.8 GiB`, `3.4 MiB`."""
    units = (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10))
    return _scaled(size, units) or f"{size} bytes"


def model_size(model: ModelConfig) -> str:
    """`tiny: 3.4 M parameters, 1.0 M active per token`, counted as published models are.

    Multi-token prediction (MTP) is listed separately; active ones exclude the input embedding.
    """
    total, active = parameters(model, mtp=False).total, active_parameters(model).total
    mtp = parameters(model).total - total
    more = f" (+ {count(mtp)} MTP)" if mtp else ""
    return f"{model.name}: {count(total)} parameters{more}, {count(active)} active per token"


def _scaled(number: float, units: Iterable[tuple[str, float]]) -> str:
    """The number in the largest unit that does not exceed it; empty if all do."""
    return next((f"{number / size:.1f} {unit}" for unit, size in units if number >= size), "")


def short_names(paths: Sequence[str]) -> list[str]:
    """The last parts of each path that make it unique; a repeated path gets a number.

    >>> short_names(["data/a/text", "data/b/text", "code"])
    ['a/text', 'b/text', 'code']
    """
    parts = [PurePath(path).parts or (path,) for path in paths]
    most = max(map(len, parts), default=1)
    names = ["/".join(part[-1:]) for part in parts]
    for length in range(2, most + 1):
        often = Counter(names)
        names = [
            "/".join(part[-length:]) if often[name] > 1 else name
            for part, name in zip(parts, names, strict=True)
        ]
    seen: Counter[str] = Counter()
    for number, name in enumerate(names):
        seen[name] += 1
        if seen[name] > 1:
            names[number] = f"{name} ({seen[name]})"
    return names


def aligned(rows: Sequence[Sequence[str]], texts: int = 1) -> str:
    """Lines of a table, headings first, whose first `texts` columns are aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < texts else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def devices(ranks: int, name: str) -> str:
    """`2 CPU processes`, `8 x NVIDIA H200 of 139.8 GiB`."""
    return pluralize(ranks, name) if name == "CPU process" else f"{ranks} x {name}"
