"""A validation: the mean loss, that of each data source, and the same as perplexity and bits.

A sample's source is known on the host from its number; its loss comes from the last pipeline stage.
Losses of all samples are added up by source on the device and over the ranks once a validation, so
that they are the same on every layout up to rounding.
Legend: N samples of a rank in one step, P data sources.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.moe.data.sources import Source
from phalanx.parallel.engine import sum_over_world


class Tally:
    """Losses by source.

    Args:
        sources: P, how many there are.
        device: where the losses are.
    """

    def __init__(self, sources: int, device: torch.device) -> None:
        self._sums_2P = torch.zeros(2, sources, dtype=torch.float64, device=device)

    def add(self, sources_N: Sequence[int], losses_N: Tensor | None) -> None:
        """Note the samples of a step.

        Args:
            sources_N: number of each sample's source.
            losses_N: mean loss of each sample's tokens on this rank; None but on the last stage.
        """
        if losses_N is None:
            return
        numbers_N = torch.tensor(sources_N, device=losses_N.device)
        of_NP = torch.nn.functional.one_hot(numbers_N, self._sums_2P.shape[1]).double()
        # A product, since its sums have one order; those of index_add_ have none on a GPU.
        ones_N = torch.ones_like(losses_N)
        self._sums_2P += torch.stack((losses_N, ones_N)).double() @ of_NP

    def totals(self) -> list[tuple[float, float]]:
        """Sum of losses and weight of the samples by source, over all ranks. Collective."""
        sums_P, counts_P = sum_over_world(self._sums_2P).tolist()
        return list(zip(sums_P, counts_P, strict=True))


def scores(
    mean: float, sources: Sequence[Source], totals: Sequence[tuple[float, float]]
) -> dict[str, float]:
    """What a validation is recorded as.

    Args:
        mean: loss over all samples, in nats a token.
        sources: of the validation data; none for random tokens.
        totals: of `Tally`, for several sources.

    Returns:
        `valid_loss` and `valid_perplexity`, and `valid_bits_per_byte` where the bytes of text are
        known; of each of several sources that had samples the same, with / and its name behind.
        Bits per byte are bits a token over the source's bytes a token, of its whole part.
    """
    if len(sources) < 2:
        return _scores(mean, sources[0].bytes_per_token if sources else None)
    read = [(s, loss, n) for s, (loss, n) in zip(sources, totals, strict=True) if n]
    sizes = [s.bytes_per_token for s, _, _ in read]
    known = [size for size in sizes if size is not None]
    weights = [n for _, _, n in read]
    whole = None
    if len(known) == len(sizes):
        whole = sum(size * n for size, n in zip(known, weights, strict=True)) / sum(weights)
    found = _scores(mean, whole)
    for source, loss, n in read:
        own = _scores(loss / n, source.bytes_per_token)
        found |= {f"{key}/{source.name}": value for key, value in own.items()}
    return found


def _scores(loss: float, bytes_per_token: float | None) -> dict[str, float]:
    perplexity = math.exp(loss) if loss < 700 else math.inf
    found = {"valid_loss": loss, "valid_perplexity": perplexity}
    if bytes_per_token:
        found["valid_bits_per_byte"] = loss / math.log(2) / bytes_per_token
    return found
