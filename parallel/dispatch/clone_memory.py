"""Memory of the ranks of a group that clones of hot experts need: of rows that travel by
themselves, and of guests. What is written there when is `parallel.dispatch.cloned_transfers`.

Legend: T tokens per rank, D hidden, K slots of a token, R ranks, S expert rows, L own experts, G
guest slots.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.kernels.clones.rows import Parting
from phalanx.kernels.expert_mlp.guests import LAYERS, Layer, of_layer
from phalanx.kernels.expert_mlp.mlp_spec import MLPWeights
from phalanx.kernels.sm90.exchange.peer_buffers import STATE, PeerBuffers
from phalanx.parallel.dispatch.exchange import PeerMemory, SymmOptions, connected

_ALIGN = 256


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


class SingleRows(_Kept):
    """`parallel.dispatch.cloned_transfers.Singles` over NVLink.

    Args:
        group: expert-parallel.
        tokens, hidden, slots: T, D and K.
    """

    def __init__(self, group: dist.ProcessGroup, tokens: int, hidden: int, slots: int) -> None:
        super().__init__(group, max(2 * slots * tokens * hidden, _ALIGN))
        self._rank, self._tokens = group.rank(), tokens
        rows = self._peers.memory[: 2 * slots * tokens * hidden].view(torch.bfloat16)
        self.rows_KTD = rows.view(slots, tokens, hidden)
        self._memory_R = self._addresses(0)

    def send(self, y_SD: Tensor, parting: Parting) -> None:
        from phalanx.kernels.clones.rows_triton import send_singles

        how = dict(rank=self._rank, tokens=self._tokens, sms=_sms(y_SD))
        send_singles(y_SD, parting, self._memory_R, **how)

    def release(self) -> None:
        del self.rows_KTD
        super().release()


class GuestLayout(NamedTuple):
    """Where a rank's memory has guests and their gradients, by w1, w2, b1 and b2, behind flags."""

    weights: tuple[int, ...]
    """Bytes at which those of G slots begin; 0 bytes long if there is no such weight."""
    grads: tuple[int, ...]
    """The same of gradients in fp32."""
    total: int

    @classmethod
    def of(cls, sizes: Sequence[int], width: int) -> "GuestLayout":
        """Of numbers in all slots of each weight, and bytes of a number."""
        ends = [_ALIGN]
        for size in (*(width * n for n in sizes), *(4 * n for n in sizes)):
            ends.append(ends[-1] + -(-size // _ALIGN) * _ALIGN)
        some = len(sizes)
        return cls(tuple(ends[:some]), tuple(ends[some:-1]), max(ends[-1], _ALIGN))


class GuestMemory(_Kept):
    """Slots of every rank for weights of guests, and for their gradients.

    Args:
        group: expert-parallel.
        slots: G.
        own: weights of the shape and dtype of a layer's.
        options: SMs that copy beside other kernels, and the timeout of a wait for the others.
    """

    def __init__(
        self, group: dist.ProcessGroup, slots: int, own: MLPWeights, options: SymmOptions
    ) -> None:
        sizes = [0 if w is None else slots * w[0].numel() for w in own]
        layout = GuestLayout.of(sizes, own.w1.element_size())
        super().__init__(group, layout.total)
        self._group, self._rank, self._comm_sms = group, group.rank(), options.comm_sms

        def views(begins: Sequence[int], dtype: torch.dtype) -> MLPWeights:
            made = []
            for w, begin, size in zip(own, begins, sizes, strict=True):
                bytes_ = self._peers.memory[begin : begin + size * dtype.itemsize]
                made.append(None if w is None else bytes_.view(dtype).view(slots, *w.shape[1:]))
            return MLPWeights(*made)  # type: ignore[arg-type]

        self.weights = views(layout.weights, own.w1.dtype)
        """[G, ...] of this rank's guests."""
        self.grads = views(layout.grads, torch.float32)
        """fp32 [G, ...] of this rank's guests."""
        self._weights_R = [self._addresses(begin) for begin in layout.weights]
        self._grads_R = [self._addresses(begin) for begin in layout.grads]
        device, report = self._peers.memory.device, torch.zeros(4, dtype=torch.int32)
        flags_R, state = self._addresses(0), torch.zeros(STATE, dtype=torch.int32, device=device)
        self._flags = PeerBuffers(
            rows_R=flags_R,  # no rows and no side data
            side_R=flags_R,
            flags_R=flags_R,
            state=state,
            report=report.pin_memory() if device.type == "cuda" else report,
            rank=self._rank,
            limit_ms=int(1000 * options.timeout),
        )

    def lend(self, own: MLPWeights, expert_RG: Tensor, first: Layer) -> None:
        """Write own experts to the slots that hold them, layer `first` before the other one."""
        from phalanx.kernels.clones.weights_triton import Flags, lend

        detached = [None if w is None else w.detach() for w in own]
        layers = [
            (*of_layer(detached, layer), *of_layer(self._weights_R, layer))
            for layer in (LAYERS if first == "fc1" else LAYERS[::-1])
        ]
        flags = Flags(self._flags.flags_R, self._flags.state)
        sms = self._comm_sms or _sms(own.w1)
        lend(layers, expert_RG, flags, rank=self._rank, sms=sms)

    def wait_running(self) -> None:
        """Let the current stream wait until `lend` has its SMs, which other kernels would take."""
        from phalanx.kernels.sm90.exchange.push import wait_peers

        if self._comm_sms:
            wait_peers(self._flags, part=2, own_only=True)

    def wait(self, *, second: bool) -> None:
        """Let the current stream wait until all ranks have lent the layer that they lend first in
        the call that is waited for, or the second one after that."""
        from phalanx.kernels.sm90.exchange.push import wait_peers

        wait_peers(self._flags, part=int(second), epochs_ahead=int(not second))

    def missing(self) -> str:
        who, epoch, reached, _ = self._flags.report.tolist()
        if not who:
            return ""
        peer = dist.get_global_rank(self._group, who - 1)
        return f"rank {peer} has not lent its experts for the {epoch}th time, only the {reached}th"

    def take_back(
        self, layer: Layer, own: Sequence[Tensor | None], expert_RG: Tensor, *, beside: bool
    ) -> None:
        """Add gradients of guests everywhere to those of a layer's weight and bias of own experts,
        in place; `beside` other kernels, to which it leaves most SMs."""
        from phalanx.kernels.clones.weights_triton import take_back

        sms = self._comm_sms if beside else 0
        for grad, memory_R in zip(own, of_layer(self._grads_R, layer), strict=True):
            if grad is not None:
                how = dict(rank=self._rank, sms=sms or _sms(grad))
                take_back(grad, expert_RG, memory_R, **how)

    def release(self) -> None:
        del self.weights, self.grads
        super().release()


def single_rows_of(group: dist.ProcessGroup, tokens: int, hidden: int, slots: int) -> SingleRows:
    """Those of a group and a shape, shared by all layers."""
    key = ("single rows", group, tokens, hidden, slots)
    return connected(key, lambda: SingleRows(*key[1:]))


def guest_memory_of(
    group: dist.ProcessGroup, slots: int, own: MLPWeights, options: SymmOptions
) -> GuestMemory:
    """That of a group, shared by all layers whose experts have a shape."""
    shapes = tuple(None if w is None else tuple(w.shape[1:]) for w in own)
    key = ("guests", group, slots, options, own.w1.dtype, *shapes)
    return connected(key, lambda: GuestMemory(group, slots, own, options))


def _sms(where: Tensor) -> int:
    from phalanx.kernels.sm90.jit.launch import sms

    return sms(where.device)
