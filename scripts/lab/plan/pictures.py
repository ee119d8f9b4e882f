"""The three pictures of docs/plan.md."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from phalanx.moe.plan.cost.stages import StageMemory
from phalanx.moe.plan.cost.step_time import StepTime
from phalanx.scripts.lab.plan.points import MODELS, SIZES, Point
from phalanx.scripts.lab.plan.tables import PARTS, WORK, memory_parts, time_parts
from phalanx.scripts.output.pictures import pyplot

_COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999999")
"""Okabe and Ito's, which people who see few colors tell apart."""


def speed(points: Sequence[Point], path: Path) -> None:
    """Tokens a second of a whole cluster by its GPUs, with the range of each estimate."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7.5, 5), layout="constrained")
    for model, color, mark in zip(MODELS, _COLORS, "os^D", strict=False):
        some = [each for each in points if each.model == model]
        gpus, rates = [p.gpus for p in some], [p.rate * p.gpus for p in some]
        low = [rate / (1 + p.error) for p, rate in zip(some, rates, strict=True)]
        high = [rate * (1 + p.error) for p, rate in zip(some, rates, strict=True)]
        axes.fill_between(gpus, low, high, color=color, alpha=0.15, linewidth=0)
        axes.plot(gpus, rates, color=color, marker=mark, label=model)
    axes.set(xscale="log", yscale="log", xlabel="H100 GPUs", ylabel="tokens a second, all GPUs")
    axes.set_xticks(SIZES, [f"{size:,}" for size in SIZES])
    ticks = [2e5, 5e5, 1e6, 2e6, 5e6, 1e7]
    axes.set_yticks(ticks, ["0.2 M", "0.5 M", "1 M", "2 M", "5 M", "10 M"])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.set_title("Fastest layout that fits; bands: the range of the estimate")
    axes.legend(loc="upper left", frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def memory(
    stages: Sequence[StageMemory], buffers: int, limits: Mapping[str, float], path: Path, title: str
) -> None:
    """GiB of a rank of each pipeline stage by part; `limits`: `memory` and `reserve` of a GPU."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8.5, 5), layout="constrained")
    below = [0.0] * len(stages)
    places = [stage.stage for stage in stages]
    for part, color in zip(PARTS, _COLORS, strict=True):
        sizes = [memory_parts(stage, buffers, limits["reserve"])[part] for stage in stages]
        if max(sizes) > 0:
            axes.bar(places, sizes, 0.8, bottom=below, color=color, label=part)
        below = [a + b for a, b in zip(below, sizes, strict=True)]
    axes.axhline(limits["memory"], color="black", linestyle="--", linewidth=1)
    axes.text(places[0] - 0.4, limits["memory"] + 0.6, f"{limits['memory']:g} GiB of an H100")
    axes.set(xlabel="pipeline stage (its ranks are alike)", ylabel="GiB of a GPU")
    axes.set_ylim(0, 1.1 * limits["memory"])
    axes.set_xticks(places)
    axes.set_title(title)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def time(steps: Mapping[str, StepTime], path: Path, title: str) -> None:
    """Shares of a step by what they are for, a bar a model."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8.5, 3.6), layout="constrained")
    names = list(steps)[::-1]
    left = [0.0] * len(names)
    for part, color in zip(WORK, _COLORS, strict=False):
        shares = [100 * time_parts(steps[name])[part] for name in names]
        bars = axes.barh(names, shares, 0.7, left=left, color=color, label=part)
        texts = [f"{share:.0f}" if share >= 4 else "" for share in shares]
        on_dark = "white" if color == _COLORS[0] else "black"
        axes.bar_label(bars, texts, label_type="center", color=on_dark)
        left = [a + b for a, b in zip(left, shares, strict=True)]
    axes.set(xlim=(0, 100), xlabel="% of a step")
    axes.set_title(title)
    figure.legend(loc="outside lower center", ncols=len(WORK), frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
