"""Instructions between GPUs: flags that publish data, as inline PTX.

Global memory, also that of a peer, is addressed by Int64. Whoever waits does so for a limited time,
then tells the host who was missing, and stops the kernel.
"""

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.cutlass_dsl import T, dsl_user_op

from phalanx.kernels.sm90.jit.ptx import Site, _asm, _four_words


@dsl_user_op
def load_acquire(where: Int64, *, loc: Any = None, ip: Any = None) -> Int32:
    """A flag: what was written before it was released can be read after it."""
    at: Site = dict(loc=loc, ip=ip)
    code = "ld.acquire.sys.global.s32 $0, [$1];"
    return Int32(_asm(T.i32(), [Int64(where).ir_value(**at)], code, "=r,l,~{memory}", at))


@dsl_user_op
def store_release(where: Int64, value: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Publish, by a flag of any GPU, what was written before."""
    at: Site = dict(loc=loc, ip=ip)
    values = [Int64(where).ir_value(**at), Int32(value).ir_value(**at)]
    _asm(None, values, "st.release.sys.global.s32 [$0], $1;", "l,r,~{memory}", at)


@dsl_user_op
def store_flag(where: Int64, value: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """The same after a fence of the caller's: several flags need one."""
    at: Site = dict(loc=loc, ip=ip)
    values = [Int64(where).ir_value(**at), Int32(value).ir_value(**at)]
    _asm(None, values, "st.relaxed.sys.global.s32 [$0], $1;", "l,r,~{memory}", at)


@dsl_user_op
def load_global(where: Int64, *, loc: Any = None, ip: Any = None) -> tuple[Uint32, ...]:
    """16 bytes of global memory."""
    code = "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];"
    return _four_words(Int64(where), code, dict(loc=loc, ip=ip), "l")


@dsl_user_op
def trap(*, loc: Any = None, ip: Any = None) -> None:
    """Stop the kernel with an error."""
    _asm(None, [], "trap;", "~{memory}", dict(loc=loc, ip=ip))


@cute.jit
def wait(flag: Int64, epoch: Int32, limit_ms: Int32, report: Int64, who: Int32) -> None:
    """Wait until the flag has reached `epoch`, which wraps around.

    After `limit_ms` milliseconds: `who`, the epoch and the flag go to `report`, three int32 that
    the host can read, and the kernel is stopped.
    """
    value = load_acquire(flag)
    began = cute.arch.globaltimer()
    while value - epoch < 0:
        if cute.arch.globaltimer() - began > Int64(limit_ms) * 1_000_000:
            store_release(report + 4, epoch)
            store_release(report + 8, value)
            store_release(report, who + 1)
            cute.arch.fence_acq_rel_sys()
            trap()
        value = load_acquire(flag)
