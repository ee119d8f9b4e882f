#!/usr/bin/env python
"""Loss curves of several runs in one picture, and their differences to the first run.

    python scripts/lab/plot_losses.py runs/fused runs/megatron [--plot PNG] [--title TEXT]
        [--parts N] [--json OUT]

A run is its folder, its metrics.jsonl, or a file that --json wrote (which holds several). The table
has the mean loss of N equal parts of the steps that all runs have, or of the tokens if the runs
trained on different numbers of tokens up to a step, and names other differences between the runs;
- stands for a part in which a run has no loss. The picture
goes to losses.png next to the first run, unless --plot is given. Long curves are centred means,
drawn over the losses themselves: batches differ more than runs do.
"""

import argparse
import json
import math
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from phalanx.configs import programs
from phalanx.moe.report.loggers import is_finite, read, start_facts
from phalanx.moe.text import count, short_names
from phalanx.scripts.output.bad_input import reports_bad_input
from phalanx.scripts.output.pictures import (
    centred_means,
    common_title,
    differences,
    left_out,
    not_finite,
    pyplot,
    smoothing,
)
from phalanx.scripts.output.reader import may_leave

_FEW = 50  # steps up to which each is drawn as a point
_STEEP = 3  # largest loss over the smallest, from which on the axis is logarithmic
_PARTS = 10
_READ = "tokens read"  # key of the token counts in a file of --json, next to names of runs
_LONG = 24  # longest name at the head of a column; longer ones are replaced by a number


class Curve(NamedTuple):
    """The losses of a run."""

    losses: dict[int, float]  # loss by step
    facts: dict[str, Any]  # facts of the run for the title; empty if unknown
    tokens: dict[int, int]  # tokens trained on up to a step, by step; empty if unknown
    lost: Sequence[int] = ()  # steps whose loss is NaN or infinite


Curves = dict[str, Curve]  # curves by name of the run


@may_leave
@reports_bad_input("plot_losses")
def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code: 0 done, 2 bad input."""
    args = parser().parse_args(argv)
    curves = load(args.runs)
    print(table(curves, args.parts))
    for line in remarks(curves):
        print(line)
    if args.json:
        args.json.write_text(json.dumps(_content(curves), separators=(",", ":")) + "\n")
    _draw(curves, args)
    return 0


def parser() -> argparse.ArgumentParser:
    p = programs.parser("plot_losses", __doc__)
    add = p.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN")
    add("--parts", type=int, metavar="N", help=f"default: {_PARTS}, or the steps if they are fewer")
    add("--json", type=Path, metavar="OUT", help="write the losses")
    add("--plot", type=Path, metavar="PNG", help="default: losses.png beside the first run")
    add("--title", metavar="TEXT", help="default: what the runs have in common")
    return p


def _draw(curves: Curves, args: argparse.Namespace) -> None:
    path = args.plot or args.runs[0].resolve().parent / "losses.png"
    if args.plot is None and args.runs[0].name == "metrics.jsonl":
        path = args.runs[0].resolve().parents[1] / "losses.png"
    try:
        plot(curves, path, args.title or common_title([curve.facts for curve in curves.values()]))
    except ValueError as error:  # there is no matplotlib
        if args.plot:
            raise
        print(f"no picture: {error}")
        return
    print(f"drawn: {path}")


def load(paths: Sequence[Path]) -> Curves:
    """Curves of runs' folders, metrics.jsonl, or files of --json; ValueError without losses."""
    named: list[tuple[str, Curve]] = []
    for path in paths:
        named += _stored(path) if path.suffix == ".json" else [_logged(path)]
    names = short_names([name for name, _ in named])
    return dict(zip(names, (curve for _, curve in named), strict=True))


def _logged(path: Path) -> tuple[str, Curve]:
    path = path / "metrics.jsonl" if path.is_dir() else path
    records = read(path)
    lost = not_finite(records, "loss")
    losses = {r["step"]: round(r["loss"], 5) for r in records if is_finite(r.get("loss"))}
    if lost and not losses:
        raise ValueError(f"{path} has no loss that is a number: all are NaN or infinite")
    if not losses:
        raise ValueError(f"{path} has no losses: give the folder of a run that has logged steps")
    resolved = path.resolve()
    name = resolved.parent if path.stem == "metrics" else resolved.with_suffix("")
    facts = start_facts(path)
    tokens = {
        r["step"]: r["tokens"]
        for r in records
        if r["step"] in losses and is_finite(r.get("tokens"))
    }
    if len(tokens) < len(losses):
        tokens = _tokens(losses, facts)
    return str(name), Curve(losses, facts, tokens, lost)


def _tokens(losses: dict[int, float], facts: dict[str, Any]) -> dict[int, int]:
    """Tokens up to each step of a run with a constant batch."""
    if not {"batch", "sequence"} <= set(facts):
        return {}
    return {step: step * facts["batch"] * facts["sequence"] for step in losses}


