"""From registers to rows in FP8 with a scale for 128 channels, as in `kernels.quantize`.

A warp owns 16 rows of a tile. A row's 128 channels lie in four neighbouring lanes, so its scale
takes two exchanges and no barrier. What is quantised are the values as they are rounded to bf16.
Bytes pass through 2 KB of shared memory of the warp, 16 rows of 128 bytes, swizzled, and leave by
TMA; at the ragged end of an expert the lanes store just the rows that exist.
"""

from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync

from phalanx.kernels.sm90.fp8.mainloop import BLOCK, FORMATS, activations
from phalanx.kernels.sm90.gemm.row_store import ROWS, WARPS, partition, put
from phalanx.kernels.sm90.gemm.tensors import Rows
from phalanx.kernels.sm90.jit import ptx

REGION = ROWS * BLOCK  # bytes of 16 rows
_LARGEST = {"e4m3": 9, "e5m2": 16}  # the largest number of a format is 0.875 * 2^this
# Bits of fp32: infinity, NaN, and 2^-127, which is below the normal numbers.
_INFINITY, _NAN, _BELOW_NORMAL = 0x7F800000, 0x7FC00000, 0x00400000
_ROUND_UP = 0x1FFFFF  # carries into the exponent of fp32 bits whose mantissa is above 0.875
_PIECE = 16  # bytes that a swizzle moves as a whole
MAGNITUDES = 0x7FFF7FFF  # mask of a pair of bf16: all bits but the signs


def power(amax: Int32, name: str) -> Int32:
    """Exponent of the factor up: the largest power of two for which amax stays in range. `amax` are
    the bits of a non-negative bf16 as fp32; of 0 and infinity the exponent is 0."""
    # With amax = m * 2^x and m from 0.5 to 1, x is the biased exponent less 126. A factor of
    # 2^(largest-x) fits if m is at most 0.875, and otherwise half of it. 2^128 is no fp32, hence
    # the 127.
    exponent = cutlass.min(_LARGEST[name] + 126 - ((amax + _ROUND_UP) >> 23), 127)
    # A row of zeros would ask for the largest factor, and an infinity for the smallest.
    finite = (amax > 0) & (amax < _INFINITY)
    return cutlass.select_(finite, exponent, Int32(0))


def scale_up(exponent: Int32) -> Int32:
    """Bits of 2^exponent in fp32, from -126 to 127."""
    return (exponent + 127) << 23


def scale_down(exponent: Int32, amax: Int32) -> Int32:
    """Bits of 2^-exponent in fp32, or NaN if amax is infinite."""
    small = exponent == 127  # 2^-127 is subnormal
    power_down = cutlass.select_(small, Int32(_BELOW_NORMAL), (127 - exponent) << 23)
    return cutlass.select_(amax == _INFINITY, Int32(_NAN), power_down)


class Values:
    """A warp's 16 rows of 128 channels, in pairs of bf16; those not written count as 0. A lane has
    two rows, 8 apart, and of each 8 channels two neighbours."""

    def __init__(self) -> None:
        self.words = cute.make_rmem_tensor(4 * BLOCK // 16, Uint32)
        # A pair for each of the lane's rows: even channels in the lower half, odd ones in the
        # upper.
        self.amax = cute.make_rmem_tensor(2, Uint32)
        self.words.fill(0)
        self.amax.fill(0)

    def put(self, q: int, words: Sequence[Uint32], counted: Uint32 | int = MAGNITUDES) -> None:
        """Channels 16 q to 16 q + 15: four words, as `epilogues.pack` makes of eight values.
        `counted` is MAGNITUDES, or 0 for channels past the last one."""
        self.count(words, counted)
        self.set(q, words)

    def set(self, q: int, words: Sequence[Uint32]) -> None:
        for i, word in enumerate(words):
            self.words[4 * q + i] = word

    def count(self, words: Sequence[Uint32], counted: Uint32 | int = MAGNITUDES) -> None:
        """Take words into the largest magnitudes; `set` stores them later."""
        for i, word in enumerate(words):
            # Words alternate between the lane's two rows. Without the signs bf16 of two channels is
            # compared at a time; NaN is passed over.
            self.amax[i % 2] = ptx.max_pair(self.amax[i % 2], word & Uint32(counted))

    def row_amax(self, half: int) -> Int32:
        """Bits of the largest magnitude of the lane's first or second row, in its four lanes."""
        both = self.amax[half]
        # As fp32 bits, which compare as integers where no number is negative.
        largest = cutlass.max(Int32(both << 16), Int32(both & Uint32(0xFFFF0000)))
        # The four lanes of a row differ in the two lowest bits.
        for step in (1, 2):
            largest = cutlass.max(largest, cute.arch.shuffle_sync_bfly(largest, step))
        return largest


def tensors(x: Rows, name: str) -> tuple[cute.Tensor, cute.Tensor]:
    """Host side: contiguous rows to write, [rows, channels of a part, parts], and their scales."""
    blocks = (x.channels + (BLOCK - 1)) // BLOCK * x.parts
    layout = cute.make_layout((x.rows, blocks), stride=(Int64(blocks), 1))
    data = cute.recast_ptr(x.data, dtype=FORMATS[name])
    return activations(data, x.rows, x.channels, x.parts), cute.make_tensor(x.scale, layout)


def to_memory(tensor: cute.Tensor) -> tuple[Any, Any]:
    """Host side: TMA atom and tensor to store 16 rows to [rows, channels of a part, parts]."""
    # The descriptor has the swizzle of the region, and clips at a part's last channel.
    one = cute.slice_(_layout(1), (None, None, 0))
    op = cpasync.CopyBulkTensorTileS2GOp()
    atom = cpasync.make_tiled_tma_atom(op, tensor, one, (ROWS, BLOCK))
    return atom[0], atom[1]


def _layout(count: int) -> cute.ComposedLayout:
    # Rows of 128 bytes: the swizzle of 128 bytes, over 8 rows. Regions are multiples of its 1024
    # bytes, so that each begins with the pattern.
    plain = cute.make_layout((ROWS, BLOCK, count), stride=(BLOCK, 1, REGION))
    return cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, plain)


