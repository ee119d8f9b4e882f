"""Implementations of a module that are timed in turns, and compared with ours."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from phalanx.scripts.lab.bench.timing import Bench, Case, Timings

HEAD = (
    "| part | implementation | mode | ms | tokens/s | time / ours | difference or note |\n"
    "|---|---|---|---:|---:|---:|---|"
)
OURS = "phalanx"


class Comparison:
    """Forward and backward of several sides; the first that is added is ours.

    `modes` are those in which calls of `tokens` are timed.
    """

    def __init__(
        self, bench: Bench, name: str, tokens: int, modes: Sequence[str] = ("eager", "graph")
    ) -> None:
        self.timings: Timings = bench.timings(name, ())
        self.tokens = tokens
        self.modes = tuple(m for m in modes if m == "eager" or bench.mode == "graph")
        self._ours: Tensor | None = None
        self._gaps: dict[str, str] = {}

    def add(
        self,
        side: str,
        forward: Callable[[], Tensor],
        leaves: Sequence[Tensor],
        *,
        captured: bool = True,
    ) -> None:
        """Add a side, whose gradients of `leaves` are computed and dropped.

        `forward` returns the output; not `captured`: the host waits for the device.
        """

        def both() -> None:
            out = forward()
            torch.autograd.grad(out, leaves, _gradient(out), allow_unused=True)

        for mode in self.modes:
            if captured or mode == "eager":
                case = Case(side, "both", both, mode=mode, ours=side.startswith(OURS))
                self.timings.add(case)
        try:
            with torch.no_grad():
                out = forward().float()
        except Exception:
            return  # the timings have the reason
        if self._ours is None:
            self._ours = out
        gap = (out - self._ours).abs().max() / self._ours.abs().max()
        self._gaps[side] = f"{gap.item():.1e}"

    def run(self) -> None:
        self.timings.run()

    @property
    def ours_ran(self) -> bool:
        """True if ours was timed in every mode."""
        return all(self.timings.time(OURS, "both", mode) for mode in self.modes)

    def rows(self) -> list[str]:
        rows = []
        for side, gap in self._gaps.items():
            for mode in self.modes:
                time, ours = (self.timings.time(s, "both", mode) for s in (side, OURS))
                if time is None:
                    continue
                rate = f"{self.tokens / time.ms * 1000:,.0f}"
                ratio = "" if ours is None else f"{time.ms / ours.ms:.2f}"
                rows.append(
                    f"| {self.timings.suite} | {side} | {mode} | {time.ms:.2f} | {rate} | {ratio} "
                    f"| {gap} |"
                )
        for skipped in self.timings.skipped:
            note = skipped.note.replace("|", "/")
            head = f"| {self.timings.suite} | {skipped.side} | {skipped.mode}"
            rows.append(f"{head} | | | | {note} |")
        return rows


def _gradient(out: Tensor) -> Tensor:
    return torch.ones_like(out) if out.ndim == 0 else torch.full_like(out, 1e-3)
