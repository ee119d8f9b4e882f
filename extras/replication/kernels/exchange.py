"""Interface of the transfers of replicas' weights and gradients, which a transport implements.

Legend: L own experts, G replica slots.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from phalanx.kernels.expert_mlp.mlp_spec import Layer, MLPWeights


class ReplicaExchange(Protocol):
    """Transfers of replicas for one micro-batch in one layer of the model.

    All ranks of a group call each method together, in this order: up to `wait` in the forward pass,
    and all methods in the backward pass, except those up to `wait` if weights were kept, and the
    others if no weight has a gradient.
    """

    keep: bool  # weights stay from the forward to the backward pass; otherwise they are sent again

    def send_weights(self, own: MLPWeights, first: Layer) -> MLPWeights:
        """Start sending own experts [L, ...] to the ranks with their replicas, layer `first` first.

        Returns:
            Memory of this rank's replicas [G, ...], not to be read before `wait`; the content of an
            empty slot is undefined. None where `own` has None.
        """
        ...

    def ready(self, layer: Layer) -> Tensor | None:
        """Flags for a kernel that waits for the replicas' weights of a layer itself.

        It needs no `wait`, and starts with those that arrive first (`kernels.sm90.exchange.ready`).
        None: only `wait` is available.
        """
        ...

    def wait(self, layer: Layer) -> None:
        """Make the current stream wait for the replicas' weights of a layer.

        The layer that was sent first is waited for first, or not at all.
        """
        ...

    def grad_buffer(self, own: MLPWeights) -> MLPWeights:
        """fp32 [G, ...] for the gradients of this rank's replicas, uninitialized.

        None where `own` has None.
        """
        ...

    def send_grads(self, layer: Layer) -> None:
        """Start sending the complete gradients in `grad_buffer` to the owners, fc1's first."""
        ...

    def reduce_grads(self, layer: Layer, own: Sequence[Tensor | None]) -> None:
        """Add the gradients that other ranks computed for this rank's experts: fc1's, then fc2's.

        They are added in place and in the order of ranks. After the second call the current stream
        sees both complete. Work that is launched between the calls may overlap the first.

        Args:
            layer: fc1 or fc2.
            own: gradients [L, ...] of its weight and bias, fp32 or narrower: added to in fp32 and
                rounded once for each rank. None: not wanted.
        """
        ...