class RowBytes:
    """Device side: a warp's regions of shared memory for 16 rows in the FP8 format `name`. `data`
    is a field of shared memory with `regions` for each warp, aligned to 1024 bytes; `thread` counts
    from the first multiplying thread."""

    def __init__(self, name: str, data: Any, regions: int, thread: Int32) -> None:
        self.name = name
        layout = _layout(WARPS * regions)
        self.tensor = data.get_tensor(layout.outer, swizzle=layout.inner, dtype=FORMATS[name])
        self.first = cute.arch.make_warp_uniform(thread // 32) * regions
        self.base = ptx.address(data.data_ptr()) + self.first * REGION

    def write(self, region: int, values: Values, scales: Any, at: tuple[Int32, ...]) -> None:
        """Quantise values into a region, and store their scales, fp32 [rows, blocks]. `at`: the
        first row, the row after the last one, the block."""
        # Factors of the lane's two rows, 8 apart.
        ups = []
        for half in range(2):
            amax = values.row_amax(half)
            exponent = power(amax, self.name)
            ups.append(Int32(scale_up(exponent)).bitcast(Float32))
            down = Int32(scale_down(exponent, amax)).bitcast(Float32)
            self._put_scale(scales, half, down, *at)
        start = self._start() + region * REGION
        for q in range(BLOCK // 16):
            for i in range(4):
                low, high = ptx.unpack(values.words[4 * q + i])
                up = ups[i % 2]
                pair = ptx.pack_fp8(self.name, low * up, high * up)
                # Two bytes of 8 rows at a time: swizzled, these lie in 8 different pieces, so no
                # two rows share banks.
                ptx.store_shared_half((start ^ (_PIECE * q)) + (i // 2 * 8 + i % 2 * 1024), pair)

    def _start(self) -> Int32:
        """Shared address of the lane's first two bytes in the first region. Swizzle of 128 bytes:
        16-byte piece c of row r lies at c ^ (r % 8). So piece 0 of row r is 16 r bytes into its
        row, and an XOR of the address with 16 q gives piece q."""
        lane = ptx.lane()
        return self.base + lane // 4 * (BLOCK + _PIECE) + lane % 4 * 2

    @cute.jit
    def _put_scale(
        self,
        scales: cute.Tensor,
        half: cutlass.Constexpr,
        value: Float32,
        top: Int32,
        end: Int32,
        block: Int32,
    ) -> None:
        lane = ptx.lane()
        row = top + lane // 4 + half * 8
        # All four lanes have the scale; rows past the end belong to another expert.
        if lane % 4 == 0 and row < end:
            put(scales, row, block, value)

    @cute.jit
    def store(
        self,
        region: cutlass.Constexpr,
        tma: tuple[Any, Any],
        rows: cute.Tensor,
        top: Int32,
        end: Int32,
        column: Int32,
        part: cutlass.Constexpr,
    ) -> None:
        """Store a region to rows top .. end - 1, from `column` of a part up to its end. It counts
        as one store of `Staging.drain`."""
        # Bytes that all lanes wrote (generic proxy) become visible to TMA (async proxy).
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        # As in `gemm.row_store`: TMA would overwrite rows of the next expert.
        if end - top >= ROWS:
            at = (top, column, Int32(part))
            smem, gmem = partition(self.tensor, self.first + region, tma, at, (ROWS, BLOCK))
            cute.copy(tma[0], smem, gmem)
        else:
            self._store_rows(region, rows, top, end, column, part)
        cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def _store_rows(
        self,
        region: cutlass.Constexpr,
        rows: cute.Tensor,
        top: Int32,
        end: Int32,
        column: Int32,
        part: cutlass.Constexpr,
    ) -> None:
        lane = ptx.lane()
        # 8 lanes have the 128 bytes of a row, so that 4 rows leave with each access.
        row, piece = lane // 8, lane % 8
        source = self.base + row * BLOCK + (piece ^ row) * _PIECE
        pitch, inside = Int64(rows.stride[0]), column + piece * _PIECE
        target = rows.iterator.toint() + Int64(top + row) * pitch + Int64(inside)
        if cutlass.const_expr(part > 0):
            # Parts lie beside each other in a row of memory.
            target += part * Int64(rows.shape[1])
        for p in cutlass.range_constexpr(ROWS // 4):
            # 4 rows further the swizzle differs in bit 2 of the piece (64 bytes).
            # The second test is what TMA's clipping does above: behind a part's channels lie the
            # next one's.
            if top + row + 4 * p < end and inside < rows.shape[1]:
                words = ptx.load_shared(
                    (source ^ (64 * (p % 2))) + (region * REGION + p * 4 * BLOCK)
                )
                ptx.store_global(target + (4 * p) * pitch, *words)
