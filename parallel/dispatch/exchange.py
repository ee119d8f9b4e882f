"""Exchanges between the GPUs of a node through memory that the others can write.

Torch symmetric memory, without multicast, and the kernels of `kernels.sm90.exchange.push`. An
exchange is started by every rank of the group in the same order, and waited for in that order. No
count is read, by host or device, before rows are sent; epochs live on the device: exchanges can be
captured in a CUDA graph.

Legend: T tokens per rank, D hidden, K slots of a token, R ranks, N = R * T received rows.
"""

import functools
import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from phalanx.kernels.sm90.exchange.push import Places
    from phalanx.kernels.sm90.exchange.tile_progress import Told

SLOTS = 4
"""Places for exchanges, taken in turn. When exchange u is started, what u - 3 and those before it
brought has been read: the gradient of the sums (u - 2) and the tokens sent again (u - 1) may still
be read by weight gradients while the gradient of the tokens (u) leaves."""
WAVES = 7
"""Groups of a rank's experts whose tokens are waited for one after the other: the first has 1/31 of
them, the last 6/31. On the way back it is the last one that has fewest."""
SLICES = 16
"""On the way back, rows of fewer experts than that are taken in slices, so that waves are small."""
GIVE_WAY = 0.5
"""Share of a rank's experts after which fc2 gives SMs to the sums of those that it has finished."""
PIECE = 16
"""Bytes of which a block of side data is a multiple."""
_ALIGN = 256


@dataclass(frozen=True)
class SymmOptions:
    """How `symm` works."""

    keep: bool = False
    """Keep received tokens for the backward pass; otherwise they are sent again."""
    comm_sms: int = 0
    """SMs that push, beside the experts' kernels; 0 takes all, and nothing runs beside."""
    timeout: float = 600
    """Seconds that a wait for a peer may take."""


class Sent(NamedTuple):
    """An exchange that this rank has started."""

    slot: int
    """Its place."""
    number: int
    """In the order of starts."""
    parts: int
    """Waves, after the side data."""
    pushed: torch.cuda.Event
    """This rank's part of it."""
    given: tuple[Tensor, ...]
    """What is being pushed, kept until then."""


