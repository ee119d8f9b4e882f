"""Instructions that CuTe DSL has no function for, as inline PTX.

Shared memory is addressed in bytes within the CTA's window (`address`), bf16 pairs are words with
the lower column in the lower half. What reads or writes memory has the constraint `~{memory}`, so
that the compiler keeps it in order with other accesses; loads of what is constant have not.
"""

from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

Site = dict[str, Any]


def address(pointer: cute.Pointer) -> Int32:
    """Shared-memory address of a pointer, in bytes."""
    return Int32(pointer.toint())


@dsl_user_op
def pack(low: Float32, high: Float32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Two fp32 rounded to a pair of bf16."""
    at: Site = dict(loc=loc, ip=ip)
    values = [Float32(high).ir_value(**at), Float32(low).ir_value(**at)]
    return Uint32(_asm(T.i32(), values, "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", at, pure=True))


@dsl_user_op
def max_pair(a: Uint32, b: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Larger values of two pairs of bf16; of a number and NaN, the number."""
    at: Site = dict(loc=loc, ip=ip)
    values = [Uint32(a).ir_value(**at), Uint32(b).ir_value(**at)]
    return Uint32(_asm(T.i32(), values, "max.bf16x2 $0, $1, $2;", "=r,r,r", at, pure=True))


@dsl_user_op
def pack_fp8(name: str, low: Float32, high: Float32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Two fp32 rounded to a pair of e4m3 or e5m2, in the lower half, and saturated."""
    at: Site = dict(loc=loc, ip=ip)
    values = [Float32(high).ir_value(**at), Float32(low).ir_value(**at)]
    # The first operand of a conversion of two is the upper half of the result.
    code = f"cvt.rn.satfinite.{name}x2.f32 $0, $1, $2;"
    pair = _asm(T.i16(), values, code, "=h,f,f", at, pure=True)
    return Uint32(llvm.zext(T.i32(), pair, **at))


def unpack(word: Uint32) -> tuple[Float32, Float32]:
    """A pair of bf16 as two fp32."""
    # bf16 is the upper half of an fp32: a shift and a mask, exact.
    return (word << 16).bitcast(Float32), (word & Uint32(0xFFFF0000)).bitcast(Float32)


@dsl_user_op
def exp2(x: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """2^x, relative error 2^-22, subnormal results flushed."""
    at: Site = dict(loc=loc, ip=ip)
    code = "ex2.approx.ftz.f32 $0, $1;"
    return Float32(_asm(T.f32(), [Float32(x).ir_value(**at)], code, "=f,f", at, pure=True))


@dsl_user_op
def multiply_add(a: Float32, b: Float32, c: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """a * b + c, rounded once."""
    at: Site = dict(loc=loc, ip=ip)
    values = [Float32(x).ir_value(**at) for x in (a, b, c)]
    return Float32(_asm(T.f32(), values, "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", at, pure=True))


@dsl_user_op
def lane(*, loc: Any = None, ip: Any = None) -> Int32:
    """The thread's lane, read each time: values computed from it hold no registers across loops."""
    # Not pure: the compiler would read it once and keep it.
    return Int32(_asm(T.i32(), [], "mov.u32 $0, %laneid;", "=r", dict(loc=loc, ip=ip)))


def lowest(bits: Int32) -> Int32:
    """Index of the lowest bit that is set."""
    # ~bits & (bits - 1) has ones where the zeros below the lowest bit are.
    return cute.arch.popc(~bits & (bits - 1))


@dsl_user_op
def stmatrix(
    where: Int32, a: Uint32, b: Uint32, c: Uint32, d: Uint32, *, loc: Any = None, ip: Any = None
) -> None:
    """Store four 8 x 8 matrices of bf16; lane l gives the address of row l % 8 of matrix l // 8."""
    at: Site = dict(loc=loc, ip=ip)
    values = [Int32(where).ir_value(**at), *(Uint32(x).ir_value(**at) for x in (a, b, c, d))]
    code = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};"
    _asm(None, values, code, "r,r,r,r,r,~{memory}", at)


@dsl_user_op
def ldmatrix(where: Int32, *, loc: Any = None, ip: Any = None) -> tuple[Uint32, ...]:
    """Load four 8 x 8 matrices of bf16, the inverse of `stmatrix`."""
    code = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];"
    return _four_words(Int32(where), code, dict(loc=loc, ip=ip))


@dsl_user_op
def load_shared(where: Int32, *, loc: Any = None, ip: Any = None) -> tuple[Uint32, ...]:
    """16 bytes of shared memory."""
    code = "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];"
    return _four_words(Int32(where), code, dict(loc=loc, ip=ip))


@dsl_user_op
def store_shared(
    where: Int32, a: Uint32, b: Uint32, c: Uint32, d: Uint32, *, loc: Any = None, ip: Any = None
) -> None:
    """16 bytes to shared memory."""
    at: Site = dict(loc=loc, ip=ip)
    values = [Int32(where).ir_value(**at), *(Uint32(x).ir_value(**at) for x in (a, b, c, d))]
    _asm(None, values, "st.shared.v4.b32 [$0], {$1, $2, $3, $4};", "r,r,r,r,r,~{memory}", at)


@dsl_user_op
def store_shared_half(where: Int32, word: Uint32, *, loc: Any = None, ip: Any = None) -> None:
    """The lower 2 bytes of a word to shared memory."""
    at: Site = dict(loc=loc, ip=ip)
    values = [Int32(where).ir_value(**at), Uint32(word).ir_value(**at)]
    code = "{.reg .b16 half; cvt.u16.u32 half, $1; st.shared.b16 [$0], half;}"
    _asm(None, values, code, "r,r,~{memory}", at)


