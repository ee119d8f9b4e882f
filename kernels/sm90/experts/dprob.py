"""Kernel `dprob`: the gradient of the routing probabilities from partial sums of `fc2_dgrad_dact`.

    dprob[s] = sum over column tiles c of partial[c, s]  (+ table[index[s], e(s)]), 0 in the padding

Tiles are added in their order, so the result is the same for every schedule. The table holds the
share of fc2's bias, <dy[n], b2[e]> for all n and e.

Legend: S rows, C column tiles, N rows of the table, L experts, e(s) the expert of row s.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64
from torch import Tensor

from phalanx.kernels.sm90.gemm.tensors import vector
from phalanx.kernels.sm90.jit.arguments import require
from phalanx.kernels.sm90.jit.launch import launch
from phalanx.kernels.sm90.jit.pointers import Fp32Ptr, IntPtr

THREADS = 256
_STEPS = 11  # halvings that find one of 2048 experts


@dataclass(frozen=True)
class DprobConfig:
    """Choices that are compiled into a kernel."""

    table: bool = False
    gather: bool = False  # row s of the table is index[s], not s
    threads: int = THREADS


class DprobKernel:
    """One thread a row."""

    def __init__(self, config: DprobConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self,
        partial: Fp32Ptr,
        table: Fp32Ptr,
        index: IntPtr,
        offsets: IntPtr,
        dprob: Fp32Ptr,
        S: Int32,
        C: Int32,
        N: Int32,
        L: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Launch, one thread a row."""
        self.kernel(
            cute.make_tensor(partial, cute.make_layout((C, S), stride=(Int64(S), 1))),
            cute.make_tensor(table, cute.make_layout((N, L), stride=(Int64(L), 1))),
            vector(index, S),
            vector(offsets, L + 1),
            vector(dprob, S),
        ).launch(grid=[(S + (THREADS - 1)) // THREADS, 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self,
        partial: cute.Tensor,
        table: cute.Tensor,
        index: cute.Tensor,
        offsets: cute.Tensor,
        dprob: cute.Tensor,
    ) -> None:
        s = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        L = table.shape[1]
        if s < cute.size(dprob):
            total = Float32(0)
            # Rows past the last expert's were not written, and may be NaN: they get 0.
            if s < offsets[L]:
                for c in cutlass.range(partial.shape[0]):
                    total += partial[c, s]
                if cutlass.const_expr(self.config.table):
                    row = s
                    if cutlass.const_expr(self.config.gather):
                        row = index[s]
                    expert, behind = Int32(0), L
                    # Bisection with a fixed number of steps: all lanes of a warp take the same way.
                    for _ in cutlass.range(_STEPS, unroll=1):
                        middle = (expert + behind) // 2
                        if offsets[middle] <= s:
                            expert = middle
                        else:
                            behind = middle
                    total += table[row, expert]
            dprob[s] = total


def dprob(
    partial_CS: Tensor,
    offsets: Tensor,
    *,
    table_NL: Tensor | None = None,
    index_S: Tensor | None = None,
) -> Tensor:
    """Sum of the column tiles' parts, plus the table's entry of each row's dy and expert.

    Args:
        partial_CS: fp32, as from `fc2_dgrad_dact`; rows past offsets[L] are not read.
        offsets: int32 [L + 1], L below 2048.
        table_NL: fp32. index_S: int32 row of the table that row s takes; default s.

    Returns:
        dprob_S in fp32.

    Raises:
        ValueError: a shape, dtype, stride or device that the kernel does not take.
    """
    (C, S), L = partial_CS.shape, offsets.shape[0] - 1
    if not 0 < L < 2**_STEPS:
        raise ValueError(f"offsets has {L} experts: 1 to {2**_STEPS - 1} are taken")
    N = S if table_NL is None else table_NL.shape[0]
    require(
        partial_CS.device,
        partial=(partial_CS, torch.float32, None),
        offsets=(offsets, torch.int32, (L + 1,)),
        table=(table_NL, torch.float32, (N, L)),
        index=(index_S, torch.int32, (S,)),
    )
    out = partial_CS.new_empty(S)
    config = DprobConfig(table_NL is not None, table_NL is not None and index_S is not None)
    if S:
        launch(
            DprobKernel,
            config,
            **dict(partial=partial_CS, table=table_NL, index=index_S, offsets=offsets, dprob=out),
            **dict(S=S, C=C, N=N, L=L),
        )
    return out
