"""Lists of living blocks, which kernels walk, from masks: on the device, in place.

A block is 128 x 128 of an expert's weights [N, K]; with a gate N is two halves, and blocks (f, k)
of both halves live and die together. Weights stay dense in memory, and dead blocks are zero.

A captured graph has the addresses of the lists, so that `update` serves all of its replays.

Legend: L experts, N and K channels out and in, n and k blocks of them, P living blocks of a tile, T
tiles of a weight gradient, of an expert.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 128
MOST = 64
"""Most blocks in the contraction of a tile: each of 32 lanes holds two entries of its list."""
_BAND = 8  # columns of tiles, as `gemm.tile_scheduler.Schedule.band`
ROW_SHIFT = 16  # as in `gemm.tile_scheduler.unpack`


class Contraction(NamedTuple):
    """Blocks of the contraction for each tile of 128 columns of a product."""

    block_LTP: Tensor  # int32 [L, tiles, MOST]: blocks, increasing; entries after `count` are any
    count_LT: Tensor
    """int32 [L, tiles], at least 1: a tile without living blocks multiplies a dead one, of zeros,
    so that every tile of a product is written."""


class Blocks:
    """Lists of one weight, [L, N, K]: for a product, for its data gradient, for its gradient.

    Args:
        living_Lnk: bool, [L, n / parts, k]; the number of living blocks is the same for all
            experts and may change from `update` to `update`.
        parts: halves of N, 2 with a gate.

    Raises:
        ValueError: more than MOST blocks of N or of K.
    """

    def __init__(self, living_Lnk: Tensor, parts: int = 1) -> None:
        L, n, k = living_Lnk.shape
        if max(parts * n, k) > MOST:
            most = MOST * BLOCK
            raise ValueError(
                f"weights of {parts * n * BLOCK} x {k * BLOCK} channels: kernels over living "
                f"blocks take at most {most} each way"
            )
        self.parts, self.shape = parts, (L, parts * n * BLOCK, k * BLOCK)
        new = partial(torch.empty, dtype=torch.int32, device=living_Lnk.device)
        self.forward = Contraction(new(L, n, MOST), new(L, n))
        self.backward = Contraction(new(L, k, MOST), new(L, k))
        self.tiles = new(1 + L * parts * n * k)
        """Number of living tiles of an expert, then [L, T] of their places, row << 16 | column."""
        row, column = torch.arange(parts * n)[:, None], torch.arange(k)
        # Bands of columns, row by row: tiles that run side by side share operands in L2.
        band = (column // _BAND * parts * n + row) * _BAND + column % _BAND
        order_T, place_T = band.flatten().argsort(), (row << ROW_SHIFT | column).flatten().int()
        self._order_T = order_T.to(living_Lnk.device)
        self._place_T = place_T[order_T].to(living_Lnk.device)
        self.update(living_Lnk)

    def update(self, living_Lnk: Tensor, *, every: bool = False) -> None:
        """Follow another mask, without reading it on the host.

        `every`: weight gradients are those of dead blocks too.
        """
        _list(living_Lnk, self.forward)
        whole_LnK = living_Lnk.repeat(1, self.parts, 1)
        _list(whole_LnK.mT, self.backward)
        if every:
            whole_LnK = torch.ones_like(whole_LnK)
        living_LT = whole_LnK.flatten(1)[:, self._order_T]
        self.tiles[0] = living_LT[0].sum()
        self.tiles[1:] = self._place_T[_living_first(living_LT)].flatten()


def _list(living_LTk: Tensor, into: Contraction) -> None:
    listed = _living_first(living_LTk)
    into.block_LTP[..., : listed.shape[-1]] = listed
    into.count_LT.copy_(living_LTk.sum(-1).clamp_(min=1))


def _living_first(living: Tensor) -> Tensor:
    """int32 places along the last dimension: those that live, then others, both increasing."""
    return living.byte().sort(dim=-1, descending=True, stable=True).indices.int()
