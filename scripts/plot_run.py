#!/usr/bin/env python
"""One picture of a run: loss, gradient norm, learning rate, tokens/s, experts, goodput.

The largest attention logits and the scores of run.tasks are in it if they were measured.

    python scripts/plot_run.py runs/NAME [--plot PNG] [--title TEXT] [--steps FROM TO]

Reads metrics.jsonl of a finished or a live run. The picture goes to curves.png in its
folder, unless --plot is given. The load of a layer is that of its busiest expert over the
mean, 1 if all are equal; a dead expert had no token between two records. Goodput is the time that
trained over the time that passed, and what the rest went to is beside it. A table lists ranks whose
host launched steps late, and in how many of the records.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from phalanx.configs import programs
from phalanx.moe.report.goodput import TRAINING, goodput_line
from phalanx.moe.report.loggers import lines, read, start_facts
from phalanx.parallel.object_store import folder_argument
from phalanx.scripts.output.pictures import (
    centred_means,
    left_out,
    not_finite,
    pyplot,
    smoothing,
    title,
)
from phalanx.scripts.output.reader import may_leave

_FEW = 50  # steps up to which each is drawn as a point
_COLUMNS = 400  # most columns of an image; more records are grouped

Record = dict[str, Any]


@may_leave
def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code: 0 done, 2 bad input."""
    args = parser().parse_args(argv)
    path = args.run / "metrics.jsonl" if args.run.is_dir() else args.run
    try:
        records = chosen(read(path), path, args.steps)
        timed = records if args.steps else lines(path)  # the last line is that of the end
        spent = [r["seconds"] for r in timed if r.get("seconds")]
        print(summary(records, spent, hosts(path.resolve().parent)))
        out = args.plot or path.resolve().parent / "curves.png"
        plot(records, out, args.title or title(start_facts(path)))
        print(f"drawn: {out}")
    except OSError as error:
        print(f"plot_run: {error.filename or path}: {error.strerror or error}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"plot_run: {error}", file=sys.stderr)
        return 2
    except (ArithmeticError, AttributeError, LookupError, TypeError):
        print(f"plot_run: {path} has numbers that no run of this version writes", file=sys.stderr)
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    p = programs.parser("plot_run", __doc__)
    add = p.add_argument
    add("run", type=folder_argument, metavar="RUN", help="folder of a run, or its metrics.jsonl")
    add(
        "--plot",
        type=folder_argument,
        metavar="PNG",
        help="default: curves.png in the folder of the run",
    )
    add("--title", metavar="TEXT", help="default: what the run is")
    add("--steps", type=int, nargs=2, metavar=("FROM", "TO"), help="default: all")
    return p


def chosen(records: list[Record], path: Path, steps: list[int] | None) -> list[Record]:
    """The records from the first to the last of `steps`, or ValueError."""
    values = [r for r in records if steps is None or steps[0] <= r["step"] <= steps[1]]
    if not records:
        raise ValueError(f"{path} has no steps: give the folder of a run that has logged some")
    if not values:
        assert steps is not None
        known = f"{records[0]['step']} to {records[-1]['step']}"
        raise ValueError(f"--steps {steps[0]} {steps[1]}: the run has steps {known}")
    return values


# --- text -----------------------------------------------------------------------------------------


def hosts(folder: Path) -> dict[str, str]:
    """Host of each rank in the newest launch of a run; empty if that is not known."""
    launches = sorted(folder.glob("launches/*.yaml"), key=lambda path: path.stat().st_mtime)
    if not launches:
        return {}
    try:
        named = yaml.safe_load(launches[-1].read_text())["hosts"]
        values: dict[str, str] = {}
        for each in named:
            for part in str(each["ranks"]).split(", "):
                first, _, last = part.partition("-")
                ranks = range(int(first), int(last or first) + 1)
                values |= {str(rank): str(each["host"]) for rank in ranks}
        return values
    except (yaml.YAMLError, LookupError, TypeError, ValueError):
        return {}  # edited by hand, or of another version: ranks are shown by number


def summary(records: list[Record], spent: list[dict[str, float]], names: dict[str, str]) -> str:
    """Newest step, loss and rate, goodput, and a row for each late rank.

    `spent`: seconds by kind until each line of the run; `names`: host of each rank.
    """
    losses, rates = series(records, "loss"), series(records, "tokens_per_second_per_gpu")
    rows = [f"steps {records[0]['step']} to {records[-1]['step']}"]
    if losses:
        rows[0] += f", loss {next(iter(losses.values())):.4f} to {list(losses.values())[-1]:.4f}"
    if rates:
        rows[0] += f", {sorted(rates.values())[len(rates) // 2]:,.0f} tokens/s a rank (median)"
    if lost := not_finite(records, "loss"):
        rows.append(left_out(lost))
    if spent:
        rows.append(goodput_line(spent[-1]))
    timed = [r for r in records if "step_time" in r]
    late: dict[str, list[tuple[float, float]]] = {}
    for record in timed:
        for rank, seconds in record.get("late", {}).items():
            late.setdefault(rank, []).append((seconds, record["step_time"]))
    if late:
        rows.append(f"{'late rank':>9}  {'records':>8}  {'behind':>9}  {'of a step':>9}  host")
    for rank, values in sorted(late.items(), key=lambda item: -len(item[1])):
        behind, step_time = (sum(part) / len(values) for part in zip(*values, strict=True))
        often = f"{len(values) / len(timed):.0%}"
        numbers = f"{often:>8}  {behind:>7.3f} s  {behind / step_time:>9.0%}"
        rows.append(f"{rank:>9}  {numbers}  {names.get(rank, '?')}")
    return "\n".join(rows)


def series(records: list[Record], key: str) -> dict[int, float]:
    values = {r["step"]: r[key] for r in records if isinstance(r.get(key), int | float)}
    return {step: value for step, value in values.items() if math.isfinite(value)}


# --- picture --------------------------------------------------------------------------------------


def plot(records: list[Record], path: Path, heading: str) -> None:
    """Six panels over the same steps, two more each with logits, scores of tasks, and goodput."""
    pictures = pyplot()
    measured = [r for r in records if r.get("max_logits")]
    timed = [r for r in records if r.get("seconds")]
    tasks = list(dict.fromkeys(key for r in records for key in r if key.startswith("tasks")))
    rows = 3 + bool(measured) + bool(tasks) + bool(timed)
    size = dict(figsize=(13, 1 + 3 * rows), layout="constrained", sharex=True)
    figure, axes = pictures.subplots(rows, 2, **size)
    _curve(axes[0, 0], records, "loss", "loss (nats a token)")
    valid = series(records, "valid_loss")
    if valid:
        line = dict(color="C1", label="validation", clip_on=False)  # the last step is on the frame
        axes[0, 0].plot(list(valid), list(valid.values()), "o-", **line)
        for key in dict.fromkeys(key for record in records for key in record):
            if key.startswith("valid_loss/"):
                part = series(records, key)
                label = key.removeprefix("valid_loss/")
                axes[0, 0].plot(list(part), list(part.values()), ".-", linewidth=0.8, label=label)
        axes[0, 0].legend()
    _curve(axes[0, 1], records, "grad_norm", "gradient norm")
    _curve(axes[1, 0], records, "lr", "learning rate", smooth=False)
    _curve(axes[1, 1], records, "tokens_per_second_per_gpu", "tokens/s of a rank")
    axes[1, 1].set_ylim(bottom=0)
    layers = [r for r in records if r.get("layers")]
    if layers:
        load = [(r["step"], {n: of[0] for n, of in r["layers"].items()}) for r in layers]
        dead = [(r["step"], {n: of[1] for n, of in r["layers"].items()}) for r in layers]
        _image(figure, axes[2, 0], load, "load of the busiest expert", "x the mean", low=1.0)
        _image(figure, axes[2, 1], dead, "dead experts", "experts", colours="magma", counts=True)
    else:  # an older run without numbers per layer
        _curve(axes[2, 0], records, "load_max", "load of the busiest expert", smooth=False)
        _curve(axes[2, 1], records, "dead_experts", "dead experts", smooth=False)
    if measured:
        _curve(axes[3, 0], records, "max_logit", "largest attention logit", smooth=False)
        logits = [(r["step"], r["max_logits"]) for r in measured]
        _image(figure, axes[3, 1], logits, "largest attention logit of a layer", "logit")
    if tasks:
        panels = axes[3 + bool(measured)]
        _scores(panels[0], records, tasks, ("acc", "exact_match"), "tasks: share that is right")
        bits = ("bits_per_byte", "gold_bits_per_byte")
        _scores(panels[1], records, tasks, bits, "tasks: bits per byte")
    if timed:
        _curve(axes[-1, 0], records, "goodput", "goodput", smooth=False)
        axes[-1, 0].set_ylim(0, 1)
        _losses(axes[-1, 1], timed)
    for panel in axes.flat:
        panel.xaxis.get_major_locator().set_params(integer=True)
    for panel in axes[-1]:
        panel.set_xlabel("step")
    figure.suptitle(heading or "run", fontsize="medium", wrap=True)
    figure.savefig(path, dpi=110)
    pictures.close(figure)


def _curve(axes: Any, records: list[Record], key: str, name: str, smooth: bool = True) -> None:
    values = series(records, key)
    axes.set_title(name, fontsize="medium", loc="left")
    if not values:
        axes.text(0.5, 0.5, "not recorded", ha="center", transform=axes.transAxes)
        return
    # clip_on: images end at the last step, where the marker would be cut off.
    few = len(values) <= _FEW
    mark: dict[str, Any] = dict(marker="o", markersize=3, clip_on=False) if few else {}
    window = smoothing(len(values)) if smooth else 1
    if window > 1:
        axes.plot(list(values), list(values.values()), color="C0", alpha=0.3, linewidth=0.8)
        values = centred_means(values, window)
        mark["label"] = f"centred mean of {window} logged steps"
    axes.plot(list(values), list(values.values()), color="C0", **mark)
    if window > 1:
        axes.legend()
    low, high = min(values.values()), max(values.values())
    if key in ("loss", "grad_norm") and 0 < 10 * low < high:
        axes.set_yscale("log")


def _scores(
    axes: Any, records: list[Record], keys: list[str], wanted: Sequence[str], name: str
) -> None:
    """Scores of tasks; those of the moving averages are dashed."""
    dashed = any(key.startswith("tasks_ema/") for key in keys)
    name += " (dashed: moving averages)" if dashed else ""
    axes.set_title(name, fontsize="medium", loc="left")
    shown = [key for key in keys if key.rpartition("/")[2] in wanted]
    tasks = list(dict.fromkeys(key.split("/")[1] for key in shown))
    for key in shown:
        kind, task, _ = key.split("/")
        values, averaged = series(records, key), kind == "tasks_ema"
        look: dict[str, Any] = dict(color=f"C{tasks.index(task) % 10}", marker="o", markersize=3)
        look |= dict(linestyle="--" if averaged else "-", clip_on=False)
        label = None if averaged and f"tasks/{task}/{key.rpartition('/')[2]}" in keys else task
        axes.plot(list(values), list(values.values()), label=label, **look)
    if shown:
        axes.legend(fontsize="small", ncols=2)
    else:
        axes.text(0.5, 0.5, "not recorded", ha="center", transform=axes.transAxes)


def _losses(axes: Any, records: list[Record]) -> None:
    """Shares of the time up to each step that did not train, one over the other."""
    kinds = [k for k in records[-1]["seconds"] if k != TRAINING]
    passed = [sum(r["seconds"].values()) for r in records]
    shares = [
        [r["seconds"].get(kind, 0.0) / all_ for r, all_ in zip(records, passed, strict=True)]
        for kind in kinds
    ]
    axes.set_title("share of time that did not train", fontsize="medium", loc="left")
    if kinds:
        axes.stackplot([r["step"] for r in records], *shares, labels=kinds)
        axes.legend(fontsize="small", ncols=2)


def _image(
    figure: Any,
    axes: Any,
    steps: list[tuple[int, dict[str, float]]],
    name: str,
    unit: str,
    *,
    low: float = 0.0,
    colours: str = "viridis",
    counts: bool = False,
) -> None:
    """Draw layers over steps as colours, from the step and a number per layer of each record.

    A column shows the largest value of its records. The colour scale has the `unit` beside it, and
    starts at `low` or below; ticks of `counts` are integers.
    """
    names = sorted({int(layer) for _, values in steps for layer in values})
    size = -(-len(steps) // _COLUMNS)
    groups = [steps[i : i + size] for i in range(0, len(steps), size)]
    cells = [
        [max(values.get(str(layer), math.nan) for _, values in group) for group in groups]
        for layer in names
    ]
    starts = [group[0][0] for group in groups]
    # A cell spans the steps after the previous group's last record up to its own last record.
    edges = [starts[0] - 0.5, *(group[-1][0] + 0.5 for group in groups)]
    rows = [*(n - 0.5 for n in range(1, len(names) + 1)), len(names) + 0.5]
    values = [value for row in cells for value in row if math.isfinite(value)]
    axes.set_title(name, fontsize="medium", loc="left")
    if not values:
        axes.text(0.5, 0.5, "NaN or infinite", ha="center", transform=axes.transAxes)
        return
    largest, low = max(values), min([low, *values])
    image = axes.pcolormesh(edges, rows, cells, vmin=low, vmax=max(largest, low + 1), cmap=colours)
    shown = range(0, len(names), -(-len(names) // 16))
    # No label of the axis: it would stand beside the colour scale of the panel to the left.
    axes.set_yticks([i + 1 for i in shown], [f"{'layer ' * (not i)}{names[i]}" for i in shown])
    axes.invert_yaxis()
    range_text = "none" if counts and not largest else f"at most {largest:.4g}"
    axes.set_title(f"{name} ({range_text})", fontsize="medium", loc="left")
    bar = figure.colorbar(image, ax=axes, label=unit)
    if counts:
        bar.locator.set_params(integer=True)
        bar.update_ticks()


if __name__ == "__main__":
    sys.exit(main())
