"""A validation: the mean loss, that of each data source, and the same as perplexity and bits.

A loss is the mean over the labels that count, so that the losses of the sources, by their labels,
add up to that of all. A sample's source is known on the host from its number; its losses come from
the last pipeline stage. They are added up by source on the device and over the ranks once a
validation, so that they are the same on every layout up to rounding.
Legend: N samples of a rank in one step, P data sources.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.moe.data.sources import Source
from phalanx.parallel.engine import sum_over_world


class SourceSums(NamedTuple):
    """Sums over the samples of a source."""

    loss: float
    labels: int
    """Labels that count."""
    samples: int
    """Counted once by each context rank."""


class SourceLosses:
    """Losses by source.

    Args:
        sources: P, how many there are.
        device: where the losses are.
    """

    def __init__(self, sources: int, device: torch.device) -> None:
        self._sums_3P = torch.zeros(3, sources, dtype=torch.float64, device=device)

    def add(self, sources_N: Sequence[int], samples_2N: Tensor | None) -> None:
        """Note the samples of a step.

        Args:
            sources_N: number of each sample's source.
            samples_2N: of each sample on this rank the sum of losses, and the labels that count;
                None where another rank has the same.
        """
        if samples_2N is None:
            return
        numbers_N = torch.tensor(sources_N, device=samples_2N.device)
        of_NP = torch.nn.functional.one_hot(numbers_N, self._sums_3P.shape[1]).double()
        # A product, since its sums have one order; those of index_add_ have none on a GPU.
        sums_3N = torch.cat((samples_2N, torch.ones_like(samples_2N[:1])))
        self._sums_3P += sums_3N.double() @ of_NP

    def totals(self) -> list[SourceSums]:
        """By source, over all ranks. Collective."""
        sums_P3 = sum_over_world(self._sums_3P).t().tolist()
        return [SourceSums(loss, round(labels), round(n)) for loss, labels, n in sums_P3]


def scores(
    steps: Sequence[tuple[float, int]], sources: Sequence[Source], totals: Sequence[SourceSums]
) -> dict[str, float]:
    """What a validation is recorded as.

    Args:
        steps: mean loss of each step in nats a label, and the labels that count.
        sources: of the validation data; none for random tokens.
        totals: of `SourceLosses`, for several sources.

    Returns:
        `valid_loss`, `valid_perplexity` and `valid_labels`, and `valid_bits_per_byte` where the
        bytes of text are known; of each of several sources that had samples the same, with / and
        its name behind, and of one without labels these alone. Bits per byte are bits a token over
        the source's bytes a token, of its whole part. Empty without any label.
    """
    most = max(labels for _, labels in steps)
    if not most:
        return {}
    # By shares of the largest step: of steps with as many labels the mean is the plain one.
    shares = [(loss, labels / most) for loss, labels in steps if labels]
    mean = sum(loss * share for loss, share in shares) / sum(share for _, share in shares)
    count = sum(labels for _, labels in steps)
    if len(sources) < 2:
        return _scores(mean, count, sources[0].bytes_per_token if sources else None)
    read = [(s, *of) for s, of in zip(sources, totals, strict=True) if of.samples]
    sizes = [s.bytes_per_token for s, _, labels, _ in read if labels]
    known = [size for size in sizes if size is not None]
    weights = [labels for _, _, labels, _ in read if labels]
    whole = None
    if len(known) == len(sizes):
        whole = sum(size * n for size, n in zip(known, weights, strict=True)) / sum(weights)
    found = _scores(mean, count, whole)
    for source, loss, labels, _ in read:
        own: dict[str, float] = {"valid_labels": 0}
        if labels:
            own = _scores(loss / labels, labels, source.bytes_per_token)
        found |= {f"{key}/{source.name}": value for key, value in own.items()}
    return found


def _scores(loss: float, labels: int, bytes_per_token: float | None) -> dict[str, float]:
    perplexity = math.exp(loss) if loss < 700 else math.inf
    found = {"valid_loss": loss, "valid_perplexity": perplexity, "valid_labels": labels}
    if bytes_per_token:
        found["valid_bits_per_byte"] = loss / math.log(2) / bytes_per_token
    return found