class Exchange:
    """Receive buffers, flags and epochs of one group, shared by all layers of a shape.

    Args:
        group: expert-parallel; one node, at most 16 ranks.
        tokens, hidden, slots: T, D and K.
        options: SMs and timeout.

    All ranks of the group make it together.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        tokens: int,
        hidden: int,
        slots: int,
        options: SymmOptions,
    ) -> None:
        # NVLink multicast is not used; torch reads this when it first makes symmetric memory.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        import torch.distributed._symmetric_memory as symmetric

        from phalanx.kernels.sm90.exchange.push import ALLOWED, FLAGS, MAX_RANKS, STATE, Places
        from phalanx.kernels.sm90.exchange.tile_progress import PROGRESS

        self.group, self.rank, self.ranks = group, group.rank(), group.size()
        if self.ranks > MAX_RANKS:
            raise ValueError(
                f"parallel.dispatch=symm serves {MAX_RANKS} ranks, but parallel.expert is "
                f"{self.ranks}: set parallel.dispatch=alltoall"
            )
        self.tokens, self.hidden, self.slots = tokens, hidden, slots
        self._comm_sms, self._next = options.comm_sms, 0
        self._started, self._waited = 0, 0
        self._words: dict[int, Tensor] = {}
        device = torch.device("cuda", torch.cuda.current_device())
        rows = _aligned(2 * self.ranks * tokens * hidden)
        side = _aligned(self.ranks * (8 * tokens * slots + PIECE))
        head = _aligned(4 * FLAGS)
        memory = symmetric.empty(head + SLOTS * (rows + side), dtype=torch.uint8, device=device)
        memory.zero_()  # rows that never came must at least be numbers
        flags = memory[: 4 * FLAGS].view(torch.int32)
        flags[ALLOWED:] = 1
        torch.cuda.synchronize()
        self._handle = symmetric.rendezvous(memory, group)
        bases = torch.tensor(self._handle.buffer_ptrs, dtype=torch.int64)
        self._memory = memory
        # Where pushes run beside other kernels: they come before those that wait for SMs.
        self._stream = torch.cuda.Stream(device, priority=-1) if options.comm_sms else None
        state = torch.zeros(STATE, dtype=torch.int32, device=device)
        # Of sums, and of gradients.
        self._progress, self._done = torch.zeros(2, PROGRESS, dtype=torch.int32, device=device)
        self._report = torch.zeros(4, dtype=torch.int32).pin_memory()
        self._places, self._rows, self._side = [], [], []
        for slot in range(SLOTS):
            at = head + slot * (rows + side)
            self._places.append(
                Places(
                    rows_R=(bases + at).to(device),
                    side_R=(bases + at + rows).to(device),
                    flags_R=bases.to(device),
                    state=state,
                    report=self._report,
                    rank=self.rank,
                    limit_ms=int(1000 * options.timeout),
                )
            )
            received = memory[at : at + 2 * self.ranks * tokens * hidden]
            self._rows.append(received.view(torch.bfloat16).view(-1, hidden))
            self._side.append(memory[at + rows : at + rows + side])
        dist.barrier(group)

    @property
    def overlaps(self) -> bool:
        """Pushes run beside other kernels."""
        return self._stream is not None

    def start(
        self,
        rows: Tensor,
        table: Tensor,
        side: Tensor,
        local: int,
        *,
        back: bool = False,
        alone: bool = False,
    ) -> Sent:
        """Begin to push rows, after what the current stream has been given so far.

        Args:
            rows, table, side, back: as `kernels.sm90.exchange.push.push` takes them.
            local: experts of a rank.
            alone: nothing is to run beside it.
        """
        from phalanx.kernels.sm90.exchange.push import push

        given = (rows.contiguous(), table, side)
        waves = 1 if back else self._waves(local)

        def send(places: "Places") -> None:
            push(
                *given,
                places,
                tokens=self.tokens,
                local_experts=local,
                back=back,
                comm_sms=0 if alone else self._comm_sms,
                waves=waves,
            )

        return self._begin(send, waves, given)

    def copy(self, x_TD: Tensor) -> Tensor:
        """All tokens to all other ranks by copy engines; what arrived: [N, D].

        For comparison with `start`, which takes SMs and sends what is wanted. This rank's own rows
        are left as they are, as a copy within a GPU takes SMs too. Nothing else may be under way.
        """
        here, at = torch.cuda.current_stream(), self._rows[0].storage_offset()
        offset = at + self.rank * x_TD.numel()
        for stream in self._copying:
            stream.wait_stream(here)
        for step, stream in enumerate(self._copying, 1):  # each rank begins with another one
            peer = (self.rank + step) % self.ranks
            with torch.cuda.stream(stream):
                self._handle.get_buffer(peer, x_TD.shape, x_TD.dtype, offset).copy_(x_TD)
        for stream in self._copying:
            here.wait_stream(stream)
        self.begin()
        return self._rows[0]

    @functools.cached_property
    def _copying(self) -> list[torch.cuda.Stream]:
        return [torch.cuda.Stream() for _ in range(self.ranks - 1)]

    def told(self, y_SD: Tensor, channels: int, local: int) -> "Told":
        """What `rows` is to be told that makes y of `channels`, for `send_sums`."""
        from phalanx.kernels.sm90.exchange.tile_progress import Told
        from phalanx.kernels.sm90.gemm import tiles

        loop = tiles.choose("rows", y_SD.shape[1], channels, gather=False, transposed=False)
        bits = (-(-SLICES // local) - 1).bit_length()
        waves = self._waves(local << bits)
        return Told(y_SD, self._progress, waves, loop, self._comm_sms, GIVE_WAY, bits)

    def send_sums(
        self,
        told: "Told",
        index_S: Tensor,
        inverse_NK: Tensor,
        offsets: Tensor,
        begun: torch.cuda.Event,
    ) -> tuple[Sent, Callable[[], None]]:
        """Send sums back as experts finish; only if pushes run beside other kernels.

        Args:
            told: of the experts' kernel, which has been launched: nothing here may be waited for
                before.
            index_S, inverse_NK, offsets: as `kernels.sm90.exchange.combine_push` takes them.
            begun: what was there before that kernel.

        Returns:
            The exchange, and what is to be called before it is waited for, to send the rest.
        """
        from phalanx.kernels.sm90.exchange.combine_push import combine_push
        from phalanx.kernels.sm90.jit.launch import sms

        given, everywhere = (index_S, inverse_NK, offsets), sms(offsets.device)
        how = dict(tokens=self.tokens, of=self._comm_sms + everywhere)

        def send(places: "Places", ctas: int = self._comm_sms) -> None:
            combine_push(told.made, *given, places, ctas=ctas, **how)

        sent = self._begin(send, 1, (told.out_SN, *given), begun)
        return sent, functools.partial(send, self._places[sent.slot], everywhere)

    def send_gradient(
        self,
        dx_SD: Tensor,
        index_S: Tensor,
        inverse_NK: Tensor,
        offsets: Tensor,
        side: Tensor,
    ) -> Sent:
        """Send sums of expert rows and side data back; only if pushes run beside other kernels.

        Args:
            dx_SD: expert rows.
            index_S, inverse_NK, offsets, side: as `kernels.sm90.exchange.combine_push` takes them.
        """
        from phalanx.kernels.sm90.exchange.combine_push import combine_push
        from phalanx.kernels.sm90.exchange.tile_progress import Made

        given, made = (index_S, inverse_NK, offsets), Made(dx_SD, self._done)
        how = dict(tokens=self.tokens, ctas=self._comm_sms, of=self._comm_sms)

        def send(places: "Places") -> None:
            combine_push(made, *given, places, **how, side=side)

        return self._begin(send, 1, (dx_SD, *given, side))

    def _begin(
        self,
        send: Callable[["Places"], None],
        waves: int,
        given: tuple[Tensor, ...],
        after: torch.cuda.Event | None = None,
    ) -> Sent:
        """The next exchange, on the stream of pushes, `after` all that this one has been given."""
        here = torch.cuda.current_stream()
        stream = self._stream or here
        slot = self._next
        self._next = (slot + 1) % SLOTS
        if stream != here:
            stream.wait_event(after or here.record_event())
        with torch.cuda.stream(stream):
            send(self._places[slot])
            pushed = torch.cuda.Event()
            pushed.record(stream)
        self._started += 1
        return Sent(slot, self._started, waves, pushed, given)

    def arrive(self, sent: Sent, *, side_only: bool = False) -> None:
        """Let the current stream wait for what all ranks have pushed, or their side data alone.

        Exchanges are waited for in the order of their starts; one may be again, for the rest.
        """
        from phalanx.kernels.sm90.exchange.push import arrive

        part = 0 if side_only else sent.parts
        arrive(self._places[sent.slot], part=part, ahead=sent.number - self._waited)
        self._waited = sent.number
        if not side_only:
            torch.cuda.current_stream().wait_event(sent.pushed)

    def running(self, sent: Sent) -> None:
        """Let the current stream wait until this rank's push has its SMs."""
        from phalanx.kernels.sm90.exchange.push import arrive

        ahead = sent.number - self._waited
        arrive(self._places[sent.slot], part=0, ahead=ahead, alone=True)

    def rows(self, sent: Sent) -> Tensor:
        """Where rows arrive: [N, D]."""
        return self._rows[sent.slot]

    def side(self, sent: Sent) -> Tensor:
        """Where side data arrive, uint8."""
        return self._side[sent.slot]

    def ready(self, local: int) -> Tensor:
        """What kernels need in order to wait for rows of the exchange whose side data came last.

        Args:
            local: experts of a rank.
        """
        from phalanx.kernels.sm90.exchange.push import MAX_RANKS, SEEN_BYTES
        from phalanx.kernels.sm90.exchange.ready import ready

        if local not in self._words:
            places = self._places[0]
            self._words[local] = ready(
                self._memory.data_ptr() + 4 * MAX_RANKS,
                places.state.data_ptr() + SEEN_BYTES,
                places.report.data_ptr(),
                limit_ms=places.limit_ms,
                ranks=self.ranks,
                apart=MAX_RANKS,
                experts=local,
                waves=self._waves(local),
            ).to(self._memory.device)
        return self._words[local]

    def _waves(self, local: int) -> int:
        """Of tokens on their way to a rank's experts."""
        return min(WAVES, local) if self.overlaps else 1

    def begin(self) -> None:
        """Let all ranks meet on their streams, and begin with the first place again.

        To be captured first in a CUDA graph, whose exchanges need not fill all places at its end.
        """
        self._handle.barrier(channel=0, timeout_ms=self._places[0].limit_ms)
        self._next = 0

    def release(self) -> None:
        """Give its memory back, though something may still refer to the exchange."""
        self._rows.clear()
        self._side.clear()
        self._words.clear()
        del self._memory, self._handle

    def missing(self) -> str:
        """Who did not come within the timeout, if that ended the run; empty if all did."""
        who, epoch, found, _ = self._report.tolist()
        if not who:
            return ""
        peer = dist.get_global_rank(self.group, who - 1)
        return f"rank {peer} has not reached exchange {epoch} of experts, only {found}"


