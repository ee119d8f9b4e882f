"""Runs of a comparison, and the row that summarizes the runs of a point."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Run:
    """Result of one run."""

    point: int  # from 0
    repeat: int  # from 0
    figures: dict[str, float]  # see `launch.figures`; empty for a run that failed
    reason: str = ""  # why the run failed; empty if it did not
    commit: str = "unknown"  # commit of the tree that ran
    seconds: float = 0.0  # wall time of the run, including its start


@dataclass
class Row:
    """Means over the runs of a point; None for figures that no run has."""

    label: str
    runs: int  # number of successful runs
    tokens_per_second_per_gpu: float | None = None
    tokens_per_second_per_gpu_sd: float | None = None  # None for a single run
    tokens_per_second_per_gpu_steps_sd: float | None = None  # over the counted steps of a run
    speedup: float | None = None  # rate over that of the first point
    tflops_per_gpu: float | None = None
    mfu: float | None = None  # model FLOP utilization, a fraction
    memory: float | None = None  # largest peak, GiB
    loss: float | None = None  # nats per token at the last step
    loss_difference: float | None = None  # loss minus that of the first point
    loss_differs: bool = False  # true if the loss differs by more than the tolerance
    exposed_communication: float | None = None  # exposed share of the step, a fraction
    load_max: float | None = None  # tokens of the busiest expert over the mean, in the worst layer
    rank_load: float | None = None  # rows of the busiest rank over the mean
    dead_experts: float | None = None  # number of experts without a token, over all layers
    notes: list[str] = field(default_factory=list)


def rows(labels: Sequence[str], runs: Sequence[Run], tolerance: float) -> list[Row]:
    """A row for each point; `runs` are in any order, and a point may have none yet.

    `tolerance`: relative difference to the first point's loss above which a point is flagged.
    """
    out: list[Row] = []
    for number, label in enumerate(labels):
        mine = [run for run in runs if run.point == number]
        good = [run.figures for run in mine if not run.reason]
        row = Row(label, len(good))
        out.append(row)
        for key in _MEANS:
            values = [figures[key] for figures in good if key in figures]
            if values and (key != "tflops_per_gpu" or "memory_total" in good[0]):
                setattr(row, key, statistics.fmean(values))
        within = [figures[_STEPS_SD] for figures in good if _STEPS_SD in figures]
        if within:
            row.tokens_per_second_per_gpu_steps_sd = statistics.fmean(within)
        rates = [figures["tokens_per_second_per_gpu"] for figures in good]
        if len(rates) > 1:
            row.tokens_per_second_per_gpu_sd = statistics.stdev(rates)
        row.memory = max((figures["memory"] for figures in good), default=None)
        _compare(row, out[0], tolerance)
        reruns = sum(figures["reruns"] for figures in good)
        if reruns:
            row.notes.append(f"{reruns:.0f} counted steps ran twice (row budget)")
        row.notes += [f"FAILED: {run.reason}" for run in mine if run.reason]
        if not mine:
            row.notes.append("not run yet")
    return out


_MEANS = (
    *("tokens_per_second_per_gpu", "tflops_per_gpu", "mfu", "loss", "exposed_communication"),
    *("load_max", "rank_load", "dead_experts"),
)
_STEPS_SD = "tokens_per_second_per_gpu_sd"


def _compare(row: Row, first: Row, tolerance: float) -> None:
    mine, other = row.tokens_per_second_per_gpu, first.tokens_per_second_per_gpu
    if mine is None or other is None or row.loss is None or first.loss is None:
        return
    row.speedup = mine / other
    row.loss_difference = row.loss - first.loss
    row.loss_differs = abs(row.loss_difference) > tolerance * abs(first.loss)
    if row.loss_differs:
        remark = "faster, but with another loss" if row.speedup > 1 else "another loss"
        row.notes.append(f"{remark}: more than {tolerance:.2%} from the first point's")
