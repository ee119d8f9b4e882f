"""Two sides of an operation: how far their results are apart, and the time of each.

Both sides run once on the same data and are compared, then `scripts.bench.measure` times them in
turns. What a library raises becomes the note of its rows; ours is measured all the same.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.scripts.bench.measure import Bench, Sides, reason

HEAD = (
    "| operation | library | pass | ours us | library us | library / ours | max difference "
    "| of values up to | note |\n|---|---|---|---:|---:|---:|---:|---:|---|"
)


class Gap(NamedTuple):
    """How far two results are apart."""

    difference: float
    largest: float


@dataclass(frozen=True)
class Row:
    """A line of the table; what is None was not measured."""

    operation: str
    library: str
    what: str
    ours: float | None
    theirs: float | None
    """Milliseconds."""
    gap: Gap | None
    note: str = ""

    @property
    def failed(self) -> bool:
        """Whether our side was not measured, or a result is NaN or infinite."""
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
        cells = (self.operation, self.library, self.what, *times, ratio, *gap, note)
        return f"| {' | '.join(cells)} |"


class Operation(NamedTuple):
    """A differentiable operation, as one side has it, with data of its own."""

    forward: Callable[[], Sequence[Tensor]]
    """What it returns has gradients."""
    leaves: list[Tensor]
    grads: list[Tensor]
    """Of the results."""
    shown: Callable[[Tensor], Tensor] = lambda x: x
    """A result in the form of the other side's."""

    def both(self) -> Sequence[Tensor]:
        """Forward and backward; gradients of the leaves."""
        return torch.autograd.grad(list(self.forward()), self.leaves, self.grads)

    def values(self) -> tuple[list[Tensor], list[Tensor]]:
        """Results and gradients, of a single run."""
        results = list(self.forward())
        shown = [self.shown(r).detach().clone() for r in results]
        return shown, list(torch.autograd.grad(results, self.leaves, self.grads))


def gap(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Gap:
    """The largest difference, and the largest value of ours; NaN if there is one."""
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
    """Forward and backward of both sides, in CUDA graphs."""
    ours, gaps, note = make_ours(), (None, None), ""
    sides = bench.sides(operation, ())
    try:
        theirs = make_theirs()
        gaps = tuple(map(gap, ours.values(), theirs.values()))
        _take_part(sides, library, theirs, ours=False)
    except Exception as error:
        note = reason(error)
    _take_part(sides, "ours", ours)
    sides.run()
    rows = []
    for what, apart in zip(("forward", "backward"), gaps, strict=True):
        ms = both_ms(sides, library, what)
        rows.append(Row(operation, library, what, *ms, apart, note_of(sides, note)))
    return rows


def both_ms(sides: Sides, library: str, what: str, mode: str = "graph") -> list[float | None]:
    """Of our side and of the library's; None of one that was not measured."""
    found = [sides.time(side, what, mode) for side in ("ours", library)]
    return [None if time is None else time.ms for time in found]


def note_of(sides: Sides, note: str) -> str:
    """A note and why sides were lost."""
    return "; ".join(filter(None, [note, *(record.note for record in sides.lost)]))


def _take_part(sides: Sides, name: str, operation: Operation, *, ours: bool = True) -> None:
    sides.add(name, "forward", operation.forward, ours=ours)
    sides.add(name, "both", operation.both, ours=ours)
