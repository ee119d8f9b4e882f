"""What a run reads of each data source: the table of the start page, and bytes behind its tokens.

Built by `moe.data.datasets` from files that were checked, before anything is read of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """The training or validation part of one source, and how much of it is read."""

    name: str
    """Last parts of its prefix, or `embedded`."""
    weight: float
    """Share of the samples, of 1."""
    documents: int
    """Of the part."""
    tokens: int
    """Of the part."""
    epoch_samples: int
    """Samples in one epoch of the part."""
    samples: float
    """Read of it: by the whole run, or by each validation."""
    bytes_per_token: float | None
    """UTF-8 bytes of text over tokens, ends of documents counted as tokens; None if not known."""

    @property
    def epochs(self) -> float:
        """How often the part is read, by the whole run or by each validation."""
        return self.samples / self.epoch_samples


def table(training: Sequence[Source], validation: Sequence[Source]) -> str:
    """A row for each source and part; empty for random tokens, which have neither end nor epoch."""
    rows = [("data source", "part", "weight", "documents", "tokens", "epochs")]
    for part, sources in (("training", training), ("each validation", validation)):
        rows += [
            (
                s.name,
                part,
                f"{s.weight:.1%}",
                f"{s.documents:,}",
                f"{s.tokens:,}",
                f"{s.epochs:,.2f}" if s.epochs >= 0.01 else f"{s.epochs:.1g}",
            )
            for s in sources
        ]
    if len(rows) == 1:
        return ""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
