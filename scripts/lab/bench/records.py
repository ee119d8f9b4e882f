"""Results: a table on stdout, a JSON file with a line per result, a plot of the ratios."""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

_DIGITS = {"ms": 4, "p10": 4, "p90": 4, "tflops": 1, "gbs": 1, "ratio": 4, "bar": 4, "goal": 4}


@dataclass(frozen=True)
class Record:
    """One result, or why there is none."""

    suite: str
    shape: tuple[int, ...]
    side: str
    """Implementation or condition that was measured."""
    pass_name: str
    """Pass or operation."""
    mode: str = "graph"
    """`graph`: replays of a CUDA graph. `eager`: including host time. `host`: host time alone."""
    ms: float | None = None
    """Median; p10 and p90 are the spread of the rounds."""
    p10: float | None = None
    p90: float | None = None
    tflops: float | None = None
    ratio: float | None = None
    bar: float | None = None
    goal: float | None = None
    note: str = ""
    failed: bool = False
    """An error or a wrong result, not a missed bar."""
    gbs: float | None = None
    """Gigabytes per second that left a GPU."""
    ranks: tuple[float, ...] = ()
    """Medians of all ranks that measured together; `ms` is the largest."""

    @property
    def met(self) -> bool | None:
        """True if the bar was reached; None without a bar."""
        if self.ratio is None or self.bar is None:
            return None
        return self.ratio >= self.bar

    @property
    def verdict(self) -> str:
        if self.failed:
            return "FAILED"
        if self.met is None or self.ratio is None:
            return ""
        if self.met and self.goal is not None and self.ratio >= self.goal:
            return "goal"
        return "met" if self.met else "missed"


def to_json(facts: dict[str, Any], records: Iterable[Record]) -> str:
    """Text of the JSON file; empty fields are left out."""
    lines = []
    for record in records:
        fields = asdict(record) | {"met": record.met}
        fields = {
            {"pass_name": "pass"}.get(k, k): round(v, _DIGITS[k]) if k in _DIGITS and v else v
            for k, v in fields.items()
            if v is not None and (v or k not in ("note", "failed", "ranks"))
        }
        lines.append(json.dumps(fields, separators=(",", ":")))
    body = ",\n".join(lines)
    return f'{{"facts":{json.dumps(facts, separators=(",", ":"))},\n"records":[\n{body}\n]}}\n'


def write(path: Path, facts: dict[str, Any], records: Iterable[Record]) -> None:
    """Write the JSON file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(to_json(facts, records))
    temporary.replace(path)


def read(path: Path) -> tuple[dict[str, Any], list[Record]]:
    """Facts and records of such a file; ValueError if it is not one."""
    try:
        content = json.loads(path.read_text())
        records = []
        for line in content["records"]:
            fields = dict(line, shape=tuple(line["shape"]), pass_name=line["pass"])
            fields["ranks"] = tuple(line.get("ranks", ()))
            records.append(Record(**{k: v for k, v in fields.items() if k not in ("pass", "met")}))
        return content["facts"], records
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a file of this script: {error}") from error


def shape_text(shape: Sequence[int]) -> str:
    return ",".join(str(size) for size in shape)


def table(records: Sequence[Record]) -> str:
    """The printed table: a block for each suite and shape."""
    out = []
    for (suite, shape), group in groupby(records, key=lambda r: (r.suite, r.shape)):
        out.append(f"\n{suite} {shape_text(shape)}".rstrip())
        out.append(
            f"  {'side':<26}{'pass':<24}{'mode':<7}{'ms':>9}{'p10':>9}{'p90':>9}"
            f"{'TFLOP/s':>9}{'ratio':>8}{'bar':>8}{'goal':>8}"
        )
        out.extend(_line(record) for record in group)
    return "\n".join(out)


def _line(r: Record) -> str:
    def cell(value: float | None, width: int, digits: int) -> str:
        return f"{'' if value is None else format(value, f'.{digits}f'):>{width}}"

    times = "".join(cell(value, 9, 4) for value in (r.ms, r.p10, r.p90))
    rates = cell(r.tflops, 9, 1) + "".join(cell(value, 8, 3) for value in (r.ratio, r.bar, r.goal))
    rate = "" if r.gbs is None else f"{r.gbs:.0f} GB/s"
    remarks = "  ".join(part for part in (r.verdict, rate, r.note) if part)
    return f"  {r.side:<26}{r.pass_name:<24}{r.mode:<7}{times}{rates}  {remarks}".rstrip()


def summary(records: Sequence[Record]) -> str:
    """One line with the numbers of bars met, bars missed and failures."""
    judged = [r for r in records if r.met is not None]
    met, failed = sum(r.met is True for r in judged), sum(r.failed for r in records)
    return f"{met} of {len(judged)} bars met, {len(judged) - met} missed, {failed} failures"


def plot(path: Path, records: Sequence[Record], facts: dict[str, Any]) -> str:
    """Draw every ratio that has a bar; returns why nothing was drawn, or an empty string."""
    judged = [(r, r.ratio) for r in records if r.met is not None and r.ratio is not None]
    if not judged:
        return "nothing to plot: no result has a bar"
    try:
        import matplotlib
    except ImportError:
        return "no plot: matplotlib is not installed"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 1 + 0.24 * len(judged)))
    labels = [
        f"{r.suite} {shape_text(r.shape)} {r.pass_name} {r.side} {r.mode}".replace(" graph", "")
        for r, _ in judged
    ]
    positions = range(len(judged))
    colours = ["tab:green" if r.met else "tab:red" for r, _ in judged]
    axes.barh(positions, [ratio for _, ratio in judged], color=colours, height=0.7)
    for marks, colour, name in ((True, "black", "must"), (False, "tab:blue", "goal")):
        values = [(i, r.bar if marks else r.goal) for i, (r, _) in enumerate(judged)]
        xs = [(i, v) for i, v in values if v is not None]
        axes.scatter([v for _, v in xs], [i for i, _ in xs], marker="|", s=90, c=colour, label=name)
    axes.set_yticks(list(positions), labels, fontsize=6)
    axes.invert_yaxis()
    axes.axvline(1.0, color="grey", linewidth=0.5)
    axes.set_xlabel("time of the other side / our time")
    axes.legend(loc="lower right", fontsize=7)
    axes.set_title(f"suite, shape and pass, on {facts.get('device', 'a device not told')}")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return ""
