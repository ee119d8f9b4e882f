"""Kernels `push` and `arrive`: rows of tokens to the memory of other GPUs, and waiting for theirs.

One exchange between the R GPUs of a group: each pushes rows to places that nobody else writes, then
raises a flag at every peer; each waits for the flags of all. Row n of a rank with number `me` lands
at row me * T + n % T of its targets. `push` brings

    tokens (N = T) to the ranks of their experts, each once whatever number of experts it has there,
    or sums (N = R * T) of this rank's experts back: row n to rank n // T if it is for one of them,

together with a dense block of side data for each rank, which goes first. Rows pass through shared
memory in bulk copies, a few in flight for each warp, so that few SMs fill the links. Tokens go in
waves of a rank's experts: in that of the first one that wants them. Side data and every wave have
flags of their own, so that experts can begin before all tokens have come.

An exchange has a number, the epoch, that is counted on the device: nothing that a CUDA graph would
keep. At the start of exchange u a rank allows its peers exchange u + 1: whatever used the place of
that one before has been done by then, as the caller sees to (`parallel.symm`). No rank pushes
before it is allowed to, and no wait lasts longer than its limit (`peer.wait`).

Legend: R ranks, N rows, T tokens of a rank, K slots of a token, D columns.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64
from torch import Tensor

from kernels.sm90 import peer, ptx
from kernels.sm90.arguments import require
from kernels.sm90.launch import launch, sms
from kernels.sm90.storage import array, struct

MAX_RANKS = 16
MAX_WAVES = 8
ALLOWED = (1 + MAX_WAVES) * MAX_RANKS
"""A rank's flags: R that say whose side data have arrived, and MAX_RANKS later for the first wave,
and so on; from here on R that say who allows a push."""
FLAGS = ALLOWED + MAX_RANKS
_WARPS = 4
_WARP = 32
_SMEM_BYTES = 200 * 1024
_MOST_IN_FLIGHT = 8
_EPOCH, _SEEN, _DONE = 0, 1, 2
STATE = _DONE + 1 + MAX_WAVES
"""int32 of a rank's own: exchanges pushed, the one that was waited for last, and CTAs that are
through with the side data and each wave."""
SEEN_BYTES = 4 * _SEEN


class Places(NamedTuple):
    """Where an exchange of a rank writes and waits; addresses are int64 on the device."""

    rows_R: Tensor
    """Of the [R * T, D] rows that each rank receives."""
    side_R: Tensor
    """Of each rank's blocks of side data."""
    flags_R: Tensor
    """Of each rank's flags, int32 [FLAGS], first 1 in those from ALLOWED on and 0 before."""
    state: Tensor
    """int32 [STATE] of this rank, first 0."""
    report: Tensor
    """int32 [4] in pinned memory, first 0: rank + 1 for which a wait was in vain, epoch, flag."""
    rank: int
    """This one."""
    limit_ms: int
    """Of every wait."""


