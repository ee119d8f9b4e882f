"""Gradients of the living blocks of weights: tiles of 128 x 128 from a list.

`kernels.sm90.wgrad` with another order of tiles: an expert's tiles are its living blocks, the same
number for every expert, in the order of `lists.Blocks.tiles`. Dead blocks are not written.

Legend: S expert rows, O and I channels of d and of v, L experts.
"""

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32
from torch import Tensor

from phalanx.extras.block_sparse.kernels.lists import BLOCK
from phalanx.kernels.expert_mlp.calls import ExpertRows
from phalanx.kernels.launch_options import DEFAULT, LaunchOptions
from phalanx.kernels.sm90.gemm.tile_scheduler import ExpertTiles
from phalanx.kernels.sm90.jit.launch import launch_persistent, require
from phalanx.kernels.sm90.jit.pointers import BytesPtr, IntPtr
from phalanx.kernels.sm90.wgrad.kernel import (
    Arguments,
    Factor,
    Segment,
    Shared,
    WgradConfig,
    WgradKernel,
)
from phalanx.kernels.sm90.wgrad.wgrad import arguments, channels_of, check_sizes, math_of, tokens_of


@dataclass(frozen=True)
class LivingTiles(ExpertTiles):
    """Tiles of an expert from its list."""

    living: Int32
    """Number of tiles of an expert."""
    places: cute.Tensor  # [L, tiles]: of a tile, row << 16 | column

    @property
    def each(self) -> Int32:
        return self.living

    @cute.jit
    def locate(
        self, tile: Int32, first: Int32, expert: Int32, begin: Int32, end: Int32
    ) -> tuple[Int32, ...]:
        """As `ExpertTiles.locate`."""
        first, expert, begin, end, row, stop, _, at_tile = ExpertTiles.locate(
            self, tile, first, expert, begin, end
        )
        number = cutlass.max(at_tile, 0)
        place = self.places[number, tile - number * self.living]
        if at_tile < 0:
            place = Int32(0)
        return first, expert, begin, end, row, stop, place, at_tile


class SparseWgradKernel(WgradKernel):
    """`WgradKernel` over the tiles of a list."""

    @cute.jit
    def __call__(
        self,
        d: Factor,
        v: Factor,
        dw: BytesPtr,
        index: IntPtr,
        offsets: IntPtr,
        tiles: IntPtr,
        counter: IntPtr,
        L: Int32,
        ctas: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """tiles: as `Blocks.tiles`; others as in `WgradKernel`."""
        # No order of experts is given: its place has the list.
        self.run((Segment(d, v, index, offsets),), dw, tiles, counter, L, ctas, stream)

    def start(self, arguments: Arguments, storage: Any, rank: Any) -> Shared:
        scheduler, all_, storage = super().start(arguments, storage, rank)
        across = all_.row_tiles * all_.column_tiles
        layout = cute.make_layout((all_.experts, across), stride=(across, 1))
        listed = arguments.order
        tiles = LivingTiles(
            *(all_.offsets, all_.order, all_.ordered, all_.band),
            *(all_.experts, all_.row_tiles, all_.column_tiles),
            *(listed[0], cute.make_tensor(listed.iterator + 1, layout)),
        )
        return scheduler, tiles, storage


def sparse_wgrad(
    rows: ExpertRows,
    tiles: Tensor,
    out_LOI: Tensor,
    *,
    accumulate: bool = False,
    options: LaunchOptions = DEFAULT,
) -> Tensor:
    """`kernels.sm90.wgrad.wgrad.wgrad` of the living blocks; dead ones become, or stay, 0.

    Args:
        rows: operands in bf16; channels are multiples of 128.
        tiles: int32 [1 + L * O / 128 * I / 128], as `Blocks.tiles`.
        out_LOI: bf16 or fp32, contiguous. With `accumulate` it is added to, and its dead blocks are
            left alone.

    Raises:
        ValueError: a shape, dtype, stride or device that the kernel does not take.
    """
    check_sizes(*rows)
    d, v, offsets, index_S = rows
    O, I, L = channels_of(d), channels_of(v), len(offsets) - 1  # noqa: E741
    if O % BLOCK or I % BLOCK:
        raise ValueError(f"d and v have {O} and {I} channels: must be multiples of {BLOCK}")
    if out_LOI.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"out must be torch.bfloat16 or torch.float32, not {out_LOI.dtype}")
    given = arguments(out_LOI.device, d, v, offsets, index_S)
    count = 1 + L * (O // BLOCK) * (I // BLOCK)
    require(
        out_LOI.device,
        out=(out_LOI, out_LOI.dtype, (L, O, I)),
        tiles=(tiles, torch.int32, (count,)),
    )
    if not accumulate:
        out_LOI.zero_()
    if not tokens_of(d) or not tokens_of(v):
        return out_LOI
    config = WgradConfig(
        math_of(d, v, BLOCK),
        fp32_out=out_LOI.dtype == torch.float32,
        # Zeros are there already, where nothing is added.
        add=accumulate,
        zeros=False,
    )
    launch_persistent(
        *(SparseWgradKernel, config, out_LOI.device, options, None),
        **dict(**given, dw=out_LOI, tiles=tiles, L=L),
    )
    return out_LOI
