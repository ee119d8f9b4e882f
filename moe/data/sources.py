"""Data sources of a run: the table of the start page, and bytes per token."""

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.configs.arithmetic.data_stages import Stage
from phalanx.moe.text import aligned, count


@dataclass(frozen=True)
class Source:
    """The training or validation part of one source, and the number of samples read."""

    name: str  # last parts of its prefix, or `embedded`
    weight: float  # fraction of the samples
    documents: int  # documents in the part
    tokens: int  # tokens in the part
    epoch_samples: int  # samples in one epoch of the part
    samples: float  # samples read by the complete run, or by each validation
    bytes_per_token: float | None
    """UTF-8 bytes of text over tokens, end tokens included; None if not known."""
    labels: float = 1.0  # fraction of the tokens that count by a loss mask; 1 without one
    stamp: str = ""  # digest of samples of its files, as `Corpus` has it

    @property
    def epochs(self) -> float:
        """Epochs of the part in the complete run, or in each validation."""
        return self.samples / self.epoch_samples


def stage_line(stage: Stage, names: Sequence[str]) -> str:
    """`from 80B tokens on: 50.0% web, 50.0% code`, without the sources that it does not read."""
    total = sum(stage.weights)
    shares = [
        f"{weight / total:.1%} {name}"
        for name, weight in zip(names, stage.weights, strict=True)
        if weight
    ]
    return f"from {count(stage.tokens)} tokens on: {', '.join(shares)}"


def table(training: Sequence[Source], validation: Sequence[Source]) -> str:
    """Table with a row for each source and part; empty for random tokens."""
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
    return aligned(rows, texts=2)
