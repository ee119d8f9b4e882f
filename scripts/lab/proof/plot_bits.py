#!/usr/bin/env python
"""Curves of held-out bits per byte against tokens, FLOPs and seconds, of several runs.

    python scripts/lab/proof/plot_bits.py results/dense_adamw_1 results/moe_adamw_1 [--plot PNG]
        [--below BITS] [--json OUT]

A run is its folder or its metrics.jsonl. The first table has the end of each run: tokens, FLOPs,
seconds, bits per byte in total and by domain. The second one has what each run needed for the last
bits per byte of the first run, along straight lines between validations. FLOPs are those of the
start page. Seconds are those of steps, of waiting for data and of repeated steps, without start,
capture of graphs, validations and checkpoints. The picture is drawn if --plot names it.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # a checkout that is not installed

from phalanx.configs import programs
from phalanx.moe.report.loggers import is_finite, read, start_facts
from phalanx.moe.text import aligned, count, short_names
from phalanx.scripts.output.bad_input import reports_bad_input
from phalanx.scripts.output.pictures import common_title, pyplot
from phalanx.scripts.output.reader import may_leave

AXES = {"tokens": "tokens", "flops": "FLOPs", "seconds": "seconds"}  # by the fields of a point

_KEY = "valid_bits_per_byte"
_COUNTED = ("training", "data", "reruns")


@dataclass(frozen=True)
class Point:
    """A validation, and what training took until then."""

    tokens: float
    flops: float
    seconds: float
    bits: float  # held-out bits per byte of all domains
    domains: dict[str, float]  # held-out bits per byte by domain


@may_leave
@reports_bad_input("plot_bits")
def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code: 0 done, 2 bad input."""
    args = parser().parse_args(argv)
    paths = [path / "metrics.jsonl" if path.is_dir() else path for path in args.runs]
    names = short_names([str(path.resolve().parent) for path in paths])
    given = zip(names, paths, strict=True)
    runs = {name: points(path, median=args.median) for name, path in given}
    print(table(runs))
    print()
    print(reached_table(runs))
    if args.json is not None:
        content = {name: [asdict(point) for point in run] for name, run in runs.items()}
        args.json.write_text(json.dumps(content, indent=1) + "\n")
    if args.plot is not None:
        title = common_title([start_facts(path) for path in paths])
        plot(runs, args.plot, title, args.below)
    return 0


def parser() -> argparse.ArgumentParser:
    p = programs.parser("plot_bits", __doc__)
    add = p.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN")
    add("--median", action="store_true", help="seconds by the median step, not by all")
    add("--plot", type=Path, metavar="PNG", help="draw the curves")
    add("--below", type=float, metavar="BITS", help="draw what is below BITS per byte alone")
    add("--json", type=Path, metavar="OUT", help="write the points of the curves")
    return p


def points(path: Path, *, median: bool = False) -> list[Point]:
    """Validations of a metrics.jsonl by step, or ValueError if none has bits per byte.

    With `median` all steps take as long as the median of those that were logged.
    """
    records = read(path)
    found = [record for record in records if is_finite(record.get(_KEY))]
    # A step that validated and was not logged has no speed; FLOPs of a token are always the same.
    logged = [record for record in records if "tflops_per_gpu" in record]
    if not (found and logged):
        reason = "give a run with run.eval_interval on data of prepare_data.py"
        raise ValueError(f"{path} has no validation with bits per byte: {reason}")
    flops = 1e12 * logged[-1]["tflops_per_gpu"] / logged[-1]["tokens_per_second_per_gpu"]
    step = statistics.median(r["step_time"] for r in logged) if median else None
    return [_point(record, flops, step) for record in found]


def _point(record: dict[str, Any], flops: float, step: float | None) -> Point:
    counted = sum(record["seconds"].get(kind, 0.0) for kind in _COUNTED)
    seconds = counted if step is None else record["step"] * step
    prefix = f"{_KEY}/"
    domains = {k.removeprefix(prefix): v for k, v in record.items() if k.startswith(prefix)}
    return Point(record["tokens"], record["tokens"] * flops, seconds, record[_KEY], domains)


def table(runs: dict[str, list[Point]]) -> str:
    domains = sorted({name for run in runs.values() for name in run[-1].domains})
    rows = [["run", "tokens", "FLOPs", "seconds", "bits/byte", *domains]]
    for name, run in runs.items():
        end = run[-1]
        parts = [end.domains.get(domain) for domain in domains]
        bits = ["-" if part is None else f"{part:.4f}" for part in parts]
        spent = [count(round(end.tokens)), f"{end.flops:.2e}", f"{end.seconds:.1f}"]
        rows.append([name, *spent, f"{end.bits:.4f}", *bits])
    return aligned(rows)


def reached(run: list[Point], bits: float) -> dict[str, float] | None:
    """Tokens, FLOPs and seconds until a run has `bits` per byte for the first time, or None.

    They are interpolated linearly between two validations.
    """
    before = None
    for point in run:
        if point.bits <= bits:
            share = 1.0
            if before is not None:
                share = (before.bits - bits) / (before.bits - point.bits)
            first = before or point
            return {
                axis: (1 - share) * getattr(first, axis) + share * getattr(point, axis)
                for axis in AXES
            }
        before = point
    return None


def reached_table(runs: dict[str, list[Point]]) -> str:
    """Rows of what each run needs for the last bits per byte of the first one."""
    first, *_ = runs
    bits = runs[first][-1].bits
    rows = [[f"until {bits:.4f}", "tokens", "FLOPs", "seconds", "faster"]]
    whole = reached(runs[first], bits)
    assert whole is not None
    for name, run in runs.items():
        spent = reached(run, bits)
        if spent is None:
            rows.append([name, "-", "-", "-", "-"])
            continue
        numbers = [count(round(spent["tokens"])), f"{spent['flops']:.2e}"]
        faster = f"{whole['seconds'] / spent['seconds']:.2f}x" if spent["seconds"] else "-"
        rows.append([name, *numbers, f"{spent['seconds']:.1f}", faster])
    return aligned(rows)


def plot(runs: dict[str, list[Point]], path: Path, title: str, below: float | None = None) -> None:
    """Draw bits per byte against tokens, FLOPs and seconds, up to `below`; needs matplotlib."""
    pictures = pyplot()
    figure, axes = pictures.subplots(1, len(AXES), sharey=True, figsize=(12, 4.5))
    for panel, (field, name) in zip(axes, AXES.items(), strict=True):
        for label, run in runs.items():
            values = [getattr(point, field) for point in run]
            panel.plot(values, [p.bits for p in run], marker="o", markersize=3, label=label)
        panel.set(xlabel=name, xlim=(0, None))
        panel.grid(alpha=0.3)
    axes[0].set_ylabel("held-out bits per byte")
    if below is not None:
        axes[0].set_ylim(top=below)
    axes[0].legend(fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pictures.close(figure)


if __name__ == "__main__":
    sys.exit(main())
