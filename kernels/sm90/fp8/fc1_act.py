"""Kernel `fc1_act` in FP8: the first linear layer of the experts and the activation, in one pass.

    h[s] = x[index[s]] @ w1[e]^T + b1[e], rounded to bf16;  a[s] = act(h[s]) * prob[s]

a is rounded to bf16 and then quantised, with a scale for 128 channels of a row: bit for bit
`quantize_rows` of what the kernel in bf16 would have written.

Legend: S rows, N rows of x, D hidden, F expert width, H = 2F with a gate and F without, L experts.
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
from phalanx.kernels.sm90.fp8.act import Fp8Act
from phalanx.kernels.sm90.fp8.mainloop import BLOCK, Fp8Mainloop, activations, weights
from phalanx.kernels.sm90.fp8.operands import (
    choose,
    require_weights,
    row_pitch,
    scale_sizes,
)
from phalanx.kernels.sm90.fp8.promotion import operand_scales
from phalanx.kernels.sm90.gemm.gemm import Gemm, GemmConfig, matrix, vector, words
from phalanx.kernels.sm90.jit.arguments import counter_of, require
from phalanx.kernels.sm90.jit.launch import launch, persistent_ctas
from phalanx.kernels.sm90.jit.pointers import Bf16Ptr, Fp8Ptr, Fp32Ptr, IntPtr, LongPtr, WordPtr

COLUMNS = 256
"""Columns of a tile: 128 of the gate and 128 of the linear half, so that a block of a is whole."""


class Fp8Fc1Kernel(Gemm):
    """h = x[index] @ w1[e]^T + b1[e]; a = act(h) * prob."""

    @cute.jit
    def __call__(
        self,
        x: Fp8Ptr,
        x_scale: Fp32Ptr,
        w1: Fp8Ptr,
        w1_scale: Fp32Ptr,
        h: Bf16Ptr,
        a: Fp8Ptr,
        a_scale: Fp32Ptr,
        bias: WordPtr,
        prob: Fp32Ptr,
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
        x_row_stride: Int32,
        x_block_stride: Int32,
        w_blocks: Int32,
        w_expert_stride: Int32,
        w_n_stride: Int32,
        w_k_stride: Int32,
        zero: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """S expert rows, N rows of x at a `pitch`; strides of x's scales; N blocks and strides of
        w1's."""
        loop, parts = self.config.mainloop, self.config.epilogue.num_gate_parts
        H, blocks = F * parts, (F + (BLOCK - 1)) // BLOCK
        scale = cute.make_layout((S, blocks), stride=(Int64(blocks), 1))
        epilogue_args = self.config.epilogue.host(
            *(loop, matrix(h, S, H), activations(a, S, F, Int32(1))),
            *(words(bias, L, H), vector(prob, S), cute.make_tensor(a_scale, scale)),
        )
        self.run(
            activations(x, N, D, Int32(1), pitch),
            weights(w1, H, D, Int32(1), L),
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
                x_scale,
                (x_row_stride, x_block_stride),
                w1_scale,
                (w_blocks, w_expert_stride, w_n_stride, w_k_stride),
                parts,
                zero,
            ),
        )


def fp8_fc1_act(
    x: Quantized,
    w1_LHD: Quantized,
    offsets: Tensor,
    act: Activation,
    *,
    index_S: Tensor | None = None,
    prob_S: Tensor | None = None,
    bias_LH: Tensor | None = None,
    keep_h: bool = True,
    ready: Tensor | None = None,
    out: tuple[Tensor | None, Quantized] | None = None,
    counter: Tensor | None = None,
    options: LaunchOptions = DEFAULT,
) -> tuple[Tensor | None, Quantized]:
    """h[s] = x[index[s]] @ w1[e]^T + b1[e], and a[s] = act(h[s]) * prob[s] in FP8.

    Args:
        x: e4m3 [N, D], or [S, D] without an index, D a multiple of 64; rows are contiguous and
            begin at multiples of 16 bytes. A scale for 128 channels: fp32 [N, blocks of D], of any
            strides.
        w1_LHD: e4m3, contiguous; with a gate its F rows and then those of the linear half, F a
            multiple of 64; with a scale for 128 x 128: fp32 [L, blocks of H, blocks of D], of any
            strides, where with a gate blocks restart in the linear half.
        offsets: int32 [L + 1], as in `grouped_gemm`.
        act: the activation; computed from h as it is rounded.
        index_S: int32 row of x. prob_S: fp32 factor of a; default 1.
        bias_LH: bf16, contiguous.
        keep_h: return h too; without it, it is not written.
        ready: int64 [6] of `ready.ready_words`, on the device: rows of x and their scales, picked
            by an index, are still being pushed.
        out: h_SH (None without keep_h) and a_SF to write to; rows of other experts are left alone.
            Default: new ones.
        counter, options: as in `grouped_gemm`.

    Returns:
        h_SH in bf16 (or None), and a_SF in e4m3 with a scale for 128 channels of a row.

    Raises:
        ValueError: a shape, dtype, stride or device that the kernel does not take.
    """
    device, parts = x.data.device, 2 if act.gated else 1
    L, H, D = require_weights(device, "w1", w1_LHD, n_parts=parts)
    F = H // parts
    pitch = row_pitch(device, "x", x)
    if x.data.dtype != torch.float8_e4m3fn:
        raise ValueError(f"x must be torch.float8_e4m3fn, not {x.data.dtype}")
    N, channels = x.data.shape
    if channels != D:
        raise ValueError(f"x has {channels} channels, and w1 {D}")
    S = N if index_S is None else index_S.shape[0]
    require(
        device,
        offsets=(offsets, torch.int32, (L + 1,)),
        index=(index_S, torch.int32, (S,)),
        prob=(prob_S, torch.float32, (S,)),
        bias=(bias_LH, torch.bfloat16, (L, H)),
        ready=(ready, torch.int64, (WORDS,)),
        counter=(counter, torch.int32, (1,)),
    )
    if out is None:
        h = x.scale.new_empty(S, H, dtype=torch.bfloat16) if keep_h else None
        out = h, Quantized(x.data.new_empty(S, F), x.scale.new_empty(S, block_count(F)))
    elif (out[0] is not None) != keep_h:
        raise ValueError(f"out: with keep_h={keep_h} h must {'' if keep_h else 'not '}be given")
    else:
        require(
            device,
            h=(out[0], torch.bfloat16, (S, H)),
            a=(out[1].data, torch.float8_e4m3fn, (S, F)),
            a_scale=(out[1].scale, torch.float32, (S, block_count(F))),
        )
    h, a = out
    loop: Fp8Mainloop = choose(COLUMNS, x.data, gather=index_S is not None)
    epilogue = Fp8Act(act, bias_LH is not None, keep_h, prob_S is not None)
    config = GemmConfig(epilogue, loop, waits=ready is not None)
    if S and N:
        counter = counter_of(device) if counter is None else counter
        ctas = persistent_ctas(device, options)
        launch(
            Fp8Fc1Kernel,
            config,
            **dict(x=x.data, x_scale=x.scale, w1=w1_LHD.data, w1_scale=w1_LHD.scale),
            **dict(h=h, a=a.data, a_scale=a.scale, bias=bias_LH, prob=prob_S, index=index_S),
            **dict(offsets=offsets, counter=counter, ready=ready),
            **dict(S=S, N=N, F=F, D=D, pitch=pitch, L=L, ctas=ctas),
            **scale_sizes("x", x.scale, w1_LHD.scale),
        )
    return h, a
