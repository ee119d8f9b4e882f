"""Instructions between GPUs: flags that publish data, as inline PTX.

Global memory, including a peer's, is addressed by Int64. Every wait has a time limit; after it the
kernel reports the missing rank to the host, and traps.

Order. Data are written with plain stores, then published; `.sys` is the scope that spans GPUs:

    writer    stores of all threads -> barrier or atomics -> fence or release, .sys -> flag
    reader    flag, acquire, .sys -> barrier of warp or CTA, or end of the kernel -> loads

A flag has one writer and only grows (modulo 2^32), so that a reader may look late, and needs no
reset that could overtake a store.
"""

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.cutlass_dsl import T, dsl_user_op

from phalanx.kernels.sm90.jit.ptx import Site, _asm, _four_words


@dsl_user_op
def load_acquire(where: Int64, *, loc: Any = None, ip: Any = None) -> Int32:
    """Load a flag with acquire: writes before its release are visible after this."""
    at: Site = dict(loc=loc, ip=ip)
    code = "ld.acquire.sys.global.s32 $0, [$1];"
    return Int32(_asm(T.i32(), [Int64(where).ir_value(**at)], code, "=r,l,~{memory}", at))


@dsl_user_op
def store_release(where: Int64, value: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Store a flag of any GPU with release: writes before this are visible to who acquires it."""
    at: Site = dict(loc=loc, ip=ip)
    values = [Int64(where).ir_value(**at), Int32(value).ir_value(**at)]
    _asm(None, values, "st.release.sys.global.s32 [$0], $1;", "l,r,~{memory}", at)


@dsl_user_op
def store_flag(where: Int64, value: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Store a flag after a fence of the caller, which several flags share. Relaxed, not plain: that
    could be torn or delayed without bound."""
    at: Site = dict(loc=loc, ip=ip)
    values = [Int64(where).ir_value(**at), Int32(value).ir_value(**at)]
    _asm(None, values, "st.relaxed.sys.global.s32 [$0], $1;", "l,r,~{memory}", at)


@dsl_user_op
def load_global(where: Int64, *, loc: Any = None, ip: Any = None) -> tuple[Uint32, ...]:
    """16 bytes of global memory, not through the read-only cache: others write it meanwhile."""
    code = "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];"
    return _four_words(Int64(where), code, dict(loc=loc, ip=ip), "l")


@dsl_user_op
def trap(*, loc: Any = None, ip: Any = None) -> None:
    """Stop the kernel with an error, which CUDA reports in the next call of the host."""
    _asm(None, [], "trap;", "~{memory}", dict(loc=loc, ip=ip))


@cute.jit
def wait(flag: Int64, epoch: Int32, limit_ms: Int32, report: Int64, peer_rank: Int32) -> None:
    """Wait until the flag has reached `epoch`, which wraps around.

    After `limit_ms` the rank + 1, the epoch and the flag go to `report`, three int32 that the host
    can read, and the kernel traps.
    """
    value = load_acquire(flag)
    # Nanoseconds of the GPU, whatever clock its SMs run at. Most flags have come by the first look.
    start_ns = cute.arch.globaltimer()
    while value - epoch < 0:  # a difference, not a comparison: epochs wrap around
        if cute.arch.globaltimer() - start_ns > Int64(limit_ms) * 1_000_000:
            # The rank comes last: the host takes a report for complete once it is not 0.
            store_release(report + 4, epoch)
            store_release(report + 8, value)
            store_release(report, peer_rank + 1)
            cute.arch.fence_acq_rel_sys()  # the report is in host memory before the kernel ends
            trap()
        value = load_acquire(flag)