@dsl_user_op
def store_global(
    where: Int64, a: Uint32, b: Uint32, c: Uint32, d: Uint32, *, loc: Any = None, ip: Any = None
) -> None:
    """16 bytes to global memory."""
    at: Site = dict(loc=loc, ip=ip)
    values = [Int64(where).ir_value(**at), *(Uint32(x).ir_value(**at) for x in (a, b, c, d))]
    _asm(None, values, "st.global.v4.b32 [$0], {$1, $2, $3, $4};", "l,r,r,r,r,~{memory}", at)


@dsl_user_op
def cp_async(where: Int32, source: Int64, *, loc: Any = None, ip: Any = None) -> None:
    """Start to copy 16 bytes from global to shared memory, past the L1 cache."""
    at: Site = dict(loc=loc, ip=ip)
    values = [Int32(where).ir_value(**at), Int64(source).ir_value(**at)]
    # cg: past the L1 cache, whose memory the stages take. L2 fetches 256 bytes: this block of the
    # row and the next one.
    _asm(None, values, "cp.async.cg.shared.global.L2::256B [$0], [$1], 16;", "r,l,~{memory}", at)


@dsl_user_op
def cp_async_or_zero(
    where: Int32, source: Int64, size: Int32, *, loc: Any = None, ip: Any = None
) -> None:
    """`cp_async` of `size` bytes, 16 or 0; the rest of the 16 is zero."""
    at: Site = dict(loc=loc, ip=ip)
    values = [x.ir_value(**at) for x in (Int32(where), Int64(source), Int32(size))]
    code = "cp.async.cg.shared.global.L2::256B [$0], [$1], 16, $2;"
    _asm(None, values, code, "r,l,r,~{memory}", at)


@dsl_user_op
def bulk_load(
    where: Int32, source: Int64, size: Int32, barrier: Int32, *, loc: Any = None, ip: Any = None
) -> None:
    """Start to copy multiples of 16 bytes from global to shared memory, with a barrier there."""
    at: Site = dict(loc=loc, ip=ip)
    values = [x.ir_value(**at) for x in (Int32(where), Int64(source), Int32(size), Int32(barrier))]
    kind = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    _asm(None, values, f"{kind} [$0], [$1], $2, [$3];", "r,l,r,r,~{memory}", at)


@dsl_user_op
def bulk_store(
    target: Int64, where: Int32, size: Int32, *, loc: Any = None, ip: Any = None
) -> None:
    """Start to copy multiples of 16 bytes to global memory, in the thread's next bulk group."""
    at: Site = dict(loc=loc, ip=ip)
    values = [x.ir_value(**at) for x in (Int64(target), Int32(where), Int32(size))]
    code = "cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;"
    _asm(None, values, code, "l,r,r,~{memory}", at)


@dsl_user_op
def send_pair(
    where: Int32,
    barrier: Int32,
    rank: Int32,
    a: Float32,
    b: Float32,
    *,
    loc: Any = None,
    ip: Any = None,
) -> None:
    """Start to store two numbers, at a multiple of 8 bytes, in the shared memory of a CTA of the
    cluster, whose barrier counts these bytes; both addresses are as in this CTA."""
    at: Site = dict(loc=loc, ip=ip)
    values = [Int32(x).ir_value(**at) for x in (where, barrier, rank)]
    values += [Float32(x).ir_value(**at) for x in (a, b)]
    store = "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32"
    code = "{.reg .b32 there, counted; mapa.shared::cluster.u32 there, $0, $2; "
    code += f"mapa.shared::cluster.u32 counted, $1, $2; {store} [there], {{$3, $4}}, [counted];}}"
    _asm(None, values, code, "r,r,r,f,f,~{memory}", at)


@dsl_user_op
def load_constant_if(where: Int64, wanted: Boolean, *, loc: Any = None, ip: Any = None) -> Float32:
    """fp32 from constant global memory if `wanted`, otherwise 0; the compiler does not move it."""
    return _load_if("ld.global.nc.f32", where, wanted, dict(loc=loc, ip=ip))


@dsl_user_op
def load_fresh_if(where: Int64, wanted: Boolean, *, loc: Any = None, ip: Any = None) -> Float32:
    """fp32 from global memory past the L1 cache, as others write it, if `wanted`; otherwise 0."""
    return _load_if("ld.relaxed.gpu.global.f32", where, wanted, dict(loc=loc, ip=ip), ",~{memory}")


def _load_if(load: str, where: Int64, wanted: Boolean, at: Site, clobbers: str = "") -> Float32:
    values = [Int64(where).ir_value(**at), Int32(wanted).ir_value(**at)]
    # A predicated load in place of a branch: the warp stays together, and the load is in flight.
    code = "{.reg .pred wanted; setp.ne.s32 wanted, $2, 0; mov.f32 $0, 0f00000000; "
    code += f"@wanted {load} $0, [$1];}}"
    return Float32(_asm(T.f32(), values, code, "=f,l,r" + clobbers, at))


def _four_words(
    where: Int32 | Int64, code: str, at: Site, address: str = "r"
) -> tuple[Uint32, ...]:
    four = llvm.StructType.get_literal([T.i32()] * 4)
    constraints = f"=r,=r,=r,=r,{address},~{{memory}}"
    loaded = _asm(four, [where.ir_value(**at)], code, constraints, at)
    return tuple(Uint32(llvm.extractvalue(T.i32(), loaded, [i], **at)) for i in range(4))


def _asm(
    result: Any, values: list[ir.Value], code: str, constraints: str, at: Site, pure: bool = False
) -> Any:
    """One instruction; `pure` ones may be moved, merged and removed."""
    return llvm.inline_asm(
        result,
        values,
        code,
        constraints,
        has_side_effects=not pure,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        **at,
    )
