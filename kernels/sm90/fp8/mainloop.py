"""`gemm.mainloop` for operands in FP8: e4m3 weights, e4m3 or e5m2 rows.

A stage holds 128 channels, the same bytes as 64 in bf16. Both operands have their contraction
contiguous, as wgmma requires in FP8, in one part or two: blocks of 128 channels restart in each,
and the last block of a part, if it is short, ends with zeros. So a part is a mode of its own in the
TMA descriptors, which fill with zeros what lies past its end.

Every stage is multiplied into a temporary accumulator, of which a thread has one for 128 or 192
columns, and added with its scales in fp32 (`promotion`): wgmma keeps some 14 bits of a sum of FP8
products, so nothing is summed there over more than a block.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float8E4M3FN, Float8E5M2, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode

from phalanx.kernels.sm90.fp8.promotion import BLOCK, Fp8MmaConsumer
from phalanx.kernels.sm90.gemm.mainloop import MMA_GROUPS, Mainloop, Producer
from phalanx.kernels.sm90.gemm.operands import Rows, Weights
from phalanx.kernels.sm90.gemm.ring import State
from phalanx.kernels.sm90.jit import ptx

FORMATS = {"e4m3": Float8E4M3FN, "e5m2": Float8E5M2}
_ATOM = 64
_CHUNK = 16


@dataclass(frozen=True)
class Fp8Mainloop(Mainloop):
    """Tiles that both warp groups share."""

    rows_format: str = "e4m3"  # format of A, one of `FORMATS`

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pingpong or self.b_transposed:
            raise ValueError("FP8: no ping-pong, and B has its contraction contiguous")
        if self.rows_format not in FORMATS:
            raise ValueError(f"rows_format={self.rows_format!r}: one of {', '.join(FORMATS)}")

    @property
    def types(self) -> tuple[Any, Any]:
        return FORMATS[self.rows_format], Float8E4M3FN

    @property
    def copies_in_flight(self) -> int:
        """Stages whose gathered rows are in flight when the one before them is declared full: at
        most two less than there are, or the multiplying warps would have none."""
        return min(2, self.stages - 2)

    @property
    def part(self) -> int:
        """Columns of the temporary accumulator: a tile of 256 is multiplied in two halves."""
        return 192 if self.columns == 192 else BLOCK

    def blocks(self, mA: cute.Tensor) -> Int32:
        return (mA.shape[1] + (BLOCK - 1)) // BLOCK * mA.shape[2]

    def operands(
        self, a: Rows, b: Weights, num_gate_parts: int
    ) -> tuple[cute.Tensor, cute.Tensor, Any]:
        of_a, of_b = self.types
        return (
            activations(cute.recast_ptr(a.data, dtype=of_a), a.rows, a.channels, a.parts, a.pitch),
            weights(cute.recast_ptr(b.data, dtype=of_b), b.columns, b.channels, b.parts, b.experts),
            operand_scales(a, b, num_gate_parts),
        )

    def tiled_mma(self) -> cute.TiledMma:
        major = OperandMajorMode.K
        groups, tile = (MMA_GROUPS, 1, 1), (_ATOM, self.part)
        return hopper.make_trivial_tiled_mma(
            *self.types, major, major, Float32, groups, tiler_mn=tile
        )

    def producer(self, *args: Any) -> "Fp8Producer":
        return Fp8Producer(self, *args)

    def mma_consumer(
        self, storage: Any, tiled_mma: cute.TiledMma, group: Int32, *scales: Any
    ) -> Any:
        return Fp8MmaConsumer(self, storage, tiled_mma, group, *scales)


class Fp8Producer(Producer):
    """Stages of 128 channels, block by block of one part after the other."""

    modes = 2
    loop: Fp8Mainloop

    def _pitch(self) -> Int64:
        return Int64(self.mA.stride[0])

    def place(self, k: Int32) -> tuple[Int32, ...]:
        each = (self.mA.shape[1] + (BLOCK - 1)) // BLOCK
        # There are two parts at most: a comparison in place of a division.
        part = cutlass.select_(k >= each, Int32(1), Int32(0))
        return k - part * each, part

    def copy(self, to: Int32, source: Int64, k: Int32) -> None:
        """Start the copy of a piece; zeros past the last channel, where memory holds other rows."""
        left = self.mA.shape[1] - k * BLOCK
        size = cutlass.select_(self.thread % 8 * _CHUNK < left, Int32(_CHUNK), Int32(0))
        ptx.cp_async_or_zero(to, source + k * BLOCK, size)

    @cute.jit
    def copied(self, state: State, k: Int32) -> None:
        """Arrive for the block `copies_in_flight` before, whose copies have landed.

        cp.async writes through the generic proxy, wgmma reads through the async one. A fence in the
        multiplying warps would wait for the scales that they have in flight: so the copiers fence,
        which takes a wait for their copies in place of `cp.async.mbarrier.arrive`.
        """
        cute.arch.cp_async_commit_group()
        if k >= self.loop.copies_in_flight:
            cute.arch.cp_async_wait_group(self.loop.copies_in_flight)
            self._landed(state, self.loop.copies_in_flight)

    @cute.jit
    def finish(self, state: State, blocks: Int32) -> None:
        """Arrive for the blocks of the tile that are left."""
        if cutlass.const_expr(self.loop.gather):
            for left in cutlass.range_constexpr(self.loop.copies_in_flight, 0, -1):
                if blocks >= left:
                    cute.arch.cp_async_wait_group(left - 1)
                    self._landed(state, left)

    def _landed(self, state: State, before: int) -> None:
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.mbarrier_arrive(self.ring.earlier_full_barrier(state, before))


def activations(
    pointer: cute.Pointer, rows: Int32, each: Int32, parts: Int32, pitch: Int32 | None = None
) -> cute.Tensor:
    """[rows, channels of a part, parts], `each` a multiple of 64. A row is contiguous; rows follow
    each other unless they have a `pitch`, a multiple of 16."""
    # Divisibility in 16 bytes, which TMA requires, has to be known when the kernel is compiled.
    each = cute.assume(each, divby=64)
    wide = cute.assume(Int64(each), divby=64)
    if pitch is None:
        row = cute.assume(Int64(each) * Int64(parts), divby=64)
    else:
        row = cute.assume(Int64(pitch), divby=16)
    return cute.make_tensor(pointer, cute.make_layout((rows, each, parts), stride=(row, 1, wide)))


def weights(pointer: cute.Pointer, N: Int32, each: Int32, parts: Int32, L: Int32) -> cute.Tensor:
    """[N, channels of a part, parts, L] over contiguous [L, N, parts * each]."""
    each = cute.assume(each, divby=64)
    wide = cute.assume(Int64(each), divby=64)
    pitch = cute.assume(Int64(each) * Int64(parts), divby=64)
    plane = cute.assume(Int64(N) * Int64(each) * Int64(parts), divby=64)
    shape, stride = (N, each, parts, L), (pitch, 1, wide, plane)
    return cute.make_tensor(pointer, cute.make_layout(shape, stride=stride))


def operand_scales(a: Rows, b: Weights, num_gate_parts: int) -> tuple[Any, ...]:
    """The scales that `promotion.Fp8MmaConsumer` takes: those of A [rows, K blocks], of B [N
    blocks, K blocks, L], with a gate half of the N blocks, and 0, unknown to the compiler."""
    of_rows = cute.make_layout((1, 1), stride=(a.scale_row, a.scale_block))
    of_weights = cute.make_layout((b.blocks, 1, 1), stride=(b.scale_n, b.scale_k, b.scale_expert))
    half = b.blocks // 2 if num_gate_parts == 2 else None
    tensors = cute.make_tensor(a.scale, of_rows), cute.make_tensor(b.scale, of_weights)
    return *tensors, half, Int32(0)
