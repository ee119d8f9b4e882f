#!/usr/bin/env python
"""Coordinate check: how far steps move what tiny mixtures compute, by width, with mup and without.

    python scripts/lab/transfer/coordinate_check.py [--widths 64,128,256,512] [--steps 8]
        [--plot PNG] [--json OUT] [OVERRIDE ...]

Models of each width (heads and experts in proportion, two layers, fp32, on this CPU) train on the
same tokens of data=embedded by the engine of a run, with the same numbers of `optim` and
`model.init_std`: once with `model.variants=[mup:<smallest width>]` and once without. The table has
the mean absolute change of each kind of activation on a batch that is never trained on, and the
exponent of the width by which it grows: near 0 if the rates suit all widths. `router update` is
what the change of the router's weights alone adds to its logits. Overrides, as optim=muon, go to
all runs. The default takes half a minute on two cores.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # a checkout that is not installed

from phalanx.configs import programs
from phalanx.moe.report.console import quiet
from phalanx.moe.text import aligned
from phalanx.scripts.output.bad_input import reports_bad_input
from phalanx.scripts.output.pictures import pyplot
from phalanx.scripts.output.reader import may_leave

Found = dict[str, dict[int, list[dict[str, float]]]]
"""`with mup` or `without` -> width -> step -> kind -> change."""


@may_leave
@reports_bad_input("coordinate_check")
def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code: 0 done, 2 bad input."""
    args = parser().parse_args(argv)
    try:
        widths = sorted({int(width) for width in args.widths.split(",")})
    except ValueError:
        widths = []
    if len(widths) < 2 or any(width < 1 or width % 32 for width in widths):
        raise ValueError(f"--widths {args.widths}: give two or more multiples of 32, as 64,128,256")
    if args.steps < 1:
        raise ValueError(f"--steps {args.steps}: must be at least 1")
    found = measured(widths, args.steps, args.overrides)
    for name, runs in found.items():
        print(f"{name}, step {args.steps}")
        print(table(runs), end="\n\n")
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    if args.plot is not None:
        plot(found, args.plot)
    return 0


def parser() -> argparse.ArgumentParser:
    p = programs.parser("coordinate_check", __doc__)
    add = p.add_argument
    add("overrides", nargs="*", metavar="OVERRIDE", help="of all runs, as optim=muon")
    add("--widths", default="64,128,256,512", metavar="LIST", help="default: 64,128,256,512")
    add("--steps", type=int, default=8, metavar="N", help="default: 8")
    add("--plot", type=Path, metavar="PNG", help="draw changes against widths")
    add("--json", type=Path, metavar="OUT", help="write all changes")
    return p


def measured(widths: Sequence[int], steps: int, overrides: Sequence[str]) -> Found:
    """Changes of all widths; the base is the first."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    quiet()
    from phalanx.parallel.megatron.imports import importing_megatron

    with importing_megatron():
        from phalanx.extras.transfer import coordinates
        from phalanx.parallel import runtime
    here = runtime.start(seed=1, timeout=600, deterministic=False)
    try:
        return {
            name: {
                width: coordinates.changes(
                    coordinates.overrides(width, base, *overrides), here, steps
                )
                for width in widths
            }
            for name, base in (("with mup", widths[0]), ("without", 0))
        }
    finally:
        runtime.stop(here)


def table(runs: dict[int, list[dict[str, float]]]) -> str:
    """Changes after the last step, by kind and width."""
    from phalanx.extras.transfer.coordinates import slope

    rows = [["change of", *map(str, runs), "exponent"]]
    for kind in next(iter(runs.values()))[-1]:
        by_width = {width: steps[-1][kind] for width, steps in runs.items()}
        sizes = [f"{size:.4f}" for size in by_width.values()]
        rows.append([kind, *sizes, f"{slope(by_width):+.2f}"])
    return aligned(rows)


def plot(found: Found, path: Path) -> None:
    """Draw changes against widths, a panel for each kind and a line for each step."""
    pictures: Any = pyplot()
    kinds = list(next(iter(found["without"].values()))[-1])
    figure, axes = pictures.subplots(
        len(found), len(kinds), sharex=True, sharey="col", figsize=(2.5 * len(kinds), 5)
    )
    for row, (name, runs) in zip(axes, found.items(), strict=True):
        row[0].set_ylabel(f"{name}: mean |change|")
        steps = len(next(iter(runs.values())))
        for panel, kind in zip(row, kinds, strict=True):
            for step in range(steps):
                sizes = [changes[step][kind] for changes in runs.values()]
                color = pictures.cm.viridis(step / max(1, steps - 1))
                panel.plot([*runs], sizes, "o-", markersize=3, color=color)
            panel.set(xscale="log", yscale="log")
            panel.set_xticks([*runs], [str(width) for width in runs])
            panel.minorticks_off()
            panel.grid(alpha=0.3)
    for panel, kind in zip(axes[0], kinds, strict=True):
        panel.set_title(kind, fontsize="medium")
    for panel in axes[-1]:
        panel.set_xlabel("width")
    figure.suptitle("change after each step, from the first (dark) to the last (light)")
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pictures.close(figure)


if __name__ == "__main__":
    sys.exit(main())
