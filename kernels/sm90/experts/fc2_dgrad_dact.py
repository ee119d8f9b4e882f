"""Kernel `fc2_dgrad_dact`: the data gradient of fc2 and of the activation before it, in one pass.

    dA[s] = dy[index[s]] @ w2[e], in registers only
    dh[s] = dA[s] * prob[s] * act'(h[s]);  a[s] = act(h[s]) * prob[s];  dprob[s] = dA[s] . act(h[s])

h is fetched while the tile is multiplied, and in bf16 dh takes its place in shared memory. dprob
leaves the kernel as one partial sum per column tile, which `dprob` adds up in a fixed order. With
operands in FP8 dh and a are rounded to bf16 and then quantised, with a scale for 128 channels of a
row: bit for bit `quantize_rows` of what the same sums would have left in bf16. For the weight
gradients they are transposed afterwards.

Legend: S rows, N rows of dy, D hidden, F expert width, H = 2F with a gate and F without, L experts.
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
import torch
from cutlass import Int32
from torch import Tensor

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.launch_options import DEFAULT, LaunchOptions
from phalanx.kernels.quantize.blocks import Quantized
from phalanx.kernels.sm90.exchange.ready import WORDS
from phalanx.kernels.sm90.experts.tile_choice import choose, require_tile
from phalanx.kernels.sm90.fp8.act_grad import Fp8ActGrad
from phalanx.kernels.sm90.gemm import tiles
from phalanx.kernels.sm90.gemm.epilogues import ActGrad
from phalanx.kernels.sm90.gemm.gemm import Gemm, GemmConfig
from phalanx.kernels.sm90.gemm.mainloop import Mainloop
from phalanx.kernels.sm90.gemm.operands import (
    E4M3,
    Matrix,
    Rows,
    Weights,
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
from phalanx.kernels.sm90.gemm.tensors import matrix, vector
from phalanx.kernels.sm90.jit.arguments import launch_persistent, require
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
            contiguous and begin at multiples of 16 bytes, with a scale for 128 channels: fp32
            [N, blocks of D], of any strides. D is a multiple of 64.
        w2_LFD: bf16, the transpose of contiguous weights [L, D, F]; or e4m3, contiguous, with a
            scale for 128 x 128: fp32 [L, blocks of F, blocks of D], of any strides: of weights
            [L, D, F] these are `QuantizedWeights.data_LIO` and `scale.mT`. F is a multiple of 64.
        h_SH: bf16, as from `fc1_act`.
        offsets: int32 [L + 1], as in `grouped_gemm`.
        act, index_S, prob_S, ready: as in `fc1_act`.
        out: the tensors to write to and return; rows of other experts are left alone. Default: new
            ones.
        counter, options, loop: as in `grouped_gemm`.

    Returns:
        dh_SH and a_SF in bf16; from operands in FP8 with a scale for 128 channels of a row, dh_SH
        in dy's format, where blocks restart in the linear half, and a_SF in e4m3. And dprob
        [column tiles, S] in fp32, whose sum over the tiles is the gradient of prob (None without
        prob).

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