def _stored(path: Path) -> list[tuple[str, Curve]]:
    try:
        content = json.loads(path.read_text())
        facts, tokens = content.pop("facts", {}), content.pop(_READ, {})
        named = []
        for name, run in content.items():
            losses = {int(s): float(loss) for s, loss in run.items() if loss is not None}
            if not losses or not all(map(math.isfinite, losses.values())):
                raise ValueError
            lost = [int(s) for s, loss in run.items() if loss is None]
            own_facts = facts.get(name, {})
            read = {int(s): int(n) for s, n in tokens.get(name, {}).items()}
            named.append((name, Curve(losses, own_facts, read or _tokens(losses, own_facts), lost)))
        return named
    except (ValueError, AttributeError, TypeError, RecursionError):
        raise ValueError(f"{path} is no file of --json") from None


def _content(curves: Curves) -> dict[str, Any]:
    facts = {name: curve.facts for name, curve in curves.items() if curve.facts}
    content: dict[str, Any] = {
        name: curve.losses | dict.fromkeys(curve.lost) for name, curve in curves.items()
    }
    content |= {"facts": facts} if facts else {}
    tokens = {
        name: curve.tokens
        for name, curve in curves.items()
        if curve.tokens != _tokens(curve.losses, curve.facts)
    }
    return content | ({_READ: tokens} if tokens else {})


def over_tokens(curves: Curves) -> bool:
    """True if runs have trained on different numbers of tokens at the same step."""
    first, *others = curves.values()
    if not all(curve.tokens for curve in curves.values()):
        return False
    return any(
        step in first.tokens and first.tokens[step] != tokens
        for curve in others
        for step, tokens in curve.tokens.items()
    )


def remarks(curves: Curves) -> list[str]:
    """Lines on facts in which runs differ, the axis of the comparison, and steps without a loss."""
    lines = [
        f"{name}: {difference}" for name, difference in _apart_in(curves).items() if difference
    ]
    if over_tokens(curves):
        lines.append("tokens up to a step differ: the runs are compared by tokens, not by steps")
    lines += [f"{name}: {left_out(curve.lost)}" for name, curve in curves.items() if curve.lost]
    return lines


def _apart_in(curves: Curves) -> dict[str, str]:
    """Facts in which each run differs from others, unless its name says so."""
    different = differences([curve.facts for curve in curves.values()])
    return {
        name: "" if difference in name else difference
        for name, difference in zip(curves, different, strict=True)
    }


