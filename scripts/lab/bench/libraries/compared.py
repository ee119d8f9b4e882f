"""Two implementations of an operation: difference of their results, and the time of each.

An error of the library becomes the note of its rows; ours is still measured.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.scripts.lab.bench.timing import Bench, Case, Timings, reason

HEAD = (
    "| operation | library | pass | ours us | library us | library / ours | max difference "
    "| of values up to | note |\n|---|---|---|---:|---:|---:|---:|---:|---|"
)


class Gap(NamedTuple):
    """Difference of two results."""

    difference: float
    largest: float


@dataclass(frozen=True)
class Row:
    """A line of the table; None stands for values that were not measured."""

    operation: str
    library: str
    pass_name: str
    ours: float | None
    theirs: float | None  # milliseconds
    gap: Gap | None
    note: str = ""

    @property
    def failed(self) -> bool:
        """True if our side was not measured, or a result is NaN or infinite."""
        return self.ours is None or not self._finite

    @property
    def _finite(self) -> bool:
        return self.gap is None or all(map(math.isfinite, self.gap))

    def markdown(self) -> str:
        times = ["" if ms is None else f"{ms * 1000:.1f}" for ms in (self.ours, self.theirs)]
        ratio = f"{self.theirs / self.ours:.3f}" if self.ours and self.theirs else ""
        gap = ["", ""] if self.gap is None else [f"{x:.2e}" for x in self.gap]
        wrong = "" if self._finite else "FAILED: a result is NaN or infinite"
        note = "; ".join(filter(None, (wrong, self.note))).replace("|", "/")
        cells = (self.operation, self.library, self.pass_name, *times, ratio, *gap, note)
        return f"| {' | '.join(cells)} |"


class Operation(NamedTuple):
    """One implementation of a differentiable operation, with its data."""

    forward: Callable[[], Sequence[Tensor]]  # function that returns the differentiable results
    leaves: list[Tensor]
    grads: list[Tensor]  # gradients of the results
    shown: Callable[[Tensor], Tensor] = lambda x: x  # maps a result to the other side's layout

    def both(self) -> Sequence[Tensor]:
        """Run forward and backward; return gradients of the leaves."""
        return torch.autograd.grad(list(self.forward()), self.leaves, self.grads)

    def values(self) -> tuple[list[Tensor], list[Tensor]]:
        results = list(self.forward())
        shown = [self.shown(r).detach().clone() for r in results]
        return shown, list(torch.autograd.grad(results, self.leaves, self.grads))


def gap(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Gap:
    """Largest difference, and largest magnitude of ours; NaN if any value is NaN."""
    pairs = [(a.detach(), b.detach().reshape(a.shape)) for a, b in zip(ours, theirs, strict=True)]
    difference = torch.stack([(a - b).abs().max().float() for a, b in pairs]).max()
    largest = torch.stack([a.abs().max().float() for a, _ in pairs]).max()
    return Gap(difference.item(), largest.item())


def compare(
    bench: Bench,
    operation: str,
    library: str,
    make_ours: Callable[[], Operation],
    make_theirs: Callable[[], Operation],
) -> list[Row]:
    """Time forward and backward of both sides in CUDA graphs."""
    ours, note = make_ours(), ""
    gaps: Sequence[Gap | None] = (None, None)
    timings = bench.timings(operation, ())
    try:
        theirs = make_theirs()
        gaps = list(map(gap, ours.values(), theirs.values()))
        _add(timings, library, theirs, ours=False)
    except Exception as error:
        note = reason(error)
    _add(timings, "ours", ours)
    timings.run()
    rows = []
    for pass_name, result_gap in zip(("forward", "backward"), gaps, strict=True):
        rows.append(row(timings, library, pass_name, result_gap, note))
    return rows


def row(
    timings: Timings,
    library: str,
    pass_name: str,
    result_gap: Gap | None = None,
    note: str = "",
    mode: str = "",
) -> Row:
    """The row of a pass; reasons of calls that could not run are added to the note."""
    times = [timings.time(side, pass_name, mode) for side in ("ours", library)]
    ours, theirs = (None if time is None else time.ms for time in times)
    notes = filter(None, [note, *(record.note for record in timings.skipped)])
    return Row(timings.suite, library, pass_name, ours, theirs, result_gap, "; ".join(notes))


def _add(timings: Timings, name: str, operation: Operation, *, ours: bool = True) -> None:
    timings.add(Case(name, "forward", operation.forward, ours=ours))
    timings.add(Case(name, "both", operation.both, ours=ours))
