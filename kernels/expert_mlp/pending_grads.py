"""Weight gradients that go to the buffers of parameters, now or later in the step."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.kernels import wgrad_queue
from phalanx.kernels.expert_mlp import main_grad
from phalanx.kernels.expert_mlp.interfaces import Experts
from phalanx.kernels.expert_mlp.main_grad import Buffer
from phalanx.kernels.expert_mlp.mlp_spec import MLPWeights
from phalanx.kernels.expert_mlp.weight_grads import WeightGrads


@torch.no_grad()
def weight_gradients(
    work: WeightGrads, weights: MLPWeights, experts: Experts, buffers: Sequence[Buffer | None]
) -> list[Tensor | None]:
    """Gradients of w1, w2, b1 and b2.

    Args:
        work: result of `data_gradients`, which frees its operands: the largest tensors of the
            backward pass after the gradient of h.
        weights: of the experts.
        experts: those of `work`.
        buffers: destinations; None: new tensors.
    """
    grads, dtype = experts.weight_grads(work, weights, buffers), weights.w1.dtype
    return [_cast(grad, dtype, buffer) for grad, buffer in zip(grads, buffers, strict=True)]


@dataclass(frozen=True)
class PendingGrads:
    """Weight gradients of a backward pass: a `wgrad_queue.PairedWork` if all go to buffers."""

    work: WeightGrads
    weights: MLPWeights
    experts: Experts
    accumulated: Sequence[Tensor | None]
    """Parameters with a buffer, of w1, w2, b1 and b2; None for others."""

    @property
    def parameters(self) -> list[Tensor]:
        """Parameters with a buffer."""
        return [p for p in self.accumulated if p is not None]

    def __call__(self) -> list[Tensor | None]:
        """Gradients of w1, w2, b1 and b2."""
        grads = weight_gradients(self.work, self.weights, self.experts, self._buffers())
        self._added()
        return grads

    def run_with(self, later: "PendingGrads") -> None:
        """Write the sums of both to the buffers."""
        self.work.write_with(later.work, self._buffers())
        self._added()

    def _buffers(self) -> list[Buffer | None]:
        return [p if p is None else main_grad.buffer(p) for p in self.accumulated]

    def _added(self) -> None:
        for parameter in self.parameters:
            main_grad.added(parameter)


def accumulate_or_defer(
    pending: PendingGrads, needs: Sequence[bool], inputs_persist: bool
) -> list[Tensor | None]:
    """The backward pass's results for w1, w2, b1 and b2.

    Args:
        pending: computes them.
        needs: which gradients are wanted.
        inputs_persist: the operands stay, so that they may be computed later.
    """
    parameters = pending.accumulated
    wanted = [p for need, p in zip(needs, parameters, strict=True) if need]
    if inputs_persist and wanted and not any(p is None for p in wanted):
        grads: list[Tensor | None] = [None] * len(parameters)
        wgrad_queue.submit_paired(pending)
    else:
        grads = pending()
    return [
        grad if p is None else main_grad.arrival(p)
        for grad, p in zip(grads, parameters, strict=True)
    ]


def _cast(grad: Tensor | None, dtype: torch.dtype, buffer: Buffer | None) -> Tensor | None:
    """A gradient in the dtype of the weights, unless it is in a buffer, where nobody reads it."""
    return grad if grad is None or buffer is not None else grad.to(dtype)
