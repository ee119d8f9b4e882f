"""Kernels `fc2_dgrad_dact`, the data gradient of fc2 and of the activation before it, and `dprob`.

    dA[s] = dy[index[s]] @ w2[e], in registers only
    dh[s] = dA[s] * prob[s] * act'(h[s]);  a[s] = act(h[s]) * prob[s];  dprob[s] = dA[s] . act(h[s])

h is fetched while the tile is multiplied, and in bf16 dh takes its place in shared memory. With
operands in FP8 dh and a are rounded to bf16 and then quantised, with a scale for 128 channels of a
row: bit for bit `quantize_rows` of what the same sums would have left in bf16. For the weight
gradients they are transposed afterwards.

dprob leaves the kernel as one partial sum per column tile. `dprob` adds them in the order of tiles,
so that the result is the same for every schedule; rows of the padding get 0:

    dprob[s] = sum over column tiles c of partial[c, s]  (+ table[index[s], e(s)])

The table holds the share of fc2's bias, <dy[n], b2[e]> for all n and e.

Legend: S rows, N rows of dy and of the table, D hidden, F expert width, H = 2F with a gate and F
without, L experts, C column tiles, e(s) the expert of row s.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64
from torch import Tensor

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.launch_options import DEFAULT, LaunchOptions
from phalanx.kernels.quantize.blocks import Quantized
from phalanx.kernels.sm90.exchange.waves import WORDS
from phalanx.kernels.sm90.experts.tile_choice import choose, require_tile
from phalanx.kernels.sm90.fp8.act import Fp8ActGrad
from phalanx.kernels.sm90.gemm import tiles
from phalanx.kernels.sm90.gemm.epilogues import ActGrad
from phalanx.kernels.sm90.gemm.gemm import Gemm, GemmConfig
from phalanx.kernels.sm90.gemm.mainloop import Mainloop
from phalanx.kernels.sm90.gemm.operands import (
    E4M3,
    Matrix,
    as_rows,
    data_of,
    format_of,
    is_transposed,
    new_rows,
    require_output,
    require_same_format,
    rows,
    weights,
)
from phalanx.kernels.sm90.gemm.tensors import Rows, Weights, matrix, vector
from phalanx.kernels.sm90.jit.launch import launch, launch_persistent, require
from phalanx.kernels.sm90.jit.pointers import Bf16Ptr, Fp32Ptr, IntPtr, LongPtr


class DgradKernel(Gemm):
    """dA = dy[index] @ w2[e]; dh, a and the gradient of prob from dA and h."""

    @cute.jit
    def __call__(
        self,
        dy: Rows,
        w2: Weights,
        h: Bf16Ptr,
        dh: Rows,
        a: Rows,
        prob: Fp32Ptr,
        dprob: Fp32Ptr,
        index: IntPtr,
        offsets: IntPtr,
        counter: IntPtr,
        ready: LongPtr,
        ctas: Int32,
        stream: cuda.CUstream,
    ) -> None:
        loop, epilogue = self.config.mainloop, self.config.epilogue
        S, F = a.rows, w2.columns
        tiles = (F + (loop.columns - 1)) // loop.columns
        epilogue_args = epilogue.host(
            *(loop, matrix(h, S, F * epilogue.num_gate_parts), dh, a, vector(prob, S)),
            cute.make_tensor(dprob, cute.make_layout((tiles, S), stride=(S, 1))),
        )
        self.run(dy, w2, epilogue_args, index, offsets, counter, ready, S, ctas, stream)


def fc2_dgrad_dact(
    dy: Matrix,
    w2_LFD: Matrix,
    h_SH: Tensor,
    offsets: Tensor,
    act: Activation,
    *,
    index_S: Tensor | None = None,
    prob_S: Tensor | None = None,
    ready: Tensor | None = None,
    out: tuple[Matrix, Matrix, Tensor | None] | None = None,
    counter: Tensor | None = None,
    options: LaunchOptions = DEFAULT,
    loop: Mainloop | None = None,
) -> tuple[Matrix, Matrix, Tensor | None]:
    """Gradient of h, recomputed activations, and partial sums of the gradient of prob.

    Args:
        dy: bf16 [N, D], or [S, D] without an index, contiguous; or e4m3 or e5m2, where rows are
            contiguous and begin at multiples of 16 bytes, with a scale for 128 channels: fp32 [N,
            blocks of D], of any strides. D is a multiple of 64.
        w2_LFD: bf16, the transpose of contiguous weights [L, D, F]; or e4m3, contiguous, with a
            scale for 128 x 128: fp32 [L, blocks of F, blocks of D], of any strides: of weights [L,
            D, F] these are `QuantizedWeights.data_LIO` and `scale.mT`. F is a multiple of 64.
        h_SH: bf16, as from `fc1_act`.
        act, index_S, prob_S, ready: as in `fc1_act`.
        out: the tensors to write to and return; rows of other experts are left alone. Default: new
            ones.
        offsets, counter, options, loop: as in `grouped_gemm`.

    Returns:
        dh_SH and a_SF in bf16; from operands in FP8 with a scale for 128 channels of a row, dh_SH
            in dy's format, where blocks restart in the linear half, and a_SF in e4m3. And dprob [C,
            S] in fp32, for `dprob` (None without prob).

    Raises:
        ValueError: a shape, dtype, stride or device that the kernel does not take.
    """
    require_same_format("dy", dy, "w2", w2_LFD)
    device, fp8, gather = data_of(dy).device, isinstance(dy, Quantized), index_S is not None
    if not fp8 and not is_transposed(w2_LFD):
        raise ValueError("w2 must be the transpose of contiguous weights [L, D, F]")
    w2 = weights(device, "w2", w2_LFD)
    L, F, D = w2.experts, w2.columns, w2.channels
    N, S, H = len(data_of(dy)), h_SH.shape[0], act.width(F)
    dy_rows = rows("dy", dy, (N if gather else S, D))
    require(
        device,
        h=(h_SH, torch.bfloat16, (S, H)),
        offsets=(offsets, torch.int32, (L + 1,)),
        index=(index_S, torch.int32, (S,)),
        prob=(prob_S, torch.float32, (S,)),
        ready=(ready, torch.int64, (WORDS,)),
        counter=(counter, torch.int32, (1,)),
    )
    if loop is None:
        loop = choose("fc2_dgrad_dact", dy, F, D, gather=gather, transposed=not fp8)
        if act.kind == "geglu" and not fp8:
            # The error function would not leave enough registers for wider tiles.
            loop = tiles.configured("pp128", gather=gather, transposed=True)
    else:
        require_tile(loop, dy)
    parts, column_tiles = H // F, -(-F // loop.columns)
    if out is None:
        dprob = None if prob_S is None else prob_S.new_empty(column_tiles, S)
        out = new_rows(dy, S, H, parts), new_rows(dy, S, F, dtype=E4M3), dprob
    elif (out[2] is None) != (prob_S is None):
        raise ValueError("out: dprob is given if prob is, and not otherwise")
    else:
        require_output("dh", out[0], dy, (S, H), parts)
        require_output("a", out[1], dy, (S, F), dtype=E4M3)
        require(device, dprob=(out[2], torch.float32, (column_tiles, S)))
    dh, a, dprob = out
    epilogue = ActGrad(act, prob_S is not None)
    if fp8:
        epilogue = Fp8ActGrad(act, prob_S is not None, format_of("dy", dy))
    config = GemmConfig(epilogue, loop, waits=ready is not None)
    if S and N:
        launch_persistent(
            *(DgradKernel, config, device, options, counter),
            **dict(dy=dy_rows, w2=w2, h=h_SH, dh=as_rows(dh, parts), a=as_rows(a), prob=prob_S),
            **dict(dprob=dprob, index=index_S, offsets=offsets, ready=ready),
        )
    return dh, a, dprob


THREADS = 256
_STEPS = 11  # halvings that find one of 2048 experts


@dataclass(frozen=True)
class DprobConfig:
    """Choices that are compiled into a `dprob` kernel."""

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
    """Sum of the column tiles' parts, plus the table's entry of each row's dy and expert: fp32 [S].

    Args:
        partial_CS: fp32, as from `fc2_dgrad_dact`; rows past offsets[L] are not read.
        offsets: int32 [L + 1], L below 2048.
        table_NL: fp32. index_S: int32 row of the table that row s takes; default s.

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