_EXCHANGES: dict[tuple[Any, ...], Exchange] = {}


def exchange_of(
    group: dist.ProcessGroup, tokens: int, hidden: int, slots: int, options: SymmOptions
) -> Exchange:
    """The exchange of a group and a shape: one, as its places are taken in turn by all layers."""
    key = (group, tokens, hidden, slots, options)
    if key not in _EXCHANGES:
        _EXCHANGES[key] = Exchange(*key)
    return _EXCHANGES[key]


def begin_exchanges() -> None:
    """`Exchange.begin` of all."""
    for exchange in _EXCHANGES.values():
        exchange.begin()


def forget_exchanges() -> None:
    """`release_exchanges` when no rank still writes; all ranks of their groups call it together."""
    if _EXCHANGES:
        torch.cuda.synchronize()
    for exchange in _EXCHANGES.values():
        dist.barrier(exchange.group)
    release_exchanges()


def release_exchanges() -> None:
    """Free the memory of all exchanges, in the order in which they were made.

    Whatever was captured with them must not be replayed any more. It waits for this rank's own work
    but for no other rank, which may be dead. One that still writes, because it has been cut off in
    the middle of a step, does no harm: the memory itself goes with the last mapping of it.

    Raises:
        RuntimeError: the device has failed, and with it every way to free what was on it.
    """
    if not _EXCHANGES:
        return
    torch.cuda.synchronize()
    for key in list(_EXCHANGES):
        _EXCHANGES.pop(key).release()
    gc.collect()  # of what a layer's last call still refers to


def missing() -> str:
    """Whose tokens did not come within the timeout, if that ended the run; else empty."""
    return next((text for e in _EXCHANGES.values() if (text := e.missing())), "")


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
