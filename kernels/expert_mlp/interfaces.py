"""Interfaces of what takes part in a call of the expert MLP: exchanges, experts, rows in FP8.

Shape legend as in `kernels.expert_mlp.backend`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torch import Tensor

from phalanx.kernels.expert_mlp.backend import Backend
from phalanx.kernels.expert_mlp.calls import Rows
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.main_grad import Buffer
from phalanx.kernels.expert_mlp.mlp_spec import Layer, MLPWeights
from phalanx.kernels.expert_mlp.weight_grads import WeightGrads
from phalanx.kernels.quantize.blocks import Quantized


class Overlap(Protocol):
    """Exchanges with other GPUs that overlap one call of the expert MLP."""

    @property
    def ready(self) -> Tensor:
        """Flags that kernels wait for before they read rows of x, or backward of out's gradient."""
        ...

    def wait_rows(self) -> None:
        """Make the current stream wait until all those rows have arrived."""
        ...

    def start_sums(self, a_SF: Rows, hidden: int, plan: ExpertPlan, training: bool) -> Any:
        """Note that all rows of x have been read.

        Returns:
            The `signal` of the fc2 GEMM that follows.
        """
        ...

    def finish_sums(self) -> Tensor:
        """Send the rows of the GEMM that signals; others are sent at the end of this overlap.

        Returns:
            [N, D], to be read only at the end of this overlap.
        """
        ...

    def send_gradient(
        self, dx_SD: Tensor | None, dprob_NK: Tensor | None, plan: ExpertPlan
    ) -> Tensor | None:
        """Send gradients of expert rows, to be summed, and of probabilities.

        Called before the weight gradients are computed.

        Returns:
            [N, D], to be read only at the end of this overlap.
        """
        ...

    def tokens(self) -> Rows:
        """x in the backward pass, at its first use there."""
        ...

    def tokens_first(self) -> Rows:
        """x at the start of the backward pass, when the gradient of out has arrived too."""
        ...


class Experts(Protocol):
    """Experts of a plan in one call: those of the weights, alone or with others behind them."""

    @property
    def has_more(self) -> bool:
        """The plan has experts behind those of the weights."""
        ...

    def start(
        self, own: MLPWeights, first: Layer, wait_rows: Callable[[], None] | None
    ) -> Callable[[Backend], Backend]:
        """Start the forward pass, or the backward pass.

        Args:
            own: weights [L, ...].
            first: layer that runs first.
            wait_rows: waits for the rows that kernels read; None: they have arrived.

        Returns:
            Function from a backend for the experts of the weights to one for all experts.
        """
        ...

    def weight_grads(
        self, work: WeightGrads, own: MLPWeights, buffers: Sequence[Buffer | None]
    ) -> list[Tensor | None]:
        """Gradients of w1, w2, b1 and b2, None where they are not wanted.

        Args:
            work: operands of all experts.
            own: weights [L, ...].
            buffers: destinations; None: new tensors.
        """
        ...


class OwnExperts:
    """`Experts` of a plan for the experts of the weights alone."""

    has_more: ClassVar[bool] = False

    def start(
        self, own: MLPWeights, first: Layer, wait_rows: Callable[[], None] | None
    ) -> Callable[[Backend], Backend]:
        return unchanged

    def weight_grads(
        self, work: WeightGrads, own: MLPWeights, buffers: Sequence[Buffer | None]
    ) -> list[Tensor | None]:
        return work.all(buffers)


OWN = OwnExperts()


def unchanged(backend: Backend) -> Backend:
    """The backend itself."""
    return backend


@dataclass
class Fp8Inputs:
    """Rows received in FP8; autograd sees tensors of their shape without data in their place."""

    tokens: Quantized | None = None  # x
    gradient: Quantized | None = None  # gradient of out, in the backward pass
