"""Rows of a comparison as a Markdown table, a JSON file and a bar chart."""

import json
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from phalanx.configs.redact import redacted
from phalanx.scripts.lab.compare.launch import window
from phalanx.scripts.lab.compare.results import Row, Run, rows
from phalanx.scripts.lab.compare.sweep import write
from phalanx.scripts.output.pictures import pyplot


def heading(facts: dict[str, Any]) -> str:
    """Title of a comparison: `tiny, bf16, sequence 256, batch 32, on 2 CPU processes`."""
    summary, hardware = facts.get("what", ""), facts.get("hardware", "")
    return f"{summary}, on {hardware}" if summary and hardware else summary or hardware


def markdown(facts: dict[str, Any], table: Sequence[Row]) -> str:
    """Facts, table and an explanation of its numbers. Empty columns are left out."""
    steps, unit = facts["steps"], facts["unit"]
    columns: list[tuple[str, Callable[[Row], str]]] = [
        ("point", lambda r: r.label),
        ("runs", lambda r: str(r.runs)),
        (f"tokens/s/{unit}", lambda r: _cell(r.tokens_per_second_per_gpu, ",.0f")),
        ("+- runs", lambda r: _cell(r.tokens_per_second_per_gpu_sd, ",.0f")),
        ("+- steps", lambda r: _cell(r.tokens_per_second_per_gpu_steps_sd, ",.0f")),
        ("speed-up", lambda r: _cell(r.speedup, ".3f")),
        (f"TFLOP/s/{unit}", lambda r: _cell(r.tflops_per_gpu, ".1f")),
        ("MFU", lambda r: _cell(r.mfu, ".1%")),
        ("peak GiB", lambda r: _cell(r.memory, ".1f")),
        ("loss", lambda r: _cell(r.loss, ".4f")),
        ("to first", lambda r: _cell(r.loss_difference, "+.4f") + " (!)" * r.loss_differs),
        ("load max", lambda r: _cell(r.load_max, ".2f")),
        ("of ranks", lambda r: _cell(r.rank_load, ".2f")),
        ("dead", lambda r: _cell(r.dead_experts, ".0f")),
        ("exposed comm.", lambda r: _cell(r.exposed_communication, ".1%")),
        ("note", lambda r: "; ".join(r.notes).replace("|", "\\|")),
    ]
    filled = [[name, *map(cell, table)] for name, cell in columns]
    filled = [column for column in filled if any(column[1:])]
    widths = [0 if column[0] == "note" else max(map(len, column)) for column in filled]
    texts = [column[0] in ("point", "note") for column in filled]
    lines = [
        "| "
        + " | ".join(
            cell.ljust(width) if text else cell.rjust(width)
            for cell, width, text in zip(cells, widths, texts, strict=True)
        )
        + " |"
        for cells in zip(*filled, strict=True)
    ]
    rule = [
        "-" * max(width, 3) if text else "-" * (width - 1) + ":"
        for width, text in zip(widths, texts, strict=True)
    ]
    lines.insert(1, f"| {' | '.join(rule)} |")
    remarks = [heading(facts)] if heading(facts) else []
    remarks += [f"{key} {facts[key]}" for key in ("commit", "date") if facts.get(key)]
    remarks += [f"{name} {version}" for name, version in facts.get("versions", {}).items()]
    averaged = window(steps)
    explanation = (
        f"Rates are means of steps {averaged[0]} to {averaged[-1]} of {steps}, then over runs; +- "
        f"is the standard deviation over runs, or over these steps of a run. The loss is that of "
        f"step {steps}; (!) marks one more than {facts['tolerance']:.2%} from the first point's."
    )
    if any(row.load_max is not None for row in table):
        explanation += (
            " The load max is that of the busiest expert over the mean, in the worst layer; of "
            "ranks that of the busiest rank, on average over layers."
        )
    return "\n".join(
        [", ".join(remarks), "", f"    {facts['command']}", "", *lines, "", explanation]
    )


