"""Waves: groups of a rank's experts whose rows are exchanged together, so that others can go on.

What waits for rows begins with the first wave, so that one is small; while it is multiplied, the
next one comes, which may have twice as many experts. From the fifth wave on they grow no more:
where rows take as long to come as to be multiplied, half of them in the last wave would be waited
for. Where there is a wave for every expert, each has one.

Before wave w lie `parts_before(w)` parts of L experts, of `parts_before(W)` in all. On the way back
it is the last wave that is waited for, so there the order of sizes is the opposite one; and rows of
few experts are taken in slices, of which waves are made then as otherwise of experts. Few experts,
or slices, may leave a wave without any.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

MAX_WAVES = 8


@cute.jit
def parts_before(wave: Int32, local: Int32, waves: Int32) -> Int32:
    """Parts of the experts that come before a wave: 0, 1, 3, 7, 13, 19, ..."""
    grown = cutlass.select_(wave <= 3, (Int32(1) << wave) - 1, 6 * wave - 11)
    return cutlass.select_(waves >= local, wave, grown)


@cute.jit
def wave_of(expert: Int32, local: Int32, waves: Int32) -> Int32:
    """Of an expert of `local`, without a division."""
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
