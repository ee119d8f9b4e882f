"""Kernel `bias_grad`: db[e] (+)= sum over the rows s of expert e of scale[s] * d[s].

Bound by reading d once, in bf16 or in FP8 with a scale for 128 channels of a row. An expert's rows
are cut into chunks of 256, counted from its first row; a CTA adds up one chunk for 256 columns in
fp32 and writes it to a slot of its own. A second kernel adds an expert's slots one after the other.
Neither the cut nor an order of additions depends on where an expert begins or who computes what, so
results repeat bit for bit.

Expert e has the slots from offsets[e] // 256 + e on: enough for its chunks, and never another's.

Roles. `chunks` has a CTA for 256 columns of a slot, 8 warps that share the chunk's rows; they meet
once, at a barrier behind their sums in shared memory. `sums` has a thread for a column of an
expert, and no barrier. It is launched behind `chunks` on the stream, which orders the slots.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float32, Int32, Int64
from torch import Tensor

from phalanx.kernels.sm90.fp8.mainloop import BLOCK, FORMATS
from phalanx.kernels.sm90.gemm.operands import Matrix, data_of, format_of, rows
from phalanx.kernels.sm90.gemm.tensors import Rows, array, struct
from phalanx.kernels.sm90.jit.launch import check, launch
from phalanx.kernels.sm90.jit.pointers import Bf16ScalarPtr, Fp32Ptr, IntPtr

CHUNK = 256  # rows of a slot
WARPS = 8
_LANE_COLUMNS = 8
_COLUMNS = (
    32 * _LANE_COLUMNS
)  # columns of a CTA of the first kernel; a lane holds 8, 16 bytes of bf16
_SUM_THREADS = 128  # threads, and columns, of a CTA of the second kernel
_IN_FLIGHT = 64  # bytes that a lane of the first kernel requests before its first addition


@dataclass(frozen=True)
class BiasGradConfig:
    """Choices that are compiled into a `bias_grad` kernel."""

    fp32_out: bool = False  # db is fp32, not bf16
    add: bool = False  # add to db
    scaled: bool = False  # rows are multiplied by scale
    indexed: bool = False  # rows of d are picked by an index
    behind: bool = False  # offsets[0] may be above 0: slots before are neither written nor read
    rows_format: str = "bf16"  # `bf16`, `e4m3` or `e5m2`

    @property
    def element(self) -> Any:
        return BFloat16 if self.rows_format == "bf16" else FORMATS[self.rows_format]

    @property
    def together(self) -> int:
        bytes_of_row: int = _LANE_COLUMNS * self.element.width // 8
        return _IN_FLIGHT // bytes_of_row


class BiasGradKernel:
    """The kernels of a configuration, as `cute.compile` takes them."""

    def __init__(self, config: BiasGradConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self,
        d: Rows,
        scale: Fp32Ptr,
        index: IntPtr,
        offsets: IntPtr,
        slots: Fp32Ptr,
        db: Bf16ScalarPtr,
        S: Int32,
        O: Int32,  # noqa: E741
        L: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """`S` rows of `O` channels, a multiple of 64, in d; scale, index [S]; offsets [L + 1];
        slots fp32 [S // CHUNK + L, O]; db [L, O]."""
        O = cute.assume(O, divby=64)  # noqa: E741
        row = cute.assume(Int64(O), divby=64)
        # Slots by the largest number that any distribution of rows over experts needs: the host
        # does not know theirs.
        count = S // CHUNK + L
        partial = cute.make_tensor(slots, cute.make_layout((count, O), stride=(row, 1)))
        if cutlass.const_expr(self.config.fp32_out):
            db = cute.recast_ptr(db, dtype=Float32)
        self.chunks(
            d,
            cute.make_tensor(scale, cute.make_layout(S)),
            cute.make_tensor(index, cute.make_layout(S)),
            cute.make_tensor(offsets, cute.make_layout(L + 1)),
            partial,
            L,
        ).launch(
            # A CTA for each slot there may be: those without a chunk end after the look-up.
            grid=[(O + (_COLUMNS - 1)) // _COLUMNS, count, 1],
            block=[32 * WARPS, 1, 1],
            stream=stream,
        )
        self.sums(
            partial,
            cute.make_tensor(offsets, cute.make_layout(L + 1)),
            cute.make_tensor(db, cute.make_layout((L, O), stride=(row, 1))),
        ).launch(
            grid=[(O + (_SUM_THREADS - 1)) // _SUM_THREADS, L, 1],
            block=[_SUM_THREADS, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def chunks(
        self,
        d: Rows,
        scale: cute.Tensor,
        index: cute.Tensor,
        offsets: cute.Tensor,
        slots: cute.Tensor,
        experts: Int32,
    ) -> None:
        """A chunk and 256 columns: warp w adds rows w, w + 8, ..., then the warps are added."""
        layout = struct(sums=array(Float32, WARPS * _COLUMNS, 16))
        storage = cutlass.utils.SmemAllocator().allocate(layout)
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        tile, slot, _ = cute.arch.block_idx()
        # Chunks belong to one expert each, so a slot is written once, and sums have one order.
        row, end = self._find(offsets, experts, slot)
        # The same in the whole CTA, which meets at the barrier inside.
        if row < end:
            end = cutlass.min(end, row + CHUNK)
            column = tile * _COLUMNS + lane * _LANE_COLUMNS
            total = cute.make_rmem_tensor(_LANE_COLUMNS, Float32)
            total.fill(0.0)
            # O is a multiple of 64, and a lane has 8 columns: all of them or none. Without any its
            # zeros are stored all the same, for columns that nobody adds.
            if column < slots.shape[1]:
                self._add_rows(total, self._columns(d, column), scale, index, row + warp, end)
            sums = cute.make_tensor(
                storage.sums.data_ptr(),
                cute.make_layout((WARPS, _COLUMNS), stride=(_COLUMNS, 1)),
            )
            for i in cutlass.range_constexpr(_LANE_COLUMNS):
                sums[warp, lane * _LANE_COLUMNS + i] = total[i]
            cute.arch.sync_threads()  # sums of all warps, before each thread adds a column of them
            thread = cute.arch.thread_idx()[0]
            out_column = tile * _COLUMNS + thread
            if out_column < slots.shape[1]:
                total_of_warps = Float32(0)
                for w in cutlass.range_constexpr(WARPS):
                    total_of_warps += sums[w, thread]
                slots[slot, out_column] = total_of_warps

    @cute.kernel
    def sums(self, slots: cute.Tensor, offsets: cute.Tensor, db: cute.Tensor) -> None:
        """Add an expert's slots; a thread has one column."""
        tile, expert, _ = cute.arch.block_idx()
        column = tile * _SUM_THREADS + cute.arch.thread_idx()[0]
        begin, end = offsets[expert], offsets[expert + 1]
        # As `_find` inverts it. Slots between experts hold nothing, and are not read.
        first = begin // CHUNK + expert
        if column < db.shape[1]:
            total = Float32(0)
            # In a fixed order, by one thread: no atomics.
            for slot in cutlass.range(first, first + _chunks(begin, end), unroll=8):
                total += slots[slot, column]
            if cutlass.const_expr(self.config.add):
                total += Float32(db[expert, column])
            db[expert, column] = total.to(db.element_type)

    @cute.jit
    def _find(self, offsets: cute.Tensor, experts: Int32, slot: Int32) -> tuple[Int32, Int32]:
        """First row of a slot's chunk and the end of its expert, by bisection; equal for none."""
        # First slots rise by 1 at least from expert to expert: the slot's expert is the last one
        # whose first slot is not behind it. That one may have fewer chunks: then the row is past
        # its end.
        low, high = Int32(0), experts - 1
        while low < high:
            middle = (low + high + 1) // 2
            if offsets[middle] // CHUNK + middle <= slot:
                low = middle
            else:
                high = middle - 1
        begin, end = offsets[low], offsets[low + 1]
        row = begin + (slot - (begin // CHUNK + low)) * CHUNK
        if cutlass.const_expr(self.config.behind):
            # With rows before the first expert's there are slots before its first one. The
            # bisection gives them to that expert, at a row before its own.
            row = cutlass.select_(row < begin, end, row)
        return cutlass.min(row, end), end

    @cute.jit
    def _add_rows(
        self,
        total: cute.Tensor,
        d: "_Columns",
        scale: cute.Tensor,
        index: cute.Tensor,
        first: Int32,
        end: Int32,
    ) -> None:
        count = cutlass.max((end - first + (WARPS - 1)) // WARPS, 0)
        # Several rows are requested before the first is added: loads, not additions, bound this.
        batch = self.config.together
        together = count // batch * batch
        for i in cutlass.range(0, together, batch, unroll=1):
            loaded = [self._load(d, scale, index, first + (i + j) * WARPS) for j in range(batch)]
            # In the order of rows, as in the loop below: how many are in flight changes no bit.
            for piece, factor in loaded:
                self._add(total, piece, factor)
        for i in cutlass.range(together, count, unroll=1):
            piece, factor = self._load(d, scale, index, first + i * WARPS)
            self._add(total, piece, factor)

    def _columns(self, d: Rows, column: Int32) -> "_Columns":
        """8 columns from `column` on, which share a scale: parts are multiples of 64."""
        data = cute.recast_ptr(d.data, dtype=self.config.element)
        scales = d.scale
        if self.config.rows_format != "bf16":
            # Blocks of scales restart in each part.
            part = column // d.channels
            block = part * ((d.channels + (BLOCK - 1)) // BLOCK)
            block += (column - part * d.channels) // BLOCK
            scales += block * d.scale_block
        return _Columns(data, scales, column, d.pitch, d.scale_row)

    def _load(
        self, d: "_Columns", scale: cute.Tensor, index: cute.Tensor, row: Int32
    ) -> tuple[cute.Tensor, Float32]:
        source = index[row] if self.config.indexed else row
        piece = cute.make_rmem_tensor(_LANE_COLUMNS, self.config.element)
        at = d.data + (Int64(source) * d.pitch + d.first)
        # 8 columns in one access, of 16 bytes in bf16 and of 8 in FP8: rows begin at such
        # multiples.
        at = at.align(_LANE_COLUMNS * self.config.element.width // 8)
        cute.autovec_copy(cute.make_tensor(at, _LANE_COLUMNS), piece)
        factor = scale[row] if self.config.scaled else Float32(1)
        if self.config.rows_format != "bf16":
            scale_of_row = d.scales + Int64(source) * d.scale_row
            factor *= cute.make_tensor(scale_of_row, cute.make_layout(1))[0]
        return piece, factor

    def _add(self, total: cute.Tensor, piece: cute.Tensor, factor: Float32) -> None:
        values = piece.load().to(Float32)
        for i in range(_LANE_COLUMNS):
            total[i] += values[i] * factor


class _Columns(NamedTuple):
    data: cute.Pointer
    scales: cute.Pointer
    first: Int32
    pitch: Int32
    scale_row: Int32


def _chunks(begin: Any, end: Any) -> Any:
    return (end - begin + (CHUNK - 1)) // CHUNK


def bias_grad(
    d: Matrix,
    offsets: Tensor,
    *,
    parts: int = 1,
    scale_S: Tensor | None = None,
    index_S: Tensor | None = None,
    out_LO: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    accumulate: bool = False,
    behind: bool = False,
) -> Tensor:
    """db[e] (+)= sum over expert e's rows s of scale[s] * d[s], in fp32, rounded once.

    Args:
        d: bf16 [S, O], contiguous, O a multiple of 64; or e4m3 or e5m2, where rows are contiguous
            and begin at multiples of 16 bytes, with a scale for 128 channels: fp32 [S, blocks of
            O], of any strides. With index_S [N, O], and d[s] is row index_S[s].
        offsets: int32 [L + 1], not decreasing, at most S: expert e has rows offsets[e] to offsets[e
            + 1].
        parts: equal ranges of O whose borders no block of FP8 rows crosses.
        scale_S: fp32 [S]; default: ones. index_S: int32 [S]. Neither is read from offsets[L] on.
        out_LO: bf16 or fp32, contiguous; default: a new one of `dtype`.
        accumulate: add to out_LO. Otherwise experts without rows get zeros.
        behind: offsets[0] need not be 0; rows before it are not read.

    Raises:
        ValueError: a shape, dtype, stride or device that the kernel does not take.
    """
    data = data_of(d)
    if data.ndim != 2 or offsets.ndim != 1:
        shapes = [list(t.shape) for t in (data, offsets)]
        raise ValueError(f"d and offsets must be [S, O] and [L + 1], not {shapes}")
    (N, O), L = data.shape, offsets.shape[0] - 1  # noqa: E741
    S = N if index_S is None else index_S.numel()
    if O % 64 or not O or L < 1:
        raise ValueError(f"O={O}, L={L}: O must be a positive multiple of 64")
    if accumulate and out_LO is None:
        raise ValueError("accumulate: needs out_LO to add to")
    out = data.new_empty(L, O, dtype=dtype) if out_LO is None else out_LO
    if out.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"out (or dtype) must be torch.bfloat16 or torch.float32, not {out.dtype}")
    operand = rows("d", d, (N, O), parts)
    check(data.device, "offsets", offsets, torch.int32, (L + 1,))
    check(data.device, "out", out, out.dtype, (L, O))
    check(data.device, "scale", scale_S, torch.float32, (S,))
    check(data.device, "index", index_S, torch.int32, (S,))
    if S == 0 or N == 0:
        return out if accumulate else out.zero_()
    config = BiasGradConfig(
        *(out.dtype == torch.float32, accumulate, scale_S is not None, index_S is not None),
        behind=behind,
        rows_format=format_of("d", d),
    )
    slots = data.new_empty(S // CHUNK + L, O, dtype=torch.float32)
    launch(
        BiasGradKernel,
        config,
        **dict(d=operand, scale=scale_S, index=index_S, offsets=offsets, slots=slots, db=out),
        **dict(S=S, O=O, L=L),
    )
    return out
