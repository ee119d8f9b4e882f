"""Transfers between pipeline stages after a slot, all in one group of NCCL."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Arrived(NamedTuple):
    """Tensors for the passes of the next slot; None where there is no such pass."""

    input: Tensor | None = None  # input of the forward pass
    gradient: Tensor | None = None  # gradient of the output of the backward pass


class StageTransfers:
    """Exchange of activations and gradients with the next and the previous stage.

    Args:
        group: the stages.
        dtype: of activations and their gradients.
        device: of this rank.
    """

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device) -> None:
        self._group, self._dtype, self._device = group, dtype, device
        stage, stages = group.rank(), group.size()
        self._next, self._previous = (
            dist.get_global_rank(group, (stage + step) % stages) for step in (1, -1)
        )

    def __call__(
        self,
        shape: tuple[int, ...],
        *,
        output: Tensor | None,
        gradient: Tensor | None,
        awaits_input: bool,
        awaits_gradient: bool,
    ) -> Arrived:
        """Send and receive on the current stream, which waits for the end.

        Args:
            shape: shape of each tensor.
            output: output of a forward pass, for the next stage.
            gradient: gradient of the input of a backward pass, for the previous stage.
            awaits_input: the previous stage sends an output.
            awaits_gradient: the next stage sends a gradient.
        """
        arrived = Arrived(
            self._empty(shape, requires_grad=True) if awaits_input else None,
            self._empty(shape) if awaits_gradient else None,
        )
        # Activations before gradients on all ranks: with two stages both go to the same rank, where
        # messages are matched in the order of their calls.
        ways = [
            (dist.isend, output, self._next),
            (dist.irecv, arrived.input, self._previous),
            (dist.isend, gradient, self._previous),
            (dist.irecv, arrived.gradient, self._next),
        ]
        ops = [
            dist.P2POp(way, tensor.detach(), peer, self._group)
            for way, tensor, peer in ways
            if tensor is not None
        ]
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()
        return arrived

    def _empty(self, shape: tuple[int, ...], requires_grad: bool = False) -> Tensor:
        return torch.empty(
            shape, dtype=self._dtype, device=self._device, requires_grad=requires_grad
        )
