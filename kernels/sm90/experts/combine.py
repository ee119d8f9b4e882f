"""Kernel `combine`: out[n] = sum over k of y[inverse[n, k]], from expert rows back to tokens.

Last step of the expert MLP, and of its backward (the gradient of x). Bound by memory: a thread adds
up 8 columns of one token, all of whose rows are in flight (up to 8 of them at a time) before the
first is added. Order k = 0 .. K - 1, in fp32, rounded once; a slot without a row is not read.
Addends (the shared experts' output, the residual) are added before the sums are rounded, for one
read each.

Roles. One thread a piece of 8 columns of a token (1, 2 or 4 pieces with few slots), no shared
memory and no barrier:

    all slots of the piece's token (an index load of up to 16 bytes)
    -> up to 8 rows in flight, 16 bytes each, with the last batch also the addends
    -> sums in fp32 in the order of slots -> rounded, 16 bytes stored

Threads of a warp take neighbouring pieces, so that loads of a row and stores are coalesced.

Legend: N tokens, K slots of a token, S expert rows, D columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, Uint32
from torch import Tensor

from phalanx.kernels.limits import COMBINE_ADDENDS as MAX_ADDENDS
from phalanx.kernels.limits import COMBINE_SLOTS as MAX_SLOTS
from phalanx.kernels.sm90.jit.launch import check, launch
from phalanx.kernels.sm90.jit.pointers import IntVecPtr, WordVecPtr
from phalanx.kernels.sm90.jit.ptx import pack, unpack

THREADS = 256
_COLUMNS = 8  # bf16 of a 16-byte access
_WORDS = _COLUMNS // 2
_IN_FLIGHT = 8  # 16-byte loads of a thread before its first addition
_MAX_PIECES = (1 << 31) - (1 << 16)  # below 2^31 by more than a CTA has


@dataclass(frozen=True)
class CombineConfig:
    """Choices that are compiled into a `combine` kernel."""

    slots: int  # K, 1 to 16
    addends: int = 0  # tensors to be added to the sums, 0 to 2

    def __post_init__(self) -> None:
        if not 1 <= self.slots <= MAX_SLOTS:
            raise ValueError(f"slots={self.slots}: must be 1 to {MAX_SLOTS}")
        if not 0 <= self.addends <= MAX_ADDENDS:
            raise ValueError(f"addends={self.addends}: must be 0 to {MAX_ADDENDS}")

    @property
    def pieces(self) -> int:
        """Pieces of 8 columns of a thread: more when there are few loads for each."""
        loads = self.slots + self.addends
        return 4 if loads <= 2 else 2 if loads <= 4 else 1

    @property
    def batch(self) -> int:
        """Slots whose rows are loaded together: all, or half of more than 8."""
        return -(-self.slots // -(-self.slots // _IN_FLIGHT))


class CombineKernel:
    """The kernel of a configuration, as `cute.compile` takes it."""

    def __init__(self, config: CombineConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self,
        y: WordVecPtr,
        inverse: IntVecPtr,
        out: WordVecPtr,
        first: WordVecPtr,
        second: WordVecPtr,
        tokens: Int32,
        width: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Launch over rows of `width` = D / 8 pieces, reading config.addends addends."""
        block = THREADS * self.config.pieces
        self.kernel(y, inverse, out, first, tokens, width, second).launch(
            grid=[(tokens * width + (block - 1)) // block, 1, 1],
            block=[THREADS, 1, 1],
            # Registers for the rows in flight, rather than more CTAs.
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        y: cute.Pointer,
        inverse: cute.Pointer,
        out: cute.Pointer,
        addend: cute.Pointer,
        tokens: Int32,
        width: Int32,
        other: cute.Pointer,
    ) -> None:
        config = self.config
        first = cute.arch.block_idx()[0] * (THREADS * config.pieces) + cute.arch.thread_idx()[0]
        pieces = tokens * width
        row = cute.make_rmem_tensor((config.slots, config.pieces), Int32)
        column = cute.make_rmem_tensor(config.pieces, Int32)
        sums = cute.make_rmem_tensor((_COLUMNS, config.pieces), Float32)
        added = cute.make_rmem_tensor((_WORDS, MAX_ADDENDS, config.pieces), Uint32)
        # Also for pieces past the last token, which then load nothing.
        row.fill(-1)
        sums.fill(0)
        added.fill(0)
        for p in cutlass.range_constexpr(config.pieces):
            # A CTA's threads are side by side in each of its pieces.
            piece = first + p * THREADS
            if piece < pieces:
                # Unsigned, which is the cheaper division; both are not negative.
                token = Int32(Uint32(piece) // Uint32(width))
                column[p] = piece - token * width
                self._load_slots(inverse, token, row[None, p])
        # All loads of a batch are issued before their first sum: the kernel is bound by memory.
        for k in cutlass.range_constexpr(0, config.slots, config.batch):
            some = cutlass.const_expr(min(config.batch, config.slots - k))
            words = cute.make_rmem_tensor((_WORDS, some, config.pieces), Uint32)
            words.fill(0)
            for p in cutlass.range_constexpr(config.pieces):
                for j in cutlass.range_constexpr(some):
                    # 64 bits: S * D may exceed 2^31. A slot without a row leaves the zeros.
                    if row[k + j, p] >= 0:
                        at = Int64(row[k + j, p]) * width + column[p]
                        cute.autovec_copy(_piece(y, at), words[None, j, p])
                # Addends are added after all slots: their loads join the last batch.
                if cutlass.const_expr(config.addends > 0 and k + some == config.slots):
                    piece = first + p * THREADS
                    if piece < pieces:
                        cute.autovec_copy(_piece(addend, Int64(piece)), added[None, 0, p])
                        if cutlass.const_expr(config.addends > 1):
                            cute.autovec_copy(_piece(other, Int64(piece)), added[None, 1, p])
            for p in cutlass.range_constexpr(config.pieces):
                for j in cutlass.range_constexpr(some):
                    for w in cutlass.range_constexpr(_WORDS):
                        # k = 0 .. K - 1 in this order for every token; absent slots add the zeros
                        # they were filled with.
                        low, high = unpack(words[w, j, p])
                        sums[2 * w, p] += low
                        sums[2 * w + 1, p] += high
        for p in cutlass.range_constexpr(config.pieces):
            if first + p * THREADS < pieces:
                # Once, after everything is added in fp32.
                rounded = cute.make_rmem_tensor(_WORDS, Uint32)
                for w in cutlass.range_constexpr(_WORDS):
                    for a in cutlass.range_constexpr(config.addends):
                        low, high = unpack(added[w, a, p])
                        sums[2 * w, p] += low
                        sums[2 * w + 1, p] += high
                    rounded[w] = pack(sums[2 * w, p], sums[2 * w + 1, p])
                cute.autovec_copy(rounded, _piece(out, Int64(first + p * THREADS)))

    @cute.jit
    def _load_slots(self, inverse: cute.Pointer, token: Int32, row: cute.Tensor) -> None:
        slots = self.config.slots
        # The widest access that a token's slots are aligned to.
        wide = cutlass.const_expr(4 if slots % 4 == 0 else 2 if slots % 2 == 0 else 1)
        for k in cutlass.range_constexpr(0, slots, wide):
            source = inverse + cute.assume(token * slots + k, divby=wide)
            some = cute.make_rmem_tensor(wide, Int32)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(wide)), some)
            for i in cutlass.range_constexpr(wide):
                row[k + i] = some[i]


