"""Keys: fp32 numbers as unsigned integers in the same order, in registers.

The kernel `topk` ranks experts by them: a maximum over a warp is one instruction for integers, and
a key with the complement of the expert in its low word breaks ties in the comparison.
"""

import cutlass
from cutlass import Float32, Int32, Uint32, Uint64

from phalanx.kernels.sm90.routing.logits import as_bits

_SIGN = 0x80000000
ALL_BITS = 0xFFFFFFFF


def key_of(x: Float32) -> Uint32:
    """Key of x, above 0; equal for both zeros. The rank of a NaN is not specified."""
    # -0 + 0 is +0: one key for both zeros. Numbers with a sign are reversed, others moved above.
    bits = as_bits(x + Float32(0))
    return Uint32(
        cutlass.select_(bits >= Uint32(_SIGN), Uint32(ALL_BITS) - bits, bits + Uint32(_SIGN))
    )


def bits_of(key: Uint32) -> Uint32:
    """Bits of the fp32 number of a key."""
    bits = cutlass.select_(key >= Uint32(_SIGN), key - Uint32(_SIGN), Uint32(ALL_BITS) - key)
    return Uint32(bits)


def larger(a: Uint32, b: Uint32) -> Uint32:
    """Maximum of two keys."""
    # cutlass.max compares with a sign if its first argument is a constant.
    return Uint32(cutlass.select_(a > b, a, b))


def smaller(a: Uint32, b: Uint32) -> Uint32:
    """Minimum of two keys."""
    return Uint32(cutlass.select_(a > b, b, a))


def pair(key: Uint32, expert: Int32) -> Uint64:
    """Key and expert in one integer: of equal keys the lower expert is larger."""
    return (Uint64(key) << 32) + Uint64(Uint32(ALL_BITS) - Uint32(expert))
