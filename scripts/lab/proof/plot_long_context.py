#!/usr/bin/env python
"""Draw what checkpoints have of a long context, with tables, from files of long_context.py.

    python scripts/lab/proof/plot_long_context.py before.json after.json --plot long_context.png

The left part has perplexity by position in a document: lines for documents that the model reads
whole, broken lines for the same tokens in pieces. The others have the share of needles by depth,
for which the right code is the likeliest of those in the text, and for which each of its tokens is
the likeliest of all.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # a checkout that is not installed

from phalanx.configs import programs
from phalanx.moe.text import aligned
from phalanx.scripts.lab.proof.needles import CODES, DEPTHS, FORMS
from phalanx.scripts.output.bad_input import reports_bad_input
from phalanx.scripts.output.pictures import pyplot
from phalanx.scripts.output.reader import may_leave

SCORES = {"chosen": f"right one of {CODES} codes", "exact": "greedy decoding gives the code"}

Report = dict[str, Any]


@may_leave
@reports_bad_input("plot_long_context")
def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code: 0 done, 2 bad input."""
    args = parser().parse_args(argv)
    reports = [json.loads(path.read_text()) for path in args.files]
    for path, report in zip(args.files, reports, strict=True):
        if not report.keys() >= {"loss", "needles", "context", "short"}:
            raise ValueError(f"{path} is no file of long_context.py")
    if len({(r["context"], r["short"], r["documents"]) for r in reports}) > 1:
        raise ValueError("the files are of other documents or contexts: measure all the same way")
    print(perplexity_table(reports))
    print()
    print(needle_table(reports))
    if args.plot is not None:
        plot(reports, args.plot)
    return 0


def parser() -> argparse.ArgumentParser:
    p = programs.parser("plot_long_context", __doc__)
    p.add_argument("files", nargs="+", type=Path, metavar="JSON")
    p.add_argument("--plot", type=Path, metavar="PNG", help="draw the picture")
    return p


def perplexity_table(reports: list[Report]) -> str:
    """Perplexities of all positions, of those of the first piece, and of the last half."""
    short, context = reports[0]["short"], reports[0]["context"]
    named = [f"from 0 to {short:,}", f"from {short:,}", f"from {context // 2:,}"]
    rows = [["perplexity", "reads", "all", *named]]
    for report in reports:
        for way, nats in report["loss"].items():
            size = context // len(nats)
            parts = [nats, nats[: short // size], nats[short // size :], nats[len(nats) // 2 :]]
            reads = "whole" if way == "whole" else f"pieces of {short:,}"
            rows.append([_name(report), reads, *(f"{_perplexity(part):.4g}" for part in parts)])
    return aligned(rows)


def needle_table(reports: list[Report]) -> str:
    rows = [["needles", "context", "form", "number", *SCORES.values(), "nats"]]
    for report in reports:
        for context in (report["short"], report["context"]):
            for form in FORMS:
                some = [
                    n for n in report["needles"] if (n["context"], n["form"]) == (context, form)
                ]
                shares = [f"{_mean(some, key):.1%}" for key in SCORES]
                nats = f"{_mean(some, 'nats'):.2f}"
                rows.append([_name(report), f"{context:,}", form, str(len(some)), *shares, nats])
    return aligned(rows)


def plot(reports: list[Report], path: Path) -> None:
    """Draw perplexity by position and needles by depth; needs matplotlib."""
    pictures = pyplot()
    figure, (left, *others) = pictures.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    for number, report in enumerate(reports):
        color, context, short = f"C{number}", report["context"], report["short"]
        for way, nats in report["loss"].items():
            size = context // len(nats)
            reads = "whole" if way == "whole" else f"in pieces of {short:,}"
            left.plot(
                [size * (i + 0.5) for i in range(len(nats))],
                [math.exp(x) for x in nats],
                "-o" if way == "whole" else "--",
                color=color,
                markersize=3,
                label=f"{_name(report)}, {reads}",
            )
        for axes, key in zip(others, SCORES, strict=True):
            for length, style in ((context, "-o"), (short, "--")):
                found = [n for n in report["needles"] if n["context"] == length]
                shares = [_mean([n for n in found if n["depth"] == d], key) for d in DEPTHS]
                label = f"{_name(report)}, {length:,} tokens"
                axes.plot(DEPTHS, shares, style, color=color, markersize=3, label=label)
    left.set(yscale="log", xlabel="position in the document, tokens", ylabel="perplexity")
    for which in (left.yaxis.set_major_formatter, left.yaxis.set_minor_formatter):
        which("{x:,g}")
    left.set_title(f"{reports[0]['documents']} held-out documents")
    others[0].axhline(1 / CODES, color="gray", linewidth=0.8, linestyle=":", label="by chance")
    for axes, title in zip(others, SCORES.values(), strict=True):
        axes.set(xlabel="depth of the code in the text", ylabel="share of needles")
        axes.set(ylim=(-0.03, 1.03), title=title)
    for axes in (left, *others):
        axes.grid(alpha=0.3)
    for axes in (left, others[0]):
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    pictures.close(figure)


def _name(report: Report) -> str:
    return f"step {report['step']:,}, trained at {report['trained_context']:,}"


def _perplexity(nats: Sequence[float]) -> float:
    return math.exp(sum(nats) / len(nats))


def _mean(needles: Sequence[dict[str, Any]], key: str) -> float:
    return sum(n[key] for n in needles) / len(needles) if needles else math.nan


if __name__ == "__main__":
    sys.exit(main())