def heads(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Names for columns and legends, and lines that map numbers to long names."""
    if max(map(len, names)) <= _LONG:
        return list(names), []
    numbers = [f"[{i}]" for i, _ in enumerate(names, 1)]
    return numbers, [f"{number} {name}" for number, name in zip(numbers, names, strict=True)]


def table(curves: Curves, parts: int | None) -> str:
    """Mean loss of the first run in each part of the common steps, and the others' differences.

    Parts are of tokens where steps differ in them.
    """
    names, lines = heads(list(curves))
    if over_tokens(curves):
        unit, rows = "tokens", _by_tokens(list(curves.values()), parts)
    else:
        unit, rows = "steps", _by_steps(list(curves.values()), parts)
    columns = [names[0], *(f"{name} - {names[0]}" for name in names[1:])]
    widths = [max(12, len(head)) for head in columns]

    def row(left: str, cells: Sequence[str]) -> str:
        cells = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        return "  ".join([left, *cells])

    width = max(13, *(len(left) for left, _ in rows))
    lines.append(row(unit.rjust(width), columns))
    for left, means in rows:
        first = means[0]
        cells = [_cell(mean, first) for mean in means[1:]]
        lines.append(row(left.ljust(width), ["-" if first is None else f"{first:.4f}", *cells]))
    return "\n".join(lines)


def _cell(mean: float | None, first: float | None) -> str:
    return "-" if mean is None or first is None else f"{mean - first:+.4f}"


_Rows = list[tuple[str, Sequence[float | None]]]
"""Bounds of each part, and the mean loss of each run in it; None if it has none."""


def _by_steps(curves: Sequence[Curve], parts: int | None) -> _Rows:
    steps = sorted(set.intersection(*(set(curve.losses) for curve in curves)))
    if not steps:
        raise ValueError("the runs have no step in common")
    parts = _parts(parts, len(steps), "the steps of all runs")
    rows: _Rows = []
    for i in range(parts):
        some = steps[i * len(steps) // parts : (i + 1) * len(steps) // parts]
        means = [sum(curve.losses[s] for s in some) / len(some) for curve in curves]
        rows.append((f"{some[0]:>6}-{some[-1]:<6}", means))
    return rows


def _by_tokens(curves: Sequence[Curve], parts: int | None) -> _Rows:
    """Rows of parts that are equal in tokens, over the range in which all runs have losses."""
    low = max(min(curve.tokens.values()) for curve in curves)
    high = min(max(curve.tokens.values()) for curve in curves)
    inside = [[(n, curve.losses[s]) for s, n in curve.tokens.items()] for curve in curves]
    inside = [[(n, loss) for n, loss in each if low <= n <= high] for each in inside]
    fewest = min(map(len, inside))
    if not fewest:
        raise ValueError("the runs have no tokens in common")
    parts = _parts(parts, fewest, "the steps of the run with fewest")
    rows: _Rows = []
    for i in range(parts):
        begin, end = (low + (high - low) * j / parts for j in (i, i + 1))
        means: list[float | None] = []
        for each in inside:
            some = [loss for n, loss in each if begin < n <= end or (i == 0 and n == low)]
            means.append(sum(some) / len(some) if some else None)
        rows.append((f"{count(round(begin))} to {count(round(end))}", means))
    return rows


def _parts(parts: int | None, available: int, unit: str) -> int:
    parts = min(_PARTS, available) if parts is None else parts
    if not 1 <= parts <= available:
        raise ValueError(f"--parts {parts}: must be 1 to {available}, {unit}")
    return parts


def plot(curves: Curves, path: Path, title: str) -> None:
    """Draw losses, their centred means, and below them the differences to the first run."""
    pictures = pyplot()
    several, fewest = len(curves) > 1, min(len(curve.losses) for curve in curves.values())
    figure, axes = pictures.subplots(
        2 if several else 1,
        squeeze=False,
        sharex=True,
        figsize=(8, 5),
        height_ratios=(3, 1) if several else (1,),
        layout="constrained",
    )
    above, below = axes[0, 0], axes[-1, 0]
    by_tokens, window = over_tokens(curves), smoothing(fewest)
    different = _apart_in(curves)
    points: list[tuple[list[int], list[float]]] = []
    farthest = 0.0  # without the first fifth, where losses fall fast and differ most
    for i, (name, curve) in enumerate(curves.items()):
        losses, colour = curve.losses, f"C{i}"
        positions = [curve.tokens[s] for s in losses] if by_tokens else list(losses)
        mean = list(centred_means(losses, window).values())
        points.append((positions, mean))
        line: dict[str, Any] = {"color": colour, "linestyle": "-" if i == 0 else "--"}
        line |= {"marker": "o", "markersize": 4} if len(mean) <= _FEW else {}
        if window > 1:
            above.plot(positions, list(losses.values()), color=colour, alpha=0.2, linewidth=0.8)
        label = textwrap.fill(f"{name} ({different[name]})" if different[name] else name, 60)
        above.plot(positions, mean, label=label, **line)
        if several:
            common, far = _apart(*points[0], positions, mean)
            below.plot(common, far, **line)
            farthest = max(farthest, *map(abs, far[len(far) // 5 :]), 0.0)
    every = [loss for curve in curves.values() for loss in curve.losses.values()]
    steep = 0 < _STEEP * min(every) < max(every)
    above.set(ylabel="loss (nats a token)", yscale="log" if steep else "linear")
    smoothed = f"centred mean of {window} logged steps" if window > 1 else None
    above.legend(title=smoothed, fontsize="small", title_fontsize="small")
    if several:
        first = next(iter(curves))
        reference = first if len(first) <= 60 else "the first run"
        below.set_title(f"loss minus that of {reference}", fontsize="medium", loc="left")
        below.set_ylabel("nats a token")
        if farthest:
            below.set_ylim(-1.3 * farthest, 1.3 * farthest)
    below.set_xlabel("tokens" if by_tokens else "step")
    if by_tokens:
        below.xaxis.set_major_formatter(lambda tokens, _: count(round(tokens)) if tokens else "0")
    else:
        below.xaxis.get_major_locator().set_params(integer=True)
    (place, *others), _ = points[0]
    if not others:  # no range to place ticks in
        below.set_xlim(place - 1, place + 1)
    figure.suptitle(title or "training loss", fontsize="medium", wrap=True)
    figure.savefig(path, dpi=120)
    pictures.close(figure)


def _apart(
    first: Sequence[int], theirs: Sequence[float], positions: Sequence[int], mean: Sequence[float]
) -> tuple[list[int], list[float]]:
    """Positions and distances of a curve to the first run's, interpolated linearly."""
    inside = [(x, y) for x, y in zip(positions, mean, strict=True) if first[0] <= x <= first[-1]]
    return (
        [x for x, _ in inside],
        [y - float(np.interp(x, first, theirs)) for x, y in inside],
    )


if __name__ == "__main__":
    sys.exit(main())