class Report:
    """Shows the runs of a comparison, in the folder `out`.

    `facts` are hardware, date, versions, command, steps, tolerance.
    """

    def __init__(self, out: Path, facts: dict[str, Any], labels: Sequence[str]) -> None:
        self._out, self._facts, self._labels = out, redacted(facts), redacted(list(labels))

    def write(self, runs: Sequence[Run]) -> str:
        """Write throughput.md and throughput.json; return the text of the former."""
        facts, table = self._of(runs)
        content = {"facts": facts, "points": self._labels, "runs": [asdict(run) for run in runs]}
        write(self._out / "throughput.json", content | {"rows": [asdict(row) for row in table]})
        text = markdown(facts, table)
        (self._out / "throughput.md").write_text(text + "\n", encoding="utf-8")
        return text

    def chart(self, runs: Sequence[Run]) -> str:
        """Draw throughput.png; return a line with its path, or why there is none."""
        path = self._out / "throughput.png"
        return plot(path, *self._of(runs)) or f"{path}, .md and .json beside it"

    def _of(self, runs: Sequence[Run]) -> tuple[dict[str, Any], list[Row]]:
        commits = ", ".join(dict.fromkeys(run.commit for run in runs))
        unit = unit_of(*(run.figures for run in runs))
        facts = self._facts | {"commit": commits, "unit": unit}
        return facts, rows(self._labels, runs, facts["tolerance"])


def unit_of(*figures: dict[str, float]) -> str:
    """Unit of a rate: GPU, or rank on a CPU."""
    return "GPU" if any("memory_total" in run for run in figures) else "rank"


def read(path: Path) -> tuple[dict[str, Any], list[str], list[Run]]:
    """Facts, labels and runs of a throughput.json; ValueError if it is something else."""
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text, parse_constant=_refuse)  # NaN and infinity, which are no JSON
        facts, runs = content["facts"], [Run(**run) for run in content["runs"]]
        if missing := {"steps", "tolerance", "command"} - set(facts):
            raise KeyError(*missing)
        return facts, list(content["points"]), runs
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a file of this script: {error!r}") from error


def _refuse(constant: str) -> float:
    raise TypeError(f"{constant} is no result")


def plot(path: Path, facts: dict[str, Any], table: Sequence[Row]) -> str:
    """Draw the rates, first point on top; return why nothing was drawn, or an empty string."""
    if not any(row.runs for row in table):
        return "no chart: no point has a result"
    try:
        pictures = pyplot()
    except ValueError as error:
        return f"no chart: {error}"
    labels = [_stacked(row.label) for row in table]
    # Reasons are not shortened: they name the option to set.
    reasons = ["" if row.runs else textwrap.fill("; ".join(row.notes), _WRAP) for row in table]
    lines = [
        1 + max(text.count("\n") for text in pair) for pair in zip(labels, reasons, strict=True)
    ]
    sizes = [max(1.0, 0.4 * n) for n in lines]
    positions = [sum(sizes[:i]) + size / 2 for i, size in enumerate(sizes)]
    figure, axes = pictures.subplots(figsize=(9, 1.4 + 0.45 * sum(sizes)), layout="constrained")
    rates = [row.tokens_per_second_per_gpu or 0.0 for row in table]
    spread = [_spread(row) for row in table]
    colours = ["tab:orange" if row.loss_differs else "tab:blue" for row in table]
    axes.barh(positions, rates, xerr=spread, color=colours, height=0.65, capsize=3)
    gap = 0.01 * max(rates)
    for y, row, rate, sd, reason in zip(positions, table, rates, spread, reasons, strict=True):
        text = f"{rate:,.0f}" + (f"  x{row.speedup:.2f}" if row.speedup else "")
        text += "  another loss" if row.loss_differs else ""
        axes.text(rate + sd + gap, y, reason or text, va="center", fontsize=8)
    axes.set_yticks(positions, labels, fontsize=8)
    axes.set_ylim(sum(sizes), 0)
    axes.set_xlim(0, 1.3 * max(map(sum, zip(rates, spread, strict=True))))
    axes.set_xlabel(f"tokens/s/{facts['unit']}{_of_bars(table)}")
    axes.set_title(heading(facts), fontsize=9, wrap=True)
    figure.savefig(path, dpi=150)
    pictures.close(figure)
    return ""


_WRAP = 80  # width of a line of a reason


def _stacked(label: str) -> str:
    if "=" not in label:
        return label
    return "\n".join(textwrap.fill(word, 40) for word in label.split())


def _spread(row: Row) -> float:
    """Standard deviation over runs; for a single run, over its steps."""
    over_runs = row.tokens_per_second_per_gpu_sd
    return (row.tokens_per_second_per_gpu_steps_sd or 0.0) if over_runs is None else over_runs


def _of_bars(table: Sequence[Row]) -> str:
    over = []
    if any(row.tokens_per_second_per_gpu_sd is not None for row in table):
        over.append("runs")
    if any(row.runs == 1 and row.tokens_per_second_per_gpu_steps_sd for row in table):
        over.append("the steps of a single run")
    return f" (bars: standard deviation over {', or over '.join(over)})" if over else ""


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
