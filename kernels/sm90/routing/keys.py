"""Numbers as unsigned integers that compare like them, in registers.

What ranks experts in the kernel `topk`: a maximum over a warp is one instruction for integers, and
a key beside the expert's complement breaks ties as it is compared.
"""

import cutlass
from cutlass import Float32, Int32, Uint32, Uint64

from phalanx.kernels.sm90.routing.logits import as_bits

_SIGN = 0x80000000
ALL_BITS = 0xFFFFFFFF


def key_of(x: Float32) -> Uint32:
    """Compares like x, above 0: both zeros the same. Where a NaN ranks is not specified."""
    bits = as_bits(x + Float32(0))
    return Uint32(
        cutlass.select_(bits >= Uint32(_SIGN), Uint32(ALL_BITS) - bits, bits + Uint32(_SIGN))
    )


def bits_of(key: Uint32) -> Uint32:
    """The bits of the number that a key stands for."""
    bits = cutlass.select_(key >= Uint32(_SIGN), key - Uint32(_SIGN), Uint32(ALL_BITS) - key)
    return Uint32(bits)


def larger(a: Uint32, b: Uint32) -> Uint32:
    # cutlass.max compares with a sign if its first argument is a constant.
    return Uint32(cutlass.select_(a > b, a, b))


def smaller(a: Uint32, b: Uint32) -> Uint32:
    return Uint32(cutlass.select_(a > b, b, a))


def pair(key: Uint32, expert: Int32) -> Uint64:
    """Compares by key, of equal keys the lower expert is larger."""
    return (Uint64(key) << 32) + Uint64(Uint32(ALL_BITS) - Uint32(expert))
