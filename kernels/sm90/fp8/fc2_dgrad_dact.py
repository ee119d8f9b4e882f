"""Kernel `fc2_dgrad_dact` in FP8: the data gradient of fc2 and of the activation before it.

    dA[s] = dy[index[s]] @ w2[e], in registers only
    dh[s] = dA[s] * prob[s] * act'(h[s]);  a[s] = act(h[s]) * prob[s];  dprob[s] = dA[s] . act(h[s])

dh and a are rounded to bf16 and then quantised, with a scale for 128 channels of a row: bit for bit
`quantize_rows` of what the same sums would have left in bf16. For the weight gradients they are
transposed afterwards.

Legend: S rows, N rows of dy, D hidden, F expert width, H = 2F with a gate and F without, L experts.
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64
from torch import Tensor

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.launch_options import DEFAULT, LaunchOptions
from phalanx.kernels.quantize.blocks import Quantized, block_count
from phalanx.kernels.sm90.exchange.ready import WORDS
from phalanx.kernels.sm90.fp8.act_grad import Fp8ActGrad
from phalanx.kernels.sm90.fp8.mainloop import BLOCK, FORMATS, activations, weights
from phalanx.kernels.sm90.fp8.operands import (
    choose,
    require_weights,
    row_pitch,
    rows_format,
    scale_sizes,
)
from phalanx.kernels.sm90.fp8.promotion import operand_scales
from phalanx.kernels.sm90.gemm.gemm import Gemm, GemmConfig, matrix, vector
from phalanx.kernels.sm90.jit.arguments import counter_of, require
from phalanx.kernels.sm90.jit.launch import launch, persistent_ctas
from phalanx.kernels.sm90.jit.pointers import Bf16Ptr, Fp8Ptr, Fp32Ptr, IntPtr, LongPtr

COLUMNS = 256
"""Columns of a tile, of F: two blocks. While one of them becomes dh and a, 18 to 42 registers of a
thread are in local memory beside the accumulators of the other one. On one H200 that is up to 7 %
faster than tiles of 128 columns, which fit, but load a third more for a product."""


class Fp8DgradKernel(Gemm):
    """dA = dy[index] @ w2[e]; dh, a and the gradient of prob from dA and h."""

    @cute.jit
    def __call__(
        self,
        dy: Fp8Ptr,
        dy_scale: Fp32Ptr,
        w2: Fp8Ptr,
        w2_scale: Fp32Ptr,
        h: Bf16Ptr,
        dh: Fp8Ptr,
        dh_scale: Fp32Ptr,
        a: Fp8Ptr,
        a_scale: Fp32Ptr,
        prob: Fp32Ptr,
        dprob: Fp32Ptr,
        index: IntPtr,
        offsets: IntPtr,
        counter: IntPtr,
        ready: LongPtr,
        S: Int32,
        N: Int32,
        F: Int32,
        D: Int32,
        pitch: Int32,
        L: Int32,
        ctas: Int32,
        dy_row_stride: Int32,
        dy_block_stride: Int32,
        w_blocks: Int32,
        w_expert_stride: Int32,
        w_n_stride: Int32,
        w_k_stride: Int32,
        zero: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """S expert rows, N rows of dy at a `pitch`; strides of dy's scales; N blocks and strides of
        w2's."""
        loop, epilogue = self.config.mainloop, self.config.epilogue
        parts, one = epilogue.num_gate_parts, Int32(1)
        tiles, blocks = (F + (loop.columns - 1)) // loop.columns, (F + (BLOCK - 1)) // BLOCK
        of_dh = cute.make_layout((S, blocks * parts), stride=(Int64(blocks * parts), 1))
        of_a = cute.make_layout((S, blocks), stride=(Int64(blocks), 1))
        epilogue_args = epilogue.host(
            loop,
            matrix(h, S, F * parts),
            activations(
                cute.recast_ptr(dh, dtype=FORMATS[epilogue.grad_format]),
                S,
                F,
                Int32(parts),
            ),
            activations(a, S, F, one),
            vector(prob, S),
            cute.make_tensor(dprob, cute.make_layout((tiles, S), stride=(S, 1))),
            cute.make_tensor(dh_scale, of_dh),
            cute.make_tensor(a_scale, of_a),
        )
        self.run(
            activations(cute.recast_ptr(dy, dtype=loop.types[0]), N, D, one, pitch),
            weights(w2, F, D, one, L),
            epilogue_args,
            vector(index, S),
            offsets,
            counter,
            ready,
            F,
            L,
            ctas,
            stream,
            None,
            operand_scales(
                dy_scale,
                (dy_row_stride, dy_block_stride),
                w2_scale,
                (w_blocks, w_expert_stride, w_n_stride, w_k_stride),
                1,
                zero,
            ),
        )


