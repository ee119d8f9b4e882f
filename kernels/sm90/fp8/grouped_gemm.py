"""Kernel `grouped_gemm` in FP8: y[s] = a[s] @ w[e(s)]^T (+ bias[e(s)] * scale[s]), y in bf16.

fc2 forward, and the data gradient of fc1, whose contraction has the channels of the gate and of the
linear half as two parts.

Legend: S rows, K channels in, N channels out, L experts.
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
import torch
from cutlass import Int32
from torch import Tensor

from phalanx.kernels.launch_options import DEFAULT, LaunchOptions
from phalanx.kernels.quantize.blocks import Quantized
from phalanx.kernels.sm90.exchange.tile_progress import NEXT_TILE, TileSignal, tile_sizes
from phalanx.kernels.sm90.fp8.mainloop import activations, weights
from phalanx.kernels.sm90.fp8.operands import (
    choose,
    require_rows,
    require_tile,
    require_weights,
    rows_tile,
    scale_sizes,
)
from phalanx.kernels.sm90.fp8.promotion import operand_scales
from phalanx.kernels.sm90.gemm.epilogues import Linear
from phalanx.kernels.sm90.gemm.gemm import Gemm, GemmConfig, matrix, vector, words
from phalanx.kernels.sm90.gemm.mainloop import Mainloop
from phalanx.kernels.sm90.jit.arguments import counter_of, require
from phalanx.kernels.sm90.jit.launch import launch, persistent_ctas
from phalanx.kernels.sm90.jit.pointers import Bf16Ptr, Fp8Ptr, Fp32Ptr, IntPtr, WordPtr


class Fp8GroupedGemmKernel(Gemm):
    """y[s] = a[s] @ w[e]^T (+ bias[e] * scale[s])."""

    @cute.jit
    def __call__(
        self,
        a: Fp8Ptr,
        a_scale: Fp32Ptr,
        w: Fp8Ptr,
        w_scale: Fp32Ptr,
        y: Bf16Ptr,
        bias: WordPtr,
        scale: Fp32Ptr,
        offsets: IntPtr,
        counter: IntPtr,
        progress: IntPtr,
        S: Int32,
        N: Int32,
        each: Int32,
        parts: Int32,
        L: Int32,
        ctas: Int32,
        waves: Int32,
        yielding: Int32,
        first_late: Int32,
        slice_bits: Int32,
        a_row_stride: Int32,
        a_block_stride: Int32,
        w_blocks: Int32,
        w_expert_stride: Int32,
        w_n_stride: Int32,
        w_k_stride: Int32,
        zero: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """K = `each` channels of `parts` parts. From waves on: `TileSignal.sizes`; strides of a's
        scales; N blocks and strides of w's."""
        loop = self.config.mainloop
        epilogue_args = self.config.epilogue.host(
            *(loop, matrix(y, S, N), words(bias, L, N), vector(scale, S)),
            *(progress, L, waves, slice_bits),
        )
        self.run(
            activations(cute.recast_ptr(a, dtype=loop.types[0]), S, each, parts),
            weights(w, N, each, parts, L),
            epilogue_args,
            vector(offsets, S),
            offsets,
            counter,
            None,
            N,
            L,
            ctas,
            stream,
            (yielding, first_late, slice_bits),
            operand_scales(
                a_scale,
                (a_row_stride, a_block_stride),
                w_scale,
                (w_blocks, w_expert_stride, w_n_stride, w_k_stride),
                1,
                zero,
            ),
        )


def fp8_grouped_gemm(
    a: Quantized,
    w_LNK: Quantized,
    offsets: Tensor,
    *,
    parts: int = 1,
    bias_LN: Tensor | None = None,
    scale_S: Tensor | None = None,
    out_SN: Tensor | None = None,
    counter: Tensor | None = None,
    options: LaunchOptions = DEFAULT,
    loop: Mainloop | None = None,
    signal: TileSignal | None = None,
) -> Tensor:
    """y[s] = a[s] @ w[e(s)]^T (+ bias[e(s)] * scale[s]), summed in fp32, rounded once.

    Args:
        a: e4m3 or e5m2 [S, K], contiguous, with a scale for 128 channels: fp32 [S, blocks of K],
            of any strides. Parts of K are multiples of 64.
        w_LNK: e4m3 [L, N, K], contiguous, N a multiple of 64, with a scale for 128 x 128: fp32
            [L, blocks of N, blocks of K], of any strides. For the data gradient of fc1 these are
            `QuantizedWeights.data_LIO` and `scale.mT`.
        offsets: int32 [L + 1], not decreasing, at most S: expert e has rows offsets[e] to
            offsets[e + 1]. Nothing is read or written from offsets[L] on.
        parts: of K, 1 or 2, in each of which blocks restart.
        bias_LN: bf16, contiguous, together with scale_S: fp32.
        out_SN: bf16, contiguous.
        counter, options, signal: as in `experts.grouped_gemm`.
        loop: an `Fp8Mainloop` for a's format; default `operands.rows_tile`.

    Returns:
        y_SN in bf16.

    Raises:
        ValueError: a shape, dtype, stride or device that the kernel does not take.
    """
    if (bias_LN is None) != (scale_S is None):
        raise ValueError("bias and scale: give both or none")
    if parts not in (1, 2):
        raise ValueError(f"parts={parts}: must be 1 or 2")
    device = a.data.device
    L, N, K = require_weights(device, "w", w_LNK, k_parts=parts)
    require_rows(device, "a", a, parts)
    S = a.data.shape[0]
    if signal is not None:
        out_SN, loop = signal.out_SN, signal.loop
        counter = signal.progress[NEXT_TILE : NEXT_TILE + 1]
    out = a.data.new_empty(S, N, dtype=torch.bfloat16) if out_SN is None else out_SN
    require(
        device,
        a=(a.data, a.data.dtype, (S, K)),
        offsets=(offsets, torch.int32, (L + 1,)),
        out=(out, torch.bfloat16, (S, N)),
        bias=(bias_LN, torch.bfloat16, (L, N)),
        scale=(scale_S, torch.float32, (S,)),
        counter=(counter, torch.int32, (1,)),
    )
    loop = loop or choose(rows_tile(N), a.data)
    require_tile(loop, a.data)
    config = GemmConfig(Linear(bias_LN is not None, signal is not None), loop)
    if S:
        counter = counter_of(device) if counter is None else counter
        ctas = persistent_ctas(device, options)
        launch(
            Fp8GroupedGemmKernel,
            config,
            **dict(a=a.data, a_scale=a.scale, w=w_LNK.data, w_scale=w_LNK.scale),
            **dict(y=out, bias=bias_LN, scale=scale_S, offsets=offsets, counter=counter),
            progress=None if signal is None else signal.progress,
            **dict(S=S, N=N, each=K // parts, parts=parts, L=L, ctas=ctas),
            **tile_sizes(signal, L),
            **scale_sizes("a", a.scale, w_LNK.scale),
        )
    return out
