#!/usr/bin/env python
"""Draw what checkpoints have of a long context, with tables, from files of long_context.py.

    python scripts/lab/proof/plot_long_context.py before.json after.json --plot long_context.png

The left part has perplexity by position in a document: lines for documents that the model reads
whole, broken lines for the same tokens in pieces, whose points are of whole pieces. The others have
the share of needles for which the right code is the likeliest of those in the text, and for which
each of its tokens is the likeliest of all, by the tokens from the code to the question. A point is
of a third of the depths; its bar is where the share may lie (Wilson's interval, one standard
deviation).
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
THIRDS = [DEPTHS[i : i + len(DEPTHS) // 3] for i in range(0, len(DEPTHS), len(DEPTHS) // 3)]

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
    print()
    print(depth_table(reports))
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


def depth_table(reports: list[Report]) -> str:
    """Needles of both forms by the depth of the code."""
    spans = [f"{third[0]:g} to {third[-1]:g}" for third in THIRDS]
    named = [f"{short}, {span}" for short in ("right one", "greedy") for span in spans]
    rows = [["needles by depth", "context", *named]]
    for report in reports:
        for context in (report["short"], report["context"]):
            found = [_at(report, context, third) for third in THIRDS]
            shares = [f"{_mean(some, key):.1%}" for key in SCORES for some in found]
            rows.append([_name(report), f"{context:,}", *shares])
    return aligned(rows)


def plot(reports: list[Report], path: Path) -> None:
    """Draw perplexity by position and needles by distance; needs matplotlib."""
    pictures = pyplot()
    figure, (left, *others) = pictures.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    for number, report in enumerate(reports):
        color, context, short = f"C{number}", report["context"], report["short"]
        for way, nats in report["loss"].items():
            reads = "whole" if way == "whole" else f"in pieces of {short:,}"
            if way != "whole":
                size = max(1, short * len(nats) // context)
                nats = [sum(nats[i : i + size]) / size for i in range(0, len(nats), size)]
            size = context // len(nats)
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
                distances = [length * (1 - sum(third) / len(third)) for third in THIRDS]
                found = [_at(report, length, third) for third in THIRDS]
                shares = [_mean(some, key) for some in found]
                bars = [_bar(share, len(some)) for share, some in zip(shares, found, strict=True)]
                # Checkpoints side by side, as their bars overlap.
                places = [distance * 1.05**number for distance in distances]
                look = dict(color=color, markersize=4, capsize=2, elinewidth=0.8)
                label = f"{_name(report)}, in a context of {length:,}"
                sides = list(zip(*bars, strict=True))
                axes.errorbar(places, shares, sides, fmt=style, label=label, **look)
    left.set(yscale="log", xlabel="position in the document, tokens", ylabel="perplexity")
    for which in (left.yaxis.set_major_formatter, left.yaxis.set_minor_formatter):
        which("{x:,g}")
    context = reports[0]["context"]
    left.set_xticks([context * i // 8 for i in range(9)])
    left.xaxis.set_major_formatter("{x:,.0f}")
    left.tick_params(axis="x", labelsize=8)
    left.set_title(f"{reports[0]['documents']} held-out documents")
    others[0].axhline(1 / CODES, color="gray", linewidth=0.8, linestyle=":", label="by chance")
    for axes, title in zip(others, SCORES.values(), strict=True):
        axes.set(xlabel="tokens from the code to the question", ylabel="share of needles")
        axes.set(xscale="log", ylim=(-0.03, 1.03), title=title)
        axes.xaxis.set_major_formatter("{x:,.0f}")
    for axes in (left, *others):
        axes.grid(alpha=0.3)
    for axes in (left, others[0]):
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    pictures.close(figure)


def _name(report: Report) -> str:
    return f"step {report['step']:,}, trained at {report['trained_context']:,}"


def _at(report: Report, context: int, depths: Sequence[float]) -> list[dict[str, Any]]:
    return [n for n in report["needles"] if n["context"] == context and n["depth"] in depths]


def _bar(share: float, number: int) -> tuple[float, float]:
    """Lengths of a bar below and above a share of so many, by Wilson's interval of one sigma."""
    middle = (share + 0.5 / number) / (1 + 1 / number)
    half = math.sqrt(share * (1 - share) / number + 0.25 / number**2) / (1 + 1 / number)
    return max(0.0, share - middle + half), max(0.0, middle + half - share)


def _perplexity(nats: Sequence[float]) -> float:
    return math.exp(sum(nats) / len(nats))


def _mean(needles: Sequence[dict[str, Any]], key: str) -> float:
    return sum(n[key] for n in needles) / len(needles) if needles else math.nan


if __name__ == "__main__":
    sys.exit(main())
