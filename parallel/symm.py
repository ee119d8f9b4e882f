"""Transport `symm`: one-sided exchanges between the GPUs of a node, over NVLink.

Every rank owns memory that the others can write (torch symmetric memory, without multicast).
Tokens are pushed once to each rank that holds one of their experts, sums come back once from each
such rank, and are added in the order of ranks in fp32. No count is read, by host or device, before
rows are sent; epochs live on the device: exchanges can be captured in a CUDA graph.

Legend: T tokens per rank, D hidden, K slots of a token, R ranks, N = R * T received rows.
"""

import functools
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from parallel.received import Received

SLOTS = 3
"""Places for exchanges, taken in turn. What exchange u brings is read before u + 2 is pushed: the
gradient of the sums, the tokens again, and then the gradient of the tokens leaves."""
_ALIGN = 256
_PIECE = 16
"""Bytes of which a block of side data is a multiple."""


@dataclass(frozen=True)
class SymmOptions:
    """How `symm` works."""

    keep: bool = False
    """Keep received tokens for the backward pass; otherwise they are sent again."""
    comm_sms: int = 0
    """SMs that push; 0 takes all."""
    timeout: float = 600
    """Seconds before a wait for a peer ends the run."""


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

        from kernels.sm90.push import ALLOWED, FLAGS, MAX_RANKS, STATE, Places

        self.group, self.rank, self.ranks = group, group.rank(), group.size()
        if self.ranks > MAX_RANKS:
            raise ValueError(
                f"parallel.dispatch=symm serves {MAX_RANKS} ranks, but parallel.expert is "
                f"{self.ranks}: set parallel.dispatch=alltoall"
            )
        self.tokens, self.hidden, self.slots = tokens, hidden, slots
        self._comm_sms, self._next = options.comm_sms, 0
        device = torch.device("cuda", torch.cuda.current_device())
        rows = _aligned(2 * self.ranks * tokens * hidden)
        side = _aligned(self.ranks * (8 * tokens * slots + _PIECE))
        head = _aligned(4 * FLAGS)
        memory = symmetric.empty(head + SLOTS * (rows + side), dtype=torch.uint8, device=device)
        memory.zero_()  # rows that never came must at least be numbers
        flags = memory[: 4 * FLAGS].view(torch.int32)
        flags[ALLOWED:] = 1
        torch.cuda.synchronize()
        self._handle = symmetric.rendezvous(memory, group)
        bases = torch.tensor(self._handle.buffer_ptrs, dtype=torch.int64)
        self._memory = memory
        state = torch.zeros(STATE, dtype=torch.int32, device=device)
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

    def scatter(self, x_TD: Tensor, idx_TK: Tensor, side: Tensor, local: int) -> tuple[Any, ...]:
        """Tokens to the ranks of their experts, `side` to all: received rows_ND and side data."""
        return self._exchange(x_TD, idx_TK, side, local, back=False)

    def give_back(
        self, rows_ND: Tensor, idx_NK: Tensor, side: Tensor, local: int
    ) -> tuple[Any, ...]:
        """Rows for this rank's experts to the tokens' ranks, and a block of `side` to each."""
        return self._exchange(rows_ND, idx_NK, side, local, back=True)

    def _exchange(
        self, rows: Tensor, table: Tensor, side: Tensor, local: int, *, back: bool
    ) -> tuple[Tensor, Tensor]:
        from kernels.sm90.push import arrive, push

        slot = self._next
        self._next = (slot + 1) % SLOTS
        places = self._places[slot]
        push(
            rows.contiguous(),
            table,
            side,
            places,
            tokens=self.tokens,
            local_experts=local,
            back=back,
            comm_sms=self._comm_sms,
        )
        arrive(places)
        return self._rows[slot], self._side[slot]

    def begin(self) -> None:
        """Let all ranks meet on their streams, and begin with the first place again.

        To be captured first in a CUDA graph, whose exchanges need not fill all places at its end.
        """
        self._handle.barrier(channel=0)
        self._next = 0

    def missing(self) -> str:
        """Who did not come within the timeout, if that ended the run; empty if all did."""
        who, epoch, found, _ = self._report.tolist()
        if not who:
            return ""
        peer = dist.get_global_rank(self.group, who - 1)
        return f"rank {peer} has not reached exchange {epoch} of experts, only {found}"


