"""Waves: groups of a rank's experts whose rows are exchanged together, so that others can go on.

What waits for rows begins with the first wave, so that one is small, and each has about twice as
many experts as the one before: wave w of W has the experts e of L for which
2^w - 1 <= e (2^W - 1) / L < 2^(w + 1) - 1. While it is multiplied, the next one comes. On the way
back it is the last wave that is waited for, so there the order of sizes is the opposite one. Few
experts may leave a wave without any.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

MAX_WAVES = 8


def wave_of(expert: int, local: int, waves: int) -> int:
    """Of an expert of `local`, on the host."""
    return (expert * (2**waves - 1) // local + 1).bit_length() - 1


@cute.jit
def wave_on_device(expert: Int32, local: Int32, waves: Int32) -> Int32:
    """The same in a kernel, without a division."""
    scaled, wave = expert * ((Int32(1) << waves) - 1), Int32(0)
    for w in cutlass.range_constexpr(1, MAX_WAVES):
        if scaled >= local * ((1 << w) - 1):
            wave += 1
    return wave


@cute.jit
def last_wave_on_device(expert: Int32, local: Int32, waves: Int32) -> Int32:
    """The wave in which the sums are complete that end with an expert: the last one is small."""
    return waves - 1 - wave_on_device(local - 1 - expert, local, waves)