def _piece(base: cute.Pointer, number: Int64) -> cute.Tensor:
    return cute.make_tensor(base + number * _WORDS, cute.make_layout(_WORDS))


def combine(
    y_SD: Tensor,
    inverse_NK: Tensor,
    out_ND: Tensor | None = None,
    *,
    addends: Sequence[Tensor] = (),
) -> Tensor:
    """out[n] = sum over k with inverse[n, k] >= 0 of y[inverse[n, k]], and the addends' rows n.

    Added in fp32 in the order k = 0 .. K - 1, then of the addends, and rounded once; without
    addends 0 for a token without rows.

    Args:
        y_SD: bf16, D a multiple of 8. Rows that `inverse_NK` does not name are not read.
        inverse_NK: int32, below S; K of 1 to 16. Negative: no row.
        out_ND: bf16; by default a new tensor.
        addends: up to two [N, D], bf16.

    Raises:
        ValueError: an argument that the kernel does not take.
    """
    where = y_SD.device
    if y_SD.ndim != 2 or inverse_NK.ndim != 2:
        raise ValueError(
            f"y must be [S, D] and inverse [N, K], not {list(y_SD.shape)} "
            f"and {list(inverse_NK.shape)}"
        )
    (N, K), D = inverse_NK.shape, y_SD.shape[1]
    if D % _COLUMNS or not 1 <= K <= MAX_SLOTS:
        raise ValueError(
            f"y has {D} columns and inverse {K} slots: they must be a multiple of {_COLUMNS}, "
            f"and 1 to {MAX_SLOTS}"
        )
    if N * max(K, D // _COLUMNS) > _MAX_PIECES:
        raise ValueError(f"out [{N}, {D}] is too large: N * D / 8 and N * K go to {_MAX_PIECES}")
    out = y_SD.new_empty(N, D) if out_ND is None else out_ND
    check(where, "y", y_SD, torch.bfloat16, None)
    check(where, "inverse", inverse_NK, torch.int32, None)
    check(where, "out", out, torch.bfloat16, (N, D))
    for number, addend in enumerate(addends):
        check(where, f"addend {number}", addend, torch.bfloat16, (N, D))
    config = CombineConfig(K, len(addends))
    if out.numel():
        first, second = (*addends, out, out)[:MAX_ADDENDS]
        launch(
            CombineKernel,
            config,
            **dict(y=y_SD, inverse=inverse_NK, out=out, first=first, second=second),
            **dict(tokens=N, width=D // _COLUMNS),
        )
    return out
