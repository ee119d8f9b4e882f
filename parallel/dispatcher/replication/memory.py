"""Memory of the ranks of a group that expert replication need: of rows that travel by
themselves, and of replicas. What is written there when is
`parallel.dispatcher.replication.transfers`.

Legend: T tokens per rank, D hidden, K slots of a token, R ranks, S expert rows, L own experts, G
replica slots.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.kernels.expert_mlp.mlp_spec import MLPWeights
from phalanx.kernels.expert_mlp.replicas import LAYERS, Layer, of_layer
from phalanx.kernels.replication.rows import ReturnPlan
from phalanx.kernels.sm90.exchange.peer_buffers import (
    MAX_RANKS,
    MAX_WAVES,
    SEEN_BYTES,
    STATE,
    WAVES,
    PeerBuffers,
    wave_begins,
)
from phalanx.parallel.dispatcher.exchange import PeerMemory, SymmOptions, connected

if TYPE_CHECKING:
    from phalanx.kernels.sm90.exchange.combine_push import UnreducedRows

_ALIGN = 256
FLAG_BYTES = _ALIGN * -(-4 * MAX_RANKS * (MAX_WAVES + 2) // _ALIGN)
"""Of flags of lending, and as many of giving back (`kernels.replication.weights_triton`)."""


class _Kept:
    """Memory that knows no exchange: who comes late is the others' to tell."""

    def __init__(self, group: dist.ProcessGroup, size: int) -> None:
        self._peers = PeerMemory(group, size)
        dist.barrier(group)  # nobody writes to what another one has yet to clear

    def begin(self) -> None:
        """Nothing is taken in turn."""

    def missing(self) -> str:
        return ""

    def release(self) -> None:
        del self._peers

    def _addresses(self, at: int) -> Tensor:
        """int64 [R]: of byte `at` of the memory of all ranks."""
        bases = torch.tensor(self._peers.addresses, dtype=torch.int64)
        return (bases + at).to(self._peers.memory.device)


