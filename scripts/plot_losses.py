#!/usr/bin/env python
"""Loss curves of several runs over each other, and how far they are from the first one's.

    python scripts/plot_losses.py runs/fused runs/megatron [--plot PNG] [--title TEXT]
        [--parts N] [--json OUT]

A run is its folder, its metrics.jsonl, or a file that --json wrote (which holds several). The table
has the mean loss of each of N equal parts of the steps that all runs have. The picture goes to
losses.png beside the first run, unless --plot says otherwise. A curve is a mean over some steps
where there are many, drawn over the losses themselves: batches differ more than runs do.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from phalanx.moe.report.loggers import is_finite, read, start_facts
from phalanx.moe.report.names import short_names
from phalanx.scripts.pictures import common_title, left_out, not_finite, pyplot, running

_MEAN_OF = 20
"""Most steps that a point of a curve is the mean of."""
_FEW = 50
"""Steps up to which each is drawn as a point."""
_STEEP = 3
"""Largest loss over the smallest, from which on the axis is logarithmic."""
_PARTS = 10


class Curve(NamedTuple):
    """The losses of a run."""

    losses: dict[int, float]
    """By step."""
    facts: dict[str, Any]
    """What the run is, for the title; empty if that is not known."""
    lost: list[int]
    """Steps whose loss is NaN or infinite."""


Curves = dict[str, Curve]
"""By name of the run."""


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code: 0 done, 2 bad input."""
    args = parser().parse_args(argv)
    try:
        curves = load(args.runs)
        print(table(curves, args.parts))
        for name, curve in curves.items():
            if curve.lost:
                print(f"{name}: {left_out(curve.lost)}")
        if args.json:
            args.json.write_text(json.dumps(_content(curves), separators=(",", ":")) + "\n")
        _draw(curves, args)
    except (ValueError, OSError) as error:
        print(f"plot_losses: {error}", file=sys.stderr)
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    """Options; `--help` is the manual."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    """Curves of runs' folders, of their metrics.jsonl, or of files of --json.

    Raises:
        ValueError: there are no losses.
    """
    found: list[tuple[str, Curve]] = []
    for path in paths:
        found += _stored(path) if path.suffix == ".json" else [_logged(path)]
    names = short_names([name for name, _ in found])
    return dict(zip(names, (curve for _, curve in found), strict=True))


def _logged(path: Path) -> tuple[str, Curve]:
    path = path / "metrics.jsonl" if path.is_dir() else path
    records = read(path)
    lost = not_finite(records, "loss")
    losses = {r["step"]: round(r["loss"], 5) for r in records if is_finite(r.get("loss"))}
    if lost and not losses:
        raise ValueError(f"{path} has no loss that is a number: all are NaN or infinite")
    if not losses:
        raise ValueError(f"{path} has no losses: give the folder of a run that has logged steps")
    whole = path.resolve()
    name = whole.parent if path.stem == "metrics" else whole.with_suffix("")
    return str(name), Curve(losses, start_facts(path), lost)


def _stored(path: Path) -> list[tuple[str, Curve]]:
    try:
        content = json.loads(path.read_text())
        facts = content.pop("facts", {})
        found = []
        for name, run in content.items():
            losses = {int(s): float(loss) for s, loss in run.items() if loss is not None}
            if not losses or not all(map(math.isfinite, losses.values())):
                raise ValueError
            lost = [int(s) for s, loss in run.items() if loss is None]
            found.append((name, Curve(losses, facts.get(name, {}), lost)))
        return found
    except (ValueError, AttributeError, TypeError, RecursionError):
        raise ValueError(f"{path} is no file of --json") from None


def _content(curves: Curves) -> dict[str, Any]:
    facts = {name: curve.facts for name, curve in curves.items() if curve.facts}
    losses = {name: curve.losses | dict.fromkeys(curve.lost) for name, curve in curves.items()}
    return losses | ({"facts": facts} if facts else {})


def table(curves: Curves, parts: int | None) -> str:
    """Mean loss in `parts` of the common steps; differences of the others to the first run's."""
    steps = sorted(set.intersection(*(set(curve.losses) for curve in curves.values())))
    if not steps:
        raise ValueError("the runs have no step in common")
    parts = min(_PARTS, len(steps)) if parts is None else parts
    if not 1 <= parts <= len(steps):
        raise ValueError(f"--parts {parts}: must be 1 to {len(steps)}, the steps of all runs")
    first, *others = curves
    heads = [first, *(f"{name} - {first}" for name in others)]
    widths = [max(12, len(head)) for head in heads]

    def row(left: str, cells: Sequence[str]) -> str:
        return "  ".join([left, *(c.rjust(w) for c, w in zip(cells, widths, strict=True))])

    lines = [row(f"{'steps':>13}", heads)]
    for i in range(parts):
        some = steps[i * len(steps) // parts : (i + 1) * len(steps) // parts]
        means = [sum(c.losses[s] for s in some) / len(some) for c in curves.values()]
        apart = [f"{mean - means[0]:+.4f}" for mean in means[1:]]
        lines.append(row(f"{some[0]:>6}-{some[-1]:<6}", [f"{means[0]:.4f}", *apart]))
    return "\n".join(lines)


def plot(curves: Curves, path: Path, title: str) -> None:
    """Losses, their running means, and below these how far they are from the first run's."""
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
    window = min(_MEAN_OF, max(1, fewest // 10))
    means = {name: running(curve.losses, window) for name, curve in curves.items()}
    first, *_ = means
    farthest = 0.0  # but for the first fifth, where losses fall fast and are far apart
    for i, (name, mean) in enumerate(means.items()):
        losses, colour = curves[name].losses, f"C{i}"
        line = {"color": colour, "linestyle": "-" if i == 0 else "--"}
        line |= {"marker": "o", "markersize": 4} if len(mean) <= _FEW else {}
        if window > 1:
            above.plot(list(losses), list(losses.values()), color=colour, alpha=0.2, linewidth=0.8)
        above.plot(list(mean), list(mean.values()), label=name, **line)
        if several:
            common = [step for step in mean if step in means[first]]
            apart = [mean[s] - means[first][s] for s in common]
            below.plot(common, apart, **line)
            farthest = max(farthest, *map(abs, apart[len(apart) // 5 :]))
    every = [loss for curve in curves.values() for loss in curve.losses.values()]
    steep = 0 < _STEEP * min(every) < max(every)
    above.set(ylabel="loss (nats a token)", yscale="log" if steep else "linear")
    above.legend(title=f"mean of {window} steps" if window > 1 else None)
    if several:
        below.set_title(f"minus {first}", fontsize="medium", loc="left")
        if farthest:
            below.set_ylim(-1.3 * farthest, 1.3 * farthest)
    below.set_xlabel("step")
    if len(means[first]) == 1:  # no range to place ticks in
        (step,) = means[first]
        below.set_xlim(step - 1, step + 1)
    below.xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle(title or "training loss", fontsize="medium", wrap=True)
    figure.savefig(path, dpi=120)
    pictures.close(figure)


if __name__ == "__main__":
    sys.exit(main())
