"""Waves: groups of a rank's experts whose rows are exchanged together.

The first wave is small, so that its consumer starts early: sizes grow as 1, 2, 4, 6, 6, 6, 6 of 31
parts. While a wave is multiplied the next one arrives, which may have twice as many experts. From
the fifth wave on they grow no more: where rows take as long to arrive as to be multiplied, a last
wave of half of them would not be hidden. With as many waves as experts, each wave has one expert.

Wave w of W begins at the share parts_before(w) / parts_before(W) of a rank's L experts. On the way
back the last wave is the one to wait for, so sizes are in the opposite order; and rows of few
experts are taken in slices, which then take the part of experts. With few experts, or slices, a
wave may be empty.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from phalanx.kernels.sm90.exchange.peer_buffers import MAX_WAVES


@cute.jit
def parts_before(wave: Int32, local: Int32, waves: Int32) -> Int32:
    """Parts of the experts that come before a wave: 0, 1, 3, 7, 13, 19, ..."""
    # 2^w - 1 up to wave 3, then 6 more each.
    grown = cutlass.select_(wave <= 3, (Int32(1) << wave) - 1, 6 * wave - 11)
    return cutlass.select_(waves >= local, wave, grown)


@cute.jit
def wave_of(expert: Int32, local: Int32, waves: Int32) -> Int32:
    """Wave of an expert, of `local` in all, without a division."""
    # Expert e is at or past share p / parts if e * parts >= local * p; each such wave counts once.
    parts, wave = expert * parts_before(waves, local, waves), Int32(0)
    for w in cutlass.range_constexpr(1, MAX_WAVES):
        if parts >= local * parts_before(Int32(w), local, waves):
            wave += 1
    return wave


def slice_tiles(row_tiles: Any, bits: Any) -> Any:
    """Row tiles of each of an expert's `1 << bits` slices; the last ones may have fewer."""
    return (row_tiles + (1 << bits) - 1) >> bits


@cute.jit
def last_wave_of(expert: Int32, local: Int32, waves: Int32) -> Int32:
    """The wave in which the sums are complete that end with an expert: the last one is small."""
    return waves - 1 - wave_of(local - 1 - expert, local, waves)
