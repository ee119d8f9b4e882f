"""Tables of docs/plan.md, which its tests compare with the page."""

from collections.abc import Sequence

from phalanx.moe.plan.cost.stages import StageMemory
from phalanx.moe.plan.cost.step_time import StepTime
from phalanx.scripts.lab.plan.points import Point

PARTS = ("weights", "gradients", "optimizer", "activations", "backward pass", "buffers", "reserve")
"""Parts of the memory of a rank, which add up to what it needs."""
WORK = {
    "products": ("gemm", "experts", "attention"),
    "elementwise": ("elementwise", "optimizer"),
    "exchange": ("exchange", "heads", "tensor", "context", "offload"),
    "gradients": ("gradients",),
    "waiting": ("skew", "gaps", "waiting"),
}
"""Parts of a step by what they are for: fields of `StepTime`."""


def row(one: Point) -> str:
    """A line of the table of clusters."""
    low, high = one.rate / (1 + one.error), one.rate * (1 + one.error)
    return (
        f"| {one.model} | {one.gpus:,} | {one.rate:,.0f} | {low:,.0f} to {high:,.0f} | "
        f"{one.natural:,.0f} | {one.days:.1f} | {one.memory_gib:.1f} | `{one.layout}` |"
    )


def clusters(points: Sequence[Point]) -> str:
    heads = ("model", "H100s", "tokens/s/GPU", "range", "natural routing", "days for 10^12 tokens")
    head = f"| {' | '.join(heads)} | GiB of a GPU | layout |"
    below = "| --- | ---: | ---: | --- | ---: | ---: | ---: | --- |"
    return "\n".join([head, below, *map(row, points)])


def memory_parts(stage: StageMemory, buffers: int, reserved_gib: float) -> dict[str, float]:
    """GiB of a rank by part (`PARTS`)."""
    w = stage.weights
    sizes = (
        w.parameter_bytes + w.padding_bytes,
        w.gradient_bytes,
        w.optimizer_bytes,
        stage.saved + stage.waiting,
        stage.backward + stage.validation + stage.cached,
        buffers,
    )
    return dict(zip(PARTS, [*(size / 2**30 for size in sizes), reserved_gib], strict=True))


def memory_table(stages: Sequence[StageMemory], buffers: int, reserved_gib: float) -> str:
    """GiB of a rank of the first, the largest and the last stage."""
    largest = max(stages, key=lambda stage: stage.peak)
    lines = [f"| stage | {' | '.join(PARTS)} | all |", f"| ---: |{' ---: |' * (len(PARTS) + 1)}"]
    for stage in sorted({stages[0].stage, largest.stage, stages[-1].stage}):
        parts = list(memory_parts(stages[stage], buffers, reserved_gib).values())
        lines.append(f"| {stage} | {' | '.join(f'{p:.1f}' for p in (*parts, sum(parts)))} |")
    return "\n".join(lines)


def time_parts(step: StepTime) -> dict[str, float]:
    """Shares of a step (`WORK`)."""
    return {name: sum(getattr(step, f) for f in parts) / step.total for name, parts in WORK.items()}


def time_table(steps: dict[str, StepTime]) -> str:
    lines = [f"| model | {' | '.join(WORK)} |", f"| --- |{' ---: |' * len(WORK)}"]
    for model, step in steps.items():
        shares = (f"{share:.0%}" for share in time_parts(step).values())
        lines.append(f"| {model} | {' | '.join(shares)} |")
    return "\n".join(lines)