class Route(NamedTuple):
    """What the way back of an exchange needs."""

    idx_TK: Tensor
    """Experts of this rank's tokens."""
    idx_NK: Tensor
    """Experts of received rows."""
    sums_TR: Tensor
    """Received row of a token's sum from each rank; -1 from ranks that have none of its experts."""


class Symm:
    """The transport. See `parallel.dispatch` for its contract.

    Args:
        group: expert-parallel, all on one node.
        plan: makes plans of received routing.
        local: experts of a rank.
        options: the rest.
    """

    def __init__(
        self, group: dist.ProcessGroup, plan: Any, *, local: int, options: SymmOptions
    ) -> None:
        self._group, self._plan, self._local, self._options = group, plan, local, options

    def dispatch(self, x_TD: Tensor, topk_idx_TK: Tensor, topk_prob_TK: Tensor) -> Received:
        self._plan.check(x_TD, topk_idx_TK, topk_prob_TK)
        (T, D), K = x_TD.shape, topk_idx_TK.shape[1]
        exchange = exchange_of(self._group, T, D, K, self._options)
        idx_TK = topk_idx_TK.contiguous()
        rows_ND, idx_NK, prob_NK = _Dispatch.apply(
            x_TD, idx_TK, topk_prob_TK, exchange, self._local
        )
        route = Route(idx_TK, idx_NK, _sums(idx_TK, exchange, self._local))
        again = functools.partial(
            exchange.scatter, x_TD.detach(), idx_TK, x_TD.new_empty(0), self._local
        )
        saving = functools.partial(_saving, rows_ND.detach(), None if self._options.keep else again)
        return Received(rows_ND, self._plan(idx_NK, prob_NK), None, route, saving)

    def combine(self, out_ND: Tensor, received: Received) -> Tensor:
        route = received.route
        (T, K), D = route.idx_TK.shape, out_ND.shape[1]
        exchange = exchange_of(self._group, T, D, K, self._options)
        return _Return.apply(out_ND, route, exchange, self._local)


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


def missing() -> str:
    """Whose tokens did not come within the timeout, if that ended the run; else empty."""
    return next((text for e in _EXCHANGES.values() if (text := e.missing())), "")