class UnreducedMemory(_Kept):
    """`parallel.dispatcher.replication.transfers.UnreducedRows` over NVLink.

    Args:
        group: expert-parallel.
        tokens, hidden, slots: T, D and K.
    """

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
    """Where a rank's memory has replicas and their gradients, by w1, w2, b1 and b2, behind
    flags."""

    weights: tuple[int, ...]
    """Bytes at which those of G slots begin; 0 bytes long if there is no such weight."""
    grads: tuple[int, ...]
    """The same of gradients in fp32."""
    total: int

    @classmethod
    def of(cls, sizes: Sequence[int], width: int) -> "ReplicaLayout":
        """Of numbers in all slots of each weight, and bytes of a number."""
        ends = [2 * FLAG_BYTES]
        for size in (*(width * n for n in sizes), *(4 * n for n in sizes)):
            ends.append(ends[-1] + -(-size // _ALIGN) * _ALIGN)
        some = len(sizes)
        return cls(tuple(ends[:some]), tuple(ends[some:-1]), ends[-1])


class ReplicaMemory(_Kept):
    """Slots of every rank for weights of replicas, and for their gradients.

    Args:
        group: expert-parallel.
        slots: G, one at least.
        own: weights of the shape and dtype of a layer's.
        options: SMs that copy beside other kernels, and the timeout of a wait for the others.
    """

    def __init__(
        self, group: dist.ProcessGroup, slots: int, own: MLPWeights, options: SymmOptions
    ) -> None:
        sizes = [0 if w is None else slots * w[0].numel() for w in own]
        layout = ReplicaLayout.of(sizes, own.w1.element_size())
        super().__init__(group, layout.total)
        self._group, self._rank, self._comm_sms = group, group.rank(), options.comm_sms

        def views(begins: Sequence[int], dtype: torch.dtype) -> MLPWeights:
            made = []
            for w, begin, size in zip(own, begins, sizes, strict=True):
                bytes_ = self._peers.memory[begin : begin + size * dtype.itemsize]
                made.append(None if w is None else bytes_.view(dtype).view(slots, *w.shape[1:]))
            return MLPWeights(*made)  # type: ignore[arg-type]

        self.weights = views(layout.weights, own.w1.dtype)
        """[G, ...] of this rank's replicas."""
        self.grads = views(layout.grads, torch.float32)
        """fp32 [G, ...] of this rank's replicas."""
        self._weights_R = [self._addresses(begin) for begin in layout.weights]
        self._grads_R = [self._addresses(begin) for begin in layout.grads]
        self._limit_ms = int(1000 * options.timeout)
        self._weight_flags, self._grad_flags = self._flags(0), self._flags(FLAG_BYTES)
        waves = min(WAVES, slots)
        begins_W = torch.tensor(wave_begins(slots, waves), dtype=torch.int32)
        self._begins_W, self._last_wave = begins_W.to(self._peers.memory.device), waves - 1
        self.ready = self._ready_words(slots, waves)
        """What kernels wait for (`kernels.sm90.exchange.ready`) before they read weights of the
        layer that was lent first in the last call."""

    def _flags(self, at: int) -> PeerBuffers:
        device, report = self._peers.memory.device, torch.zeros(4, dtype=torch.int32)
        flags_R = self._addresses(at)
        return PeerBuffers(
            rows_R=flags_R,  # no rows and no side data
            side_R=flags_R,
            flags_R=flags_R,
            state=torch.zeros(STATE, dtype=torch.int32, device=device),
            report=report.pin_memory() if device.type == "cuda" else report,
            rank=self._rank,
            limit_ms=self._limit_ms,
        )

    def _ready_words(self, slots: int, waves: int) -> Tensor:
        from phalanx.kernels.sm90.exchange.ready import ready_words

        return ready_words(
            self._peers.memory.data_ptr(),
            self._weight_flags.state.data_ptr() + SEEN_BYTES,
            self._weight_flags.report.data_ptr(),
            limit_ms=self._limit_ms,
            ranks=self._group.size(),
            wave_stride=MAX_RANKS,
            experts=slots,
            waves=waves,
        ).to(self._peers.memory.device)

    def send_weights(self, own: MLPWeights, expert_RG: Tensor, first: Layer) -> None:
        """Write own experts to the slots that hold them, layer `first` before the other one."""
        from phalanx.kernels.replication.weights_triton import send_weights

        detached = [None if w is None else w.detach() for w in own]
        layers = [
            (*of_layer(detached, layer), *of_layer(self._weights_R, layer))
            for layer in (LAYERS if first == "fc1" else LAYERS[::-1])
        ]
        sms = self._comm_sms or _sms(own.w1)
        send_weights(layers, expert_RG, self._begins_W, self._weight_flags, sms=sms)

    def wait_sending(self) -> None:
        """Let the current stream wait until `send_weights` has its SMs, which other kernels would
        take. From here on `wait` and `ready` are about this call."""
        from phalanx.kernels.replication.weights_triton import RUNNING
        from phalanx.kernels.sm90.exchange.push import wait_peers

        wait_peers(self._weight_flags, part=RUNNING, own_only=True, counts=True)

    def wait(self, *, second: bool) -> None:
        """Let the current stream wait until all ranks have lent the layer that they lend first, or
        the second one after that."""
        from phalanx.kernels.replication.weights_triton import SECOND
        from phalanx.kernels.sm90.exchange.push import wait_peers

        wait_peers(self._weight_flags, part=SECOND if second else self._last_wave, epochs_ahead=0)

    def send_grads(self, layer: Layer) -> None:
        """Tell all ranks that what kernels before this have made in `grads` for a layer is
        complete: fc1, then fc2."""
        from phalanx.kernels.replication.weights_triton import send_grads

        send_grads(self._grad_flags, LAYERS.index(layer))

    def reduce_grads(
        self, layer: Layer, own: Sequence[Tensor | None], expert_RG: Tensor, *, beside: bool
    ) -> None:
        """Add gradients of replicas everywhere to those of a layer's weight and bias of own
        experts, in place, when all ranks have given them back; `beside` other kernels, to which it
        leaves most SMs."""
        from phalanx.kernels.replication.weights_triton import reduce_grads

        sms = self._comm_sms if beside else 0
        for grad, memory_R in zip(own, of_layer(self._grads_R, layer), strict=True):
            if grad is not None:
                how = dict(layer=LAYERS.index(layer), sms=sms or _sms(grad))
                reduce_grads(grad, expert_RG, memory_R, self._grad_flags, **how)

    def wait_reducing(self) -> None:
        """Let the current stream wait until `reduce_grads` has its SMs."""
        from phalanx.kernels.replication.weights_triton import RUNNING
        from phalanx.kernels.sm90.exchange.push import wait_peers

        if self._comm_sms:
            wait_peers(self._grad_flags, part=RUNNING, epochs_ahead=0, own_only=True)

    def missing(self) -> str:
        for what, flags in (
            ("lent its experts", self._weight_flags),
            ("given gradients of replicas back", self._grad_flags),
        ):
            who, epoch, reached, _ = flags.report.tolist()
            if who:
                peer = dist.get_global_rank(self._group, who - 1)
                return f"rank {peer} has not {what} for the {epoch}th time, only the {reached}th"
        return ""

    def release(self) -> None:
        del self.weights, self.grads
        super().release()


def unreduced_memory_of(
    group: dist.ProcessGroup, tokens: int, hidden: int, slots: int
) -> UnreducedMemory:
    """Those of a group and a shape, shared by all layers."""
    key = ("single rows", group, tokens, hidden, slots)
    return connected(key, lambda: UnreducedMemory(*key[1:]))


def replica_memory_of(
    group: dist.ProcessGroup, slots: int, own: MLPWeights, options: SymmOptions
) -> ReplicaMemory:
    """That of a group, shared by all layers whose experts have a shape."""
    shapes = tuple(None if w is None else tuple(w.shape[1:]) for w in own)
    key = ("replicas", group, slots, options, own.w1.dtype, *shapes)
    return connected(key, lambda: ReplicaMemory(group, slots, own, options))


def _sms(where: Tensor) -> int:
    from phalanx.kernels.sm90.jit.launch import sms

    return sms(where.device)
