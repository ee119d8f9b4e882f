#!/usr/bin/env python
"""The best learning rate of models of several widths, and the factor by which it moves.

    python scripts/lab/proof/plot_rates.py results/sweep_* [--plot PNG] [--json OUT]

A run is its folder: `config.yaml` has its rate, width and variants, `metrics.jsonl` its held-out
bits per byte at the end. Runs of one width, with or without `mup` (extras/transfer), are a series;
where a model has the base width itself, its runs belong to both kinds. The best rate is the lowest
point of the parabola through a series' best run and its two neighbours, on a logarithmic axis of
rates; if the best run is at an end of its series, it is the rate of that run, and a bound. The
factor is the largest best rate of a kind over its smallest.
"""

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # a checkout that is not installed

import yaml

from phalanx.configs import programs
from phalanx.moe.text import aligned
from phalanx.scripts.lab.proof.experiments import final_bits
from phalanx.scripts.output.bad_input import reports_bad_input
from phalanx.scripts.output.pictures import pyplot
from phalanx.scripts.output.reader import may_leave

MUP, PLAIN = "mup", "plain"
LEAST = 3  # runs of a series


class Series(NamedTuple):
    """Kind and width of the runs of a series."""

    kind: str
    width: int


class Best(NamedTuple):
    """Lowest point of a series."""

    rate: float
    bits: float
    at_end: bool  # it is the rate of the first or last run, beyond which a better one may lie


Points = dict[float, float]  # held-out bits per byte by rate


@may_leave
@reports_bad_input("plot_rates")
def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code: 0 done, 2 bad input."""
    args = parser().parse_args(argv)
    found = series(args.runs)
    short = [s for s, points in found.items() if len(points) < LEAST]
    if short or not found:
        which = f"{short[0].kind} of width {short[0].width}" if short else "what is given"
        raise ValueError(f"{which} has fewer than {LEAST} runs that ended with finite bits")
    print(table(found))
    for kind, factor in factors(found).items():
        print(f"{kind}: the best rate moves by a factor of {factor:.2f} over its widths")
    if args.json is not None:
        rows = [
            {**s._asdict(), "bits": {f"{r:g}": b for r, b in points.items()}}
            | {"best": best(points)._asdict()}
            for s, points in found.items()
        ]
        args.json.write_text(json.dumps({"series": rows, "factors": factors(found)}, indent=1))
    if args.plot is not None:
        plot(found, args.plot)
    return 0


def parser() -> argparse.ArgumentParser:
    p = programs.parser("plot_rates", __doc__)
    add = p.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN")
    add("--plot", type=Path, metavar="PNG", help="draw bits per byte against rates")
    add("--json", type=Path, metavar="OUT", help="write the points and the best rates")
    return p


def series(runs: Sequence[Path]) -> dict[Series, Points]:
    """Points of the runs that ended with finite bits, by series and in the order of rates."""
    found: dict[Series, Points] = defaultdict(dict)
    for run in runs:
        config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
        model, bits = config["model"], final_bits(run)
        bases = [int(v.partition(":")[2]) for v in model["variants"] if v.startswith("mup:")]
        kinds = [MUP] if bases else [PLAIN]
        if bases == [model["hidden"]]:
            kinds = [MUP, PLAIN]
        for kind in kinds if math.isfinite(bits) else ():
            found[Series(kind, model["hidden"])][float(config["optim"]["lr"])] = bits
    return {s: dict(sorted(found[s].items())) for s in sorted(found)}


def best(points: Points) -> Best:
    """Lowest point of at least three, by the parabola through the best one and its neighbours."""
    rates = sorted(points)
    i = min(range(len(rates)), key=lambda i: points[rates[i]])
    if i in (0, len(rates) - 1):
        return Best(rates[i], points[rates[i]], True)
    (x0, y0), (x1, y1), (x2, y2) = ((math.log(r), points[r]) for r in rates[i - 1 : i + 2])
    left, right = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    curve = (right - left) / (x2 - x0)
    if curve == 0:  # three equal runs
        return Best(rates[i], y1, False)
    x = (x0 + x1) / 2 - left / (2 * curve)
    return Best(math.exp(x), y0 + (x - x0) * (left + curve * (x - x1)), False)


def factors(found: Mapping[Series, Points]) -> dict[str, float]:
    """Largest best rate over the smallest, of each kind with more than one width."""
    rates: dict[str, list[float]] = defaultdict(list)
    for s, points in found.items():
        rates[s.kind].append(best(points).rate)
    return {kind: max(of) / min(of) for kind, of in rates.items() if len(of) > 1}


def table(found: Mapping[Series, Points]) -> str:
    """Bits per byte of all runs by rate, and the best rate of each series."""
    rates = sorted({rate for points in found.values() for rate in points})
    rows = [["rates", "width", *(f"{rate:g}" for rate in rates), "best rate"]]
    for s, points in found.items():
        low = best(points)
        bits = [f"{points[rate]:.4f}" if rate in points else "-" for rate in rates]
        rows.append([s.kind, str(s.width), *bits, f"{low.rate:.2e}{' (an end)' * low.at_end}"])
    return aligned(rows)


def plot(found: Mapping[Series, Points], path: Path) -> None:
    """Draw bits per byte against rates, a panel for each kind of several widths."""
    pictures, kinds = pyplot(), sorted(factors(found)) or sorted({s.kind for s in found})
    figure, panels = pictures.subplots(
        1, len(kinds), sharey=True, figsize=(5.5 * len(kinds), 4.5), squeeze=False
    )
    for panel, kind in zip(panels[0], kinds, strict=True):
        own = {s.width: points for s, points in found.items() if s.kind == kind}
        for width, points in own.items():
            (line,) = panel.plot([*points], [*points.values()], "o-", label=f"width {width}")
            panel.axvline(best(points).rate, color=line.get_color(), linestyle=":")
        panel.set(xscale="log", xlabel="optim.lr", title=kind)
        rates = sorted({rate for points in own.values() for rate in points})
        panel.set_xticks(rates, [f"{rate:g}" for rate in rates], rotation=45)
        panel.set_xticks([], minor=True)
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small")
    panels[0][0].set_ylabel("held-out bits per byte")
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pictures.close(figure)


if __name__ == "__main__":
    sys.exit(main())