def fp8_fc2_dgrad_dact(
    dy: Quantized,
    w2_LFD: Quantized,
    h_SH: Tensor,
    offsets: Tensor,
    act: Activation,
    *,
    index_S: Tensor | None = None,
    prob_S: Tensor | None = None,
    ready: Tensor | None = None,
    out: tuple[Quantized, Quantized, Tensor | None] | None = None,
    counter: Tensor | None = None,
    options: LaunchOptions = DEFAULT,
) -> tuple[Quantized, Quantized, Tensor | None]:
    """Gradient of h and recomputed activations, in FP8, and partial sums of the gradient of prob.

    Args:
        dy: e4m3 or e5m2 [N, D], or [S, D] without an index, D a multiple of 64; rows are contiguous
            and begin at multiples of 16 bytes. A scale for 128 channels: fp32 [N, blocks of D], of
            any strides.
        w2_LFD: e4m3, contiguous, F a multiple of 64, with a scale for 128 x 128: fp32
            [L, blocks of F, blocks of D], of any strides; of weights [L, D, F] these are
            `QuantizedWeights.data_LIO` and `scale.mT`.
        h_SH: bf16, as from `fc1_act`.
        offsets: int32 [L + 1], as in `grouped_gemm`.
        act, index_S, prob_S, ready: as in `fc1_act`.
        out: the tensors to write to and return; rows of other experts are left alone. Default: new
            ones.
        counter, options: as in `grouped_gemm`.

    Returns:
        dh_SH in dy's format, with a scale for 128 channels of a row, whose blocks restart in the
        linear half; a_SF in e4m3 likewise; and dprob [column tiles, S] in fp32, whose sum over the
        tiles is the gradient of prob (None without prob).

    Raises:
        ValueError: a shape, dtype, stride or device that the kernel does not take.
    """
    device = dy.data.device
    L, F, D = require_weights(device, "w2", w2_LFD)
    pitch = row_pitch(device, "dy", dy)
    (N, channels), S, H = dy.data.shape, h_SH.shape[0], act.width(F)
    if channels != D or (index_S is None and N != S):
        rows = S if index_S is None else "N"
        raise ValueError(f"dy must be [{rows}, {D}], not {[N, channels]}")
    require(
        device,
        h=(h_SH, torch.bfloat16, (S, H)),
        offsets=(offsets, torch.int32, (L + 1,)),
        index=(index_S, torch.int32, (S,)),
        prob=(prob_S, torch.float32, (S,)),
        ready=(ready, torch.int64, (WORDS,)),
        counter=(counter, torch.int32, (1,)),
    )
    parts, fp8 = H // F, torch.float8_e4m3fn
    loop = choose(COLUMNS, dy.data, gather=index_S is not None)
    tiles, of_dh, of_a = -(-F // loop.columns), block_count(H, parts), block_count(F)
    if out is None:
        dh = Quantized(dy.data.new_empty(S, H), dy.scale.new_empty(S, of_dh))
        a = Quantized(dy.data.new_empty(S, F, dtype=fp8), dy.scale.new_empty(S, of_a))
        out = dh, a, None if prob_S is None else prob_S.new_empty(tiles, S)
    elif (out[2] is None) != (prob_S is None):
        raise ValueError("out: dprob is given if prob is, and not otherwise")
    else:
        require(
            device,
            dh=(out[0].data, dy.data.dtype, (S, H)),
            dh_scale=(out[0].scale, torch.float32, (S, of_dh)),
            a=(out[1].data, torch.float8_e4m3fn, (S, F)),
            a_scale=(out[1].scale, torch.float32, (S, of_a)),
            dprob=(out[2], torch.float32, (tiles, S)),
        )
    dh, a, dprob = out
    epilogue = Fp8ActGrad(act, prob_S is not None, rows_format("dy", dy.data))
    config = GemmConfig(epilogue, loop, waits=ready is not None)
    if S and N:
        counter = counter_of(device) if counter is None else counter
        ctas = persistent_ctas(device, options)
        launch(
            Fp8DgradKernel,
            config,
            **dict(dy=dy.data, dy_scale=dy.scale, w2=w2_LFD.data, w2_scale=w2_LFD.scale, h=h_SH),
            **dict(dh=dh.data, dh_scale=dh.scale, a=a.data, a_scale=a.scale),
            **dict(prob=prob_S, dprob=dprob, index=index_S, offsets=offsets, counter=counter),
            **dict(ready=ready, S=S, N=N, F=F, D=D, pitch=pitch, L=L, ctas=ctas),
            **scale_sizes("dy", dy.scale, w2_LFD.scale),
        )
    return dh, a, dprob
