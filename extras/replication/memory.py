"""Symmetric memory of expert replication: of rows that are sent one by one, and of replicas.

`extras.replication.transfers` states the order of reads and writes.

Legend: T tokens per rank, D hidden, K expert ids of a token, R ranks, S expert rows, L own experts,
G replica slots.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.extras.replication.kernels.rows import ReturnPlan
from phalanx.kernels.expert_mlp.mlp_spec import LAYERS, Layer, MLPWeights, layer_pair
from phalanx.kernels.sm90.exchange.peer_buffers import (
    MAX_RANKS,
    MAX_WAVES,
    SEEN_BYTES,
    STATE,
    WAVES,
    ExchangeOptions,
    PeerBuffers,
    wave_begins,
)
from phalanx.parallel.connections import Connections
from phalanx.parallel.dispatcher.exchange import PeerMemory

if TYPE_CHECKING:
    from phalanx.kernels.sm90.exchange.combine_push import UnreducedRows

_ALIGN = 256
FLAG_BYTES = _ALIGN * -(-4 * MAX_RANKS * (MAX_WAVES + 2) // _ALIGN)  # of weights, and of gradients


class _SharedMemory:
    """Symmetric memory without an exchange: timeouts are reported by the exchanges."""

    def __init__(self, group: dist.ProcessGroup, size: int) -> None:
        self._peers = PeerMemory(group, size)
        dist.barrier(group)  # no rank writes to memory that another one has yet to clear

    def begin(self) -> None:
        """No buffer is taken in turn."""

    def missing(self) -> str:
        return ""

    def release(self) -> None:
        del self._peers

    def _addresses(self, offset: int) -> Tensor:
        bases = torch.tensor(self._peers.addresses, dtype=torch.int64)
        return (bases + offset).to(self._peers.memory.device)


class UnreducedMemory(_SharedMemory):
    """Memory of `extras.replication.transfers.UnreducedRowsMemory` over NVLink: T, D and K."""

    def __init__(self, group: dist.ProcessGroup, tokens: int, hidden: int, slots: int) -> None:
        super().__init__(group, max(2 * slots * tokens * hidden, _ALIGN))
        rows = self._peers.memory[: 2 * slots * tokens * hidden].view(torch.bfloat16)
        self.rows_KTD = rows.view(slots, tokens, hidden)
        self._memory_R = self._addresses(0)

    def sent(self, return_plan: ReturnPlan) -> "UnreducedRows":
        from phalanx.kernels.sm90.exchange.combine_push import UnreducedRows

        return UnreducedRows(
            return_plan.pairs_S, return_plan.count, return_plan.inverse_NK, self._memory_R
        )

    def release(self) -> None:
        del self.rows_KTD
        super().release()


class ReplicaLayout(NamedTuple):
    """Offsets of replicas' w1, w2, b1 and b2 and their gradients in a rank's memory."""

    weights: tuple[int, ...]  # offsets in bytes; 0 bytes long if there is no such weight
    grads: tuple[int, ...]  # offsets in bytes of the gradients in fp32
    total: int

    @classmethod
    def of(cls, sizes: Sequence[int], width: int) -> "ReplicaLayout":
        ends = [2 * FLAG_BYTES]
        for size in (*(width * n for n in sizes), *(4 * n for n in sizes)):
            ends.append(ends[-1] + -(-size // _ALIGN) * _ALIGN)
        count = len(sizes)
        return cls(tuple(ends[:count]), tuple(ends[count:-1]), ends[-1])


class ReplicaMemory(_SharedMemory):
    """Slots of every rank for weights of replicas, and for their gradients.

    Args:
        slots: G, at least one.
        own: weights with the shapes and dtype of a layer's.
        options: number of SMs that copy in overlap, and the timeout of a wait for other ranks.
    """

    def __init__(
        self, group: dist.ProcessGroup, slots: int, own: MLPWeights, options: ExchangeOptions
    ) -> None:
        sizes = [0 if w is None else slots * w[0].numel() for w in own]
        layout = ReplicaLayout.of(sizes, own.w1.element_size())
        super().__init__(group, layout.total)
        self._group, self._rank, self._options = group, group.rank(), options

        def views(offsets: Sequence[int], dtype: torch.dtype) -> MLPWeights:
            weights = []
            for w, offset, size in zip(own, offsets, sizes, strict=True):
                bytes_ = self._peers.memory[offset : offset + size * dtype.itemsize]
                weights.append(None if w is None else bytes_.view(dtype).view(slots, *w.shape[1:]))
            return MLPWeights(*weights)  # type: ignore[arg-type]

        self.weights = views(layout.weights, own.w1.dtype)
        """Weights [G, ...] of this rank's replicas."""
        self.grads = views(layout.grads, torch.float32)
        """Gradients [G, ...] of this rank's replicas, fp32."""
        self._weights_R = [self._addresses(offset) for offset in layout.weights]
        self._grads_R = [self._addresses(offset) for offset in layout.grads]
        self._weight_flags, self._grad_flags = self._flags(0), self._flags(FLAG_BYTES)
        waves = min(WAVES, slots)
        begins_W = torch.tensor(wave_begins(slots, waves), dtype=torch.int32)
        self._begins_W, self._last_wave = begins_W.to(self._peers.memory.device), waves - 1
        self.ready = self._ready_words(slots, waves)
        """Flags of the weights of the layer that was sent first."""

    def _flags(self, offset: int) -> PeerBuffers:
        device, report = self._peers.memory.device, torch.zeros(4, dtype=torch.int32)
        flags_R = self._addresses(offset)
        return PeerBuffers(
            rows_R=flags_R,  # no rows and no side data
            side_R=flags_R,
            flags_R=flags_R,
            state=torch.zeros(STATE, dtype=torch.int32, device=device),
            report=report.pin_memory() if device.type == "cuda" else report,
            rank=self._rank,
            limit_ms=self._options.limit_ms,
        )

    def _ready_words(self, slots: int, waves: int) -> Tensor:
        from phalanx.kernels.sm90.exchange.waves import ready_words

        return ready_words(
            self._peers.memory.data_ptr(),
            self._weight_flags.state.data_ptr() + SEEN_BYTES,
            self._weight_flags.report.data_ptr(),
            limit_ms=self._options.limit_ms,
            ranks=self._group.size(),
            wave_stride=MAX_RANKS,
            experts=slots,
            waves=waves,
        ).to(self._peers.memory.device)

    def send_weights(self, own: MLPWeights, expert_RG: Tensor, first: Layer) -> None:
        """Write own experts to their replicas' slots, layer `first` before the other one."""
        from phalanx.extras.replication.kernels.weights_triton import send_weights

        detached = [None if w is None else w.detach() for w in own]
        layers: list[Any] = [
            (*layer_pair(detached, layer), *layer_pair(self._weights_R, layer))
            for layer in (LAYERS if first == "fc1" else LAYERS[::-1])
        ]
        sms = self._options.sms(own.w1.device)
        send_weights(layers, expert_RG, self._begins_W, self._weight_flags, sms=sms)

    def wait_sending(self) -> None:
        """Let the current stream wait until `send_weights` has its SMs, before others take them.

        After it `wait` and `ready` refer to this call.
        """
        from phalanx.extras.replication.kernels.weights_triton import RUNNING
        from phalanx.kernels.sm90.exchange.push import wait_peers

        wait_peers(self._weight_flags, part=RUNNING, own_only=True, counts=True)

    def wait(self, *, second: bool) -> None:
        """Let the current stream wait until all ranks have sent the first or second layer."""
        from phalanx.extras.replication.kernels.weights_triton import SECOND
        from phalanx.kernels.sm90.exchange.push import wait_peers

        wait_peers(self._weight_flags, part=SECOND if second else self._last_wave, epochs_ahead=0)

    def send_grads(self, layer: Layer) -> None:
        """Signal all ranks that `grads` of a layer are complete: fc1, then fc2."""
        from phalanx.extras.replication.kernels.weights_triton import send_grads

        send_grads(self._grad_flags, LAYERS.index(layer))

    def reduce_grads(
        self, layer: Layer, own: Sequence[Tensor | None], expert_RG: Tensor, *, overlapped: bool
    ) -> None:
        """Add gradients of replicas to own gradients, in place, once all ranks have signalled.

        `expert_RG` is the expert in each slot; `overlapped` leaves most SMs to other kernels.
        """
        from phalanx.extras.replication.kernels.weights_triton import reduce_grads

        for grad, memory_R in zip(own, layer_pair(self._grads_R, layer), strict=True):
            if grad is not None:
                reduce_grads(
                    grad,
                    expert_RG,
                    memory_R,
                    self._grad_flags,
                    layer=LAYERS.index(layer),
                    sms=self._options.sms(grad.device, all_sms=not overlapped),
                )

    def wait_reducing(self) -> None:
        from phalanx.extras.replication.kernels.weights_triton import RUNNING
        from phalanx.kernels.sm90.exchange.push import wait_peers

        if self._options.overlaps:
            wait_peers(self._grad_flags, part=RUNNING, epochs_ahead=0, own_only=True)

    def missing(self) -> str:
        for action, flags in (
            ("sent the weights of its experts", self._weight_flags),
            ("sent the gradients of its replicas", self._grad_flags),
        ):
            late, epoch, reached, _ = flags.report.tolist()
            if late:
                peer = dist.get_global_rank(self._group, late - 1)
                return f"rank {peer} has not {action} for the {epoch}th time, only the {reached}th"
        return ""

    def release(self) -> None:
        del self.weights, self.grads
        super().release()


def unreduced_memory_of(
    connections: Connections, group: dist.ProcessGroup, tokens: int, hidden: int, slots: int
) -> UnreducedMemory:
    """Memory of a group and a shape, shared by all layers."""
    key = ("single rows", group, tokens, hidden, slots)
    return connections.get(key, lambda: UnreducedMemory(*key[1:]))


def replica_memory_of(
    connections: Connections,
    group: dist.ProcessGroup,
    slots: int,
    own: MLPWeights,
    options: ExchangeOptions,
) -> ReplicaMemory:
    """Memory of a group, shared by all layers whose experts have the same shape."""
    shapes = tuple(None if w is None else tuple(w.shape[1:]) for w in own)
    key = ("replicas", group, slots, options, own.w1.dtype, *shapes)
    return connections.get(key, lambda: ReplicaMemory(group, slots, own, options))
