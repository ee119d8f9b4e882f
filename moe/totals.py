"""Totals of a step over all ranks, and their form on the device: one tensor, read once.

Legend: R ranks.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.parallel.dispatcher.capacity import Growth

PEAKS = 2  # number of parts of the row budget, whose largest used shares come first


class Sums(NamedTuple):
    """Sums over ranks, each fp64 [] and a view of one tensor."""

    loss: Tensor  # mean loss of the last pipeline stages
    ranks: Tensor  # 1 on a rank that has a loss
    mtp_loss: Tensor  # mean loss of multi-token prediction
    labels: Tensor  # labels of the global batch, once for each rank with a loss
    stopping: Tensor  # 1 on a rank that was asked to stop
    grad_squares: Tensor  # squared gradient norm

    @classmethod
    def zeros(cls, device: torch.device) -> tuple[Tensor, "Sums"]:
        """A tensor of zeros and the sums in it."""
        flat = torch.zeros(len(cls._fields), dtype=torch.float64, device=device)
        return flat, cls(*flat)


class Totals(NamedTuple):
    """Totals of a step over all ranks, identical on every rank."""

    loss: float  # mean over all labels of the global batch that count; NaN without one
    mtp_loss: float  # of the tokens further ahead, mean over distances; NaN without any label
    labels: int  # number of labels of the global batch that count, for the next token
    norm: float  # gradient norm before clipping; 0 without gradients
    stopping: bool  # a rank was asked to stop
    reruns: tuple[Growth, ...]  # enlarged capacities, for each of which the step was rerun
    ready_seconds_R: (
        Tensor  # seconds that each rank took until its device had the step: fp64, on the host
    )
    load: Tensor
    """Table of the routers since the last reset; empty without gradients."""
    max_logits: Tensor  # of each layer, fp64, on the host; -inf if not measured


def unpack(read: Tensor) -> tuple[list[float], list[float], Tensor]:
    """Parts of the tensor on the host, fp64 [peaks + sums + the rest]: peaks, sums and the rest."""
    end = PEAKS + len(Sums._fields)
    numbers = read[:end].tolist()
    return numbers[:PEAKS], numbers[PEAKS:], read[end:]


def totals_of(
    sums: list[float], rest: Tensor, reruns: tuple[Growth, ...], *, ranks: int, layers: int
) -> Totals:
    """Totals from the parts of their tensor.

    Args:
        sums: numbers of `Sums`, in their order.
        rest: fp64 [R + load + layers], on the host.
        reruns: enlarged capacities of the step.
        layers: number of layers with a largest logit; 0 if there are none in the tensor.
    """
    loss, with_loss, mtp_loss, labels, stopping, squares = sums
    count = round(labels / with_loss)
    ready_seconds_R, load, max_logits = rest.split([ranks, len(rest) - ranks - layers, layers])
    return Totals(
        loss=loss / with_loss if count else math.nan,
        mtp_loss=mtp_loss / with_loss,
        labels=count,
        norm=math.sqrt(squares),
        stopping=stopping > 0,
        reruns=reruns,
        ready_seconds_R=ready_seconds_R,
        load=load,
        max_logits=max_logits,
    )