@dataclass(frozen=True)
class PushConfig:
    """What is compiled into a `push` kernel."""

    row_bytes: int
    ranks: int
    back: bool
    """Sums back to the tokens' ranks, not tokens to their experts' ranks."""

    def __post_init__(self) -> None:
        if self.row_bytes % 16 or not 16 <= self.row_bytes <= _SMEM_BYTES // (2 * _WARPS):
            raise ValueError(
                f"rows of {self.row_bytes} bytes: push takes multiples of 16 "
                f"up to {_SMEM_BYTES // (2 * _WARPS)}"
            )
        if not 1 <= self.ranks <= MAX_RANKS:
            raise ValueError(f"{self.ranks} ranks: push serves 1 to {MAX_RANKS}")

    @property
    def depth(self) -> int:
        """Rows of a warp in shared memory."""
        return min(_MOST_IN_FLIGHT, _SMEM_BYTES // (_WARPS * self.row_bytes))

    @property
    def lag(self) -> int:
        """Rows that are being loaded while one is stored."""
        return max(1, self.depth - 2)


class PushKernel:
    """Rows and side data to the ranks that want them, then a flag to each."""

    pointers: ClassVar[tuple[tuple[type, int], ...]] = (
        (Int32, 16),  # rows [N, D]
        (Int32, 4),  # table [N, K]: expert ids of the rows, negative: none
        (Int32, 16),  # side
        (Int64, 8),  # rows_R
        (Int64, 8),  # side_R
        (Int64, 8),  # flags_R
        (Int32, 4),  # state
        (Int32, 4),  # report
    )
    integers: ClassVar[int] = 11

    def __init__(self, config: PushConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self,
        rows: cute.Pointer,
        table: cute.Pointer,
        side: cute.Pointer,
        rows_R: cute.Pointer,
        side_R: cute.Pointer,
        flags_R: cute.Pointer,
        state: cute.Pointer,
        report: cute.Pointer,
        sizes: tuple[Int32, ...],
        stream: cuda.CUstream,
    ) -> None:
        """Sizes: N, T, K, experts of a rank, rank, pieces of 16 bytes of a block of side data and
        from one to the next, limit in milliseconds, CTAs, waves, experts of a wave."""
        ranks, ctas = self.config.ranks, sizes[8]
        self.kernel(
            rows,
            table,
            side,
            cute.make_tensor(rows_R, cute.make_layout(ranks)),
            cute.make_tensor(side_R, cute.make_layout(ranks)),
            cute.make_tensor(flags_R, cute.make_layout(ranks)),
            cute.make_tensor(state, cute.make_layout(STATE)),
            report,
            sizes,
        ).launch(grid=[ctas, 1, 1], block=[_WARPS * _WARP, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self,
        rows: cute.Pointer,
        table: cute.Pointer,
        side: cute.Pointer,
        rows_R: cute.Tensor,
        side_R: cute.Tensor,
        flags_R: cute.Tensor,
        state: cute.Tensor,
        report: cute.Pointer,
        sizes: tuple[Int32, ...],
    ) -> None:
        config = self.config
        N, T, K, local, rank, pieces, apart, limit, ctas, waves, in_wave = sizes
        layout = struct(
            loaded=array(cutlass.Int64, _WARPS * config.depth),
            active=array(cutlass.Int32, _WARPS * 2 * _WARP),
            rows=array(cutlass.Int32, _WARPS * config.depth * config.row_bytes // 4, 128),
        )
        storage = cutlass.utils.SmemAllocator().allocate(layout)
        thread = cute.arch.thread_idx()[0]
        warp, lane = cute.arch.make_warp_uniform(thread // _WARP), thread % _WARP
        loaded = storage.loaded.data_ptr() + warp * config.depth
        if lane == 0:
            for slot in cutlass.range_constexpr(config.depth):
                cute.arch.mbarrier_init(loaded + slot, 1)
        cute.arch.mbarrier_init_fence()
        epoch = state[_EPOCH] + 1
        own = flags_R[rank]
        if thread < config.ranks:
            if cute.arch.block_idx()[0] == 0:
                peer.store_release(flags_R[thread] + 4 * (ALLOWED + rank), epoch + 1)
            flag = own + 4 * (ALLOWED + thread)
            peer.wait(flag, epoch, limit, report.toint(), thread)
        cute.arch.sync_threads()
        self._send_side(side, side_R, rank, pieces, apart, ctas)
        self._publish(state, flags_R, Int32(0), waves, rank, epoch, ctas)
        done = Int32(0)
        for wave in cutlass.range(waves):
            done = self._send_rows(
                *(rows, table, rows_R, storage, loaded, done),
                *(N, T, K, local, rank, ctas, wave, in_wave),
            )
            self._publish(state, flags_R, wave + 1, waves, rank, epoch, ctas)

    @cute.jit
    def _publish(
        self,
        state: cute.Tensor,
        flags_R: cute.Tensor,
        part: Int32,
        last: Int32,
        rank: Int32,
        epoch: Int32,
        ctas: Int32,
    ) -> None:
        """Tell all ranks, once all CTAs are through with a part: 0, the side data, or a wave."""
        # Bulk copies have been written; the other stores are before this fence.
        cute.arch.fence_proxy("async.global")
        cute.arch.fence_acq_rel_sys()
        cute.arch.sync_threads()
        if cute.arch.thread_idx()[0] == 0:
            done = state.iterator + (_DONE + part)
            before = cute.arch.atomic_add(done, Int32(1), sem="acq_rel", scope="gpu")
            if before == ctas - 1:
                state[_DONE + part] = Int32(0)
                if part == last:
                    state[_EPOCH] = epoch
                cute.arch.fence_acq_rel_sys()
                for r in cutlass.range_constexpr(self.config.ranks):
                    peer.store_release(flags_R[r] + 4 * (part * MAX_RANKS + rank), epoch)

    @cute.jit
    def _send_side(
        self,
        side: cute.Pointer,
        side_R: cute.Tensor,
        rank: Int32,
        pieces: Int32,
        apart: Int32,
        ctas: Int32,
    ) -> None:
        """Block r of the side data, `apart` after block r - 1, to block `rank` of rank r."""
        first = cute.arch.block_idx()[0] * (_WARPS * _WARP) + cute.arch.thread_idx()[0]
        for r in cutlass.range_constexpr(self.config.ranks):
            source = side.toint() + Int64(r) * apart * 16
            target = side_R[r] + Int64(rank) * pieces * 16
            for piece in cutlass.range(first, pieces, ctas * (_WARPS * _WARP)):
                at = Int64(piece) * 16
                ptx.store_global(target + at, *peer.load_global(source + at))

    @cute.jit
    def _send_rows(
        self,
        rows: cute.Pointer,
        table: cute.Pointer,
        rows_R: cute.Tensor,
        storage: cutlass.Constexpr,
        loaded: cute.Pointer,
        done: Int32,
        N: Int32,
        T: Int32,
        K: Int32,
        local: Int32,
        rank: Int32,
        ctas: Int32,
        wave: Int32,
        in_wave: Int32,
    ) -> Int32:
        """A warp's rows of a wave, 32 at a time: who wants them, one a lane; lane 0 moves them.

        `done` of its rows had been moved before; returned is that number after the wave.
        """
        config = self.config
        thread = cute.arch.thread_idx()[0]
        warp, lane = cute.arch.make_warp_uniform(thread // _WARP), thread % _WARP
        number, warps = cute.arch.block_idx()[0] * _WARPS + warp, ctas * _WARPS
        active = storage.active.data_ptr() + warp * (2 * _WARP)
        listed = cute.make_tensor(active, cute.make_layout((_WARP, 2), stride=(2, 1)))
        size = config.depth * config.row_bytes
        strip = ptx.address(storage.rows.data_ptr()) + warp * size
        for base in cutlass.range(number, N, warps * _WARP):
            row = base + lane * warps
            wanted = self._wanted(table, row, N, T, K, local, rank, wave, in_wave)
            ballot = cute.arch.vote_ballot_sync(wanted != 0)
            place = cute.arch.popc(ballot & ((Int32(1) << lane) - 1))
            if wanted != 0:
                listed[place, 0], listed[place, 1] = row, wanted
            cute.arch.sync_warp()
            count = cute.arch.popc(ballot)
            if lane == 0:
                for i in cutlass.range(count + config.lag):
                    if i < count:
                        # The slot's last row has been stored; those after it may still be read.
                        cute.arch.cp_async_bulk_wait_group(config.depth - 1 - config.lag, read=True)
                        slot = (done + i) % config.depth
                        barrier = loaded + slot
                        cute.arch.mbarrier_arrive_and_expect_tx(barrier, config.row_bytes)
                        source = rows.toint() + Int64(listed[i, 0]) * config.row_bytes
                        to = strip + slot * config.row_bytes
                        peer.load_row(to, source, Int32(config.row_bytes), ptx.address(barrier))
                    if i >= config.lag:
                        j = i - config.lag
                        slot, phase = (done + j) % config.depth, (done + j) // config.depth % 2
                        cute.arch.mbarrier_wait(loaded + slot, phase)
                        at = rank * T + listed[j, 0] % T
                        for r in cutlass.range_constexpr(config.ranks):
                            if (listed[j, 1] >> r) & 1 == 1:
                                target = rows_R[r] + Int64(at) * config.row_bytes
                                of = strip + slot * config.row_bytes
                                peer.store_row(target, of, Int32(config.row_bytes))
                        cute.arch.cp_async_bulk_commit_group()
            done += count
            cute.arch.sync_warp()
        cute.arch.cp_async_bulk_wait_group(0, read=False)
        return done

    @cute.jit
    def _wanted(
        self,
        table: cute.Pointer,
        row: Int32,
        N: Int32,
        T: Int32,
        K: Int32,
        local: Int32,
        rank: Int32,
        wave: Int32,
        in_wave: Int32,
    ) -> Int32:
        """The ranks that want a row in this wave, a bit each."""
        now, before = Int32(0), Int32(0)
        if row < N:
            entries = cute.make_tensor(table + Int64(row) * K, cute.make_layout(K))
            for k in cutlass.range(K):
                entry = entries[k]
                if entry >= 0:
                    owner = entry // local
                    if cutlass.const_expr(self.config.back):
                        if owner == rank:
                            now = Int32(1) << (row // T)
                    else:
                        of = (entry - owner * local) // in_wave
                        if of == wave:
                            now = now | (Int32(1) << owner)
                        if of < wave:
                            before = before | (Int32(1) << owner)
        return now & ~before


@dataclass(frozen=True)
class ArriveConfig:
    """What is compiled into an `arrive` kernel."""

    ranks: int


class ArriveKernel:
    """Wait until a part of an exchange has come from all ranks, or has been sent by this one."""

    pointers: ClassVar[tuple[tuple[type, int], ...]] = ((Int64, 8), (Int32, 4), (Int32, 4))
    integers: ClassVar[int] = 5

    def __init__(self, config: ArriveConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self,
        flags_R: cute.Pointer,
        state: cute.Pointer,
        report: cute.Pointer,
        sizes: tuple[Int32, Int32, Int32, Int32, Int32],
        stream: cuda.CUstream,
    ) -> None:
        """Sizes: rank, limit in milliseconds, part, exchanges after the one waited for last, and
        whether only this rank's own flag matters."""
        self.kernel(flags_R, state, report, *sizes).launch(
            grid=[1, 1, 1], block=[_WARP, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        flags_R: cute.Pointer,
        state: cute.Pointer,
        report: cute.Pointer,
        rank: Int32,
        limit: Int32,
        part: Int32,
        ahead: Int32,
        alone: Int32,
    ) -> None:
        lane = cute.arch.thread_idx()[0]
        seen = cute.make_tensor(state + _SEEN, cute.make_layout(1))
        epoch = seen[0] + ahead
        cute.arch.sync_warp()
        if lane < self.config.ranks and (alone == 0 or lane == rank):
            own = cute.make_tensor(flags_R, cute.make_layout(self.config.ranks))[rank]
            flag = own + 4 * Int64(part * MAX_RANKS + lane)
            peer.wait(flag, epoch, limit, report.toint(), lane)
        if lane == 0 and alone == 0:
            seen[0] = epoch


def push(
    rows_ND: Tensor,
    table_NK: Tensor,
    side: Tensor,
    places: Places,
    *,
    tokens: int,
    local_experts: int,
    back: bool = False,
    comm_sms: int = 0,
    waves: int = 1,
) -> None:
    """Push rows and side data of one exchange, and say so to all ranks.

    Args:
        rows_ND: bf16, contiguous; T rows, or `back` R * T rows.
        table_NK: int32, contiguous: global expert ids of the rows, -1 for an empty slot.
        side: contiguous; all of it to every rank, or `back` one of R equal blocks to each. In
            multiples of 16 bytes; may be empty.
        places: where to.
        tokens: T.
        local_experts: experts of a rank; rank r has those from r * local_experts on.
        back: rows go back to the ranks of their tokens.
        comm_sms: CTAs, one a SM; 0 takes as many as there are SMs.
        waves: groups of `experts_of_a_wave` of a rank's experts, after each of which its tokens are
            there; 1 with `back`.

    Raises:
        ValueError: a shape, dtype, stride, device or size that the kernel does not take.
    """
    where, ranks = rows_ND.device, places.rows_R.numel()
    N, D = rows_ND.shape
    require(
        where,
        rows=(rows_ND, torch.bfloat16, ((ranks if back else 1) * tokens, D)),
        table=(table_NK, torch.int32, (N, table_NK.shape[1])),
        side=(side, side.dtype, None),
    )
    size = side.numel() * side.element_size()
    block = size // ranks if back else size
    if block % 16 or (back and block * ranks != size):
        raise ValueError(f"side data of {size} bytes: blocks must be multiples of 16 bytes")
    if not 1 <= waves <= (1 if back else MAX_WAVES):
        raise ValueError(f"waves={waves}: 1 to {MAX_WAVES}, and 1 on the way back")
    sizes = (N, tokens, table_NK.shape[1], local_experts, places.rank)
    launch(
        PushKernel,
        PushConfig(2 * D, ranks, back),
        (rows_ND, table_NK, side, *places[:5]),
        (
            *sizes,
            *(block // 16, block // 16 if back else 0),
            *(places.limit_ms, comm_sms or sms(where)),
            *(waves, experts_of_a_wave(local_experts, waves)),
        ),
    )


def experts_of_a_wave(local_experts: int, waves: int) -> int:
    """Of each but perhaps the last one."""
    return -(-local_experts // waves)


def arrive(places: Places, *, part: int = 1, ahead: int = 1, alone: bool = False) -> None:
    """Let the stream wait for a part of an exchange from all ranks.

    Args:
        places: of the exchange.
        part: 0 is the side data; then waves, each of which comes after those before it.
        ahead: exchanges since the one that was waited for last, in the order of their pushes;
            0 is that one.
        alone: only until this rank has sent the part, hence its push is running; what was waited
            for last stays what it was.
    """
    ranks = places.rows_R.numel()
    tensors = (places.flags_R, places.state, places.report)
    sizes = (places.rank, places.limit_ms, part, ahead, int(alone))
    launch(ArriveKernel, ArriveConfig(ranks), tensors, sizes)
