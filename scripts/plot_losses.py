#!/usr/bin/env python
"""Loss curves of several runs over each other, and how far they are from the first one's.

    python scripts/plot_losses.py runs/fused runs/megatron [--parts N] [--json OUT] [--plot PNG]

A run is its folder, its metrics.jsonl, or a file that --json wrote (which holds several). The table
has the mean loss of each of N equal parts of the steps that all runs have. A curve is a mean over
some steps, drawn over the losses themselves: batches differ more than runs do.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from moe.sinks import read
from scripts.pictures import pyplot

Curves = dict[str, dict[int, float]]
"""Loss by step, by name of the run."""
_MEAN_OF = 20
"""Steps that a point of a curve is the mean of."""


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code: 0 done, 2 bad input."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--parts", type=int, default=10, metavar="N", help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the losses")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw them; needs matplotlib")
    args = parser.parse_args(argv)
    try:
        curves: Curves = {}
        for path in args.runs:
            curves |= load(path)
        print(table(curves, args.parts))
        if args.json:
            args.json.write_text(json.dumps(curves, separators=(",", ":")) + "\n")
        if args.plot:
            plot(curves, args.plot)
    except (ValueError, OSError) as error:
        print(f"plot_losses: {error}", file=sys.stderr)
        return 2
    return 0


def load(path: Path) -> Curves:
    """Curves of a run's folder, its metrics.jsonl, or a file of --json.

    Raises:
        ValueError: there are no losses.
    """
    if path.suffix == ".json":
        found = json.loads(path.read_text())
        return {name: {int(s): loss for s, loss in run.items()} for name, run in found.items()}
    path = path / "metrics.jsonl" if path.is_dir() else path
    losses = {r["step"]: round(r["loss"], 5) for r in read(path) if r.get("loss") is not None}
    if not losses:
        raise ValueError(f"{path} has no losses: give the folder of a run that has logged steps")
    return {path.resolve().parent.name if path.stem == "metrics" else path.stem: losses}


def table(curves: Curves, parts: int) -> str:
    """Mean loss in `parts` of the common steps; differences to the first run's."""
    steps = sorted(set.intersection(*(set(losses) for losses in curves.values())))
    if not 1 <= parts <= len(steps):
        raise ValueError(f"--parts {parts}: must be 1 to {len(steps)}, the steps of all runs")
    first, *others = curves
    lines = [" ".join([f"{'steps':>13}", f"{first:>12}", *(f"{name:>12}" for name in others)])]
    for i in range(parts):
        some = steps[i * len(steps) // parts : (i + 1) * len(steps) // parts]
        mean = {name: sum(run[s] for s in some) / len(some) for name, run in curves.items()}
        apart = [f"{mean[name] - mean[first]:>+12.4f}" for name in others]
        lines.append(" ".join([f"{some[0]:>6}-{some[-1]:<6}", f"{mean[first]:>12.4f}", *apart]))
    return "\n".join(lines)


def plot(curves: Curves, path: Path) -> None:
    """Losses, their running means, and below these how far they are from the first run's."""
    pictures = pyplot()
    figure, (above, below) = pictures.subplots(
        2, sharex=True, figsize=(8, 5), height_ratios=(3, 1), layout="constrained"
    )
    means = {name: _running(run) for name, run in curves.items()}
    first = next(iter(means.values()))
    for i, (name, run) in enumerate(curves.items()):
        colour, style = f"C{i}", "-" if i == 0 else "--"
        above.plot(list(run), list(run.values()), color=colour, alpha=0.2, linewidth=0.8)
        above.plot(list(means[name]), list(means[name].values()), style, color=colour, label=name)
        common = [step for step in means[name] if step in first]
        below.plot(common, [means[name][s] - first[s] for s in common], style, color=colour)
    above.set(ylabel="loss", yscale="log")
    above.legend(title=f"mean of {_MEAN_OF} steps")
    below.set(xlabel="step", ylabel="difference")
    figure.savefig(path, dpi=120)
    pictures.close(figure)


def _running(run: dict[int, float]) -> dict[int, float]:
    steps, losses = list(run), list(run.values())
    windows = range(_MEAN_OF, len(steps) + 1)
    return {steps[i - 1]: sum(losses[i - _MEAN_OF : i]) / _MEAN_OF for i in windows}


if __name__ == "__main__":
    sys.exit(main())