@functools.cache
def reason_against(group: dist.ProcessGroup | None, dtype: torch.dtype) -> str:
    """Why `symm` cannot serve a group; empty if it can. All ranks of the group ask together."""
    if not torch.cuda.is_available():
        return "needs CUDA"
    if torch.cuda.get_device_capability() != (9, 0):
        return "needs a Hopper GPU"
    if dtype != torch.bfloat16:
        return f"moves bf16, not {dtype}"
    if group is None or group.size() == 1:
        return "needs several ranks"
    hosts: list[Any] = [None] * group.size()
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    if len(set(hosts)) > 1:
        return "the ranks of an expert-parallel group are on several hosts"
    here = torch.cuda.current_device()
    others = (d for d in range(torch.cuda.device_count()) if d != here)
    if not all(torch.cuda.can_device_access_peer(here, other) for other in others):
        return "the GPUs of this host cannot write to each other's memory"
    return ""


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _padded(blocks_RX: Tensor) -> Tensor:
    """Blocks of int32 as `push` takes them: a multiple of 16 bytes each."""
    return torch.nn.functional.pad(blocks_RX, (0, -blocks_RX.shape[1] % (_PIECE // 4))).contiguous()


def _blocks(side: Tensor, ranks: int, size: int) -> Tensor:
    """What `_padded` blocks of `size` int32 became at the other end: [R, size], contiguous."""
    pitch = _PIECE * -(-4 * size // _PIECE)
    return side[: ranks * pitch].view(torch.int32).view(ranks, -1)[:, :size].contiguous()


def _sums(idx_TK: Tensor, exchange: Exchange, local: int) -> Tensor:
    """Received row r * T + t of token t for each rank r that has one of its experts, else -1."""
    ranks = torch.arange(exchange.ranks, device=idx_TK.device, dtype=torch.int32)
    of_TK = torch.where(idx_TK >= 0, idx_TK // local, -1)
    wanted_TR = (of_TK[:, :, None] == ranks).any(1)
    tokens = torch.arange(exchange.tokens, device=idx_TK.device, dtype=torch.int32)
    return torch.where(wanted_TR, tokens[:, None] + ranks * exchange.tokens, -1)


@contextmanager
def _saving(rows_ND: Tensor, again: Callable[[], tuple[Tensor, Tensor]] | None) -> Iterator[None]:
    """Context of the experts: received rows that they save are sent again when wanted, or copied.

    Their place is taken by other exchanges before the backward pass.
    """

    def pack(saved: Tensor) -> Tensor | None:
        if saved.data_ptr() != rows_ND.data_ptr() or saved.shape != rows_ND.shape:
            return saved
        return None if again else saved.clone()

    def unpack(packed: Tensor | None) -> Tensor:
        if packed is not None:
            return packed
        assert again is not None
        return again()[0]

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


class _Dispatch(torch.autograd.Function):
    """Push of tokens and routing; backward brings their gradients back and sums them."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, idx_TK: Tensor, prob_TK: Tensor, exchange: Exchange, local: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        routing = torch.stack((idx_TK, prob_TK.view(torch.int32)))
        rows_ND, side = exchange.scatter(x_TD, idx_TK, _padded(routing.view(1, -1)), local)
        received_RX = _blocks(side, exchange.ranks, routing.numel())
        idx, prob = received_RX.view(exchange.ranks, *routing.shape).unbind(1)
        idx_NK = idx.flatten(0, 1).contiguous()
        prob_NK = prob.flatten(0, 1).contiguous().view(torch.float32)
        ctx.exchange, ctx.local = exchange, local
        ctx.save_for_backward(idx_TK, idx_NK)
        ctx.mark_non_differentiable(idx_NK)
        return rows_ND.view_as(rows_ND), idx_NK, prob_NK

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_ND: Tensor, _: Tensor, grad_NK: Tensor
    ) -> tuple[Tensor | None, ...]:
        from kernels.sm90.combine import combine

        exchange, (idx_TK, idx_NK) = ctx.exchange, ctx.saved_tensors
        R, (T, K) = exchange.ranks, idx_TK.shape
        blocks_RX = _padded(grad_NK.view(torch.int32).view(R, -1))
        rows_ND, side = exchange.give_back(grad_ND, idx_NK, blocks_RX, ctx.local)
        grad_TD = combine(rows_ND, _sums(idx_TK, exchange, ctx.local))
        probs_RTK = _blocks(side, R, T * K).view(torch.float32).view(R, T, K)
        return grad_TD, None, probs_RTK.sum(0), None, None


class _Return(torch.autograd.Function):
    """Sums of received tokens back to their ranks, summed there. Backward pushes the gradient."""

    @staticmethod
    def forward(ctx: Any, out_ND: Tensor, route: Route, exchange: Exchange, local: int) -> Tensor:
        from kernels.sm90.combine import combine

        ctx.exchange, ctx.local = exchange, local
        ctx.save_for_backward(route.idx_TK)
        rows_ND, _ = exchange.give_back(out_ND, route.idx_NK, out_ND.new_empty(0), local)
        return combine(rows_ND, route.sums_TR)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        (idx_TK,) = ctx.saved_tensors
        rows_ND, _ = ctx.exchange.scatter(grad_TD, idx_TK, grad_TD.new_empty(0), ctx.local)
        return rows_ND, None, None, None
