"""Kernel `grouped_gemm`: y[s] = a[s] @ w[e(s)]^T (+ bias[e(s)] * scale[s]) for all experts' rows s.

fc2 forward, and the data gradient of fc1, whose weights are read transposed in bf16; in FP8 its
contraction has the channels of the gate and of the linear half as two parts.

Legend: S rows, K channels in, N channels out, L experts.
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
import torch
from cutlass import Int32
from torch import Tensor

from phalanx.kernels.launch_options import DEFAULT, LaunchOptions
from phalanx.kernels.sm90.exchange.waves import NEXT_TILE, TileSignal, tile_sizes
from phalanx.kernels.sm90.experts.tile_choice import choose, require_tile
from phalanx.kernels.sm90.gemm.epilogues import Linear
from phalanx.kernels.sm90.gemm.gemm import Gemm, GemmConfig
from phalanx.kernels.sm90.gemm.mainloop import Mainloop
from phalanx.kernels.sm90.gemm.operands import (
    Matrix,
    data_of,
    is_transposed,
    require_same_format,
    rows,
    weights,
)
from phalanx.kernels.sm90.gemm.tensors import Rows, Weights, matrix, vector, words
from phalanx.kernels.sm90.jit.launch import launch_persistent, require
from phalanx.kernels.sm90.jit.pointers import Bf16Ptr, Fp32Ptr, IntPtr, WordPtr


class GroupedGemmKernel(Gemm):
    """y[s] = a[s] @ w[e]^T (+ bias[e] * scale[s])."""

    @cute.jit
    def __call__(
        self,
        a: Rows,
        w: Weights,
        y: Bf16Ptr,
        bias: WordPtr,
        scale: Fp32Ptr,
        index: IntPtr,
        offsets: IntPtr,
        counter: IntPtr,
        progress: IntPtr,
        ctas: Int32,
        waves: Int32,
        yielding: Int32,
        first_late: Int32,
        slice_bits: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """From waves on: `TileSignal.sizes`. `index` is null."""
        S, N, L = a.rows, w.columns, w.experts
        epilogue_args = self.config.epilogue.host(
            *(self.config.mainloop, matrix(y, S, N), words(bias, L, N), vector(scale, S)),
            *(progress, L, waves, slice_bits),
        )
        claims, late = (offsets, counter, None), (yielding, first_late, slice_bits)
        self.run(a, w, epilogue_args, index, *claims, S, ctas, stream, late)


def grouped_gemm(
    a: Matrix,
    w_LNK: Matrix,
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
    """y[s] = a[s] @ w[e(s)]^T (+ bias[e(s)] * scale[s]), bf16 [S, N], summed in fp32, rounded once.

    Args:
        a: bf16 [S, K], contiguous; or e4m3 or e5m2, where rows are contiguous and begin at
            multiples of 16 bytes, with a scale for 128 channels: fp32 [S, blocks of K], of any
            strides. Parts of K are multiples of 64.
        w_LNK: bf16 [L, N, K], contiguous or the transpose of a contiguous [L, K, N]; or e4m3,
            contiguous, with a scale for 128 x 128: fp32 [L, blocks of N, blocks of K], of any
            strides. N is a multiple of 64. For the data gradient of fc1 in FP8 these are
            `QuantizedWeights.data_LIO` and `scale.mT`.
        offsets: int32 [L + 1], not decreasing, at most S: expert e has rows offsets[e] to offsets[e
            + 1]. Nothing is read or written from offsets[L] on.
        parts: parts of K, 1 or 2, in each of which blocks of FP8 restart.
        bias_LN: bf16, contiguous, together with scale_S: fp32.
        out_SN: bf16, contiguous.
        counter: int32 [1], 0 before the call and after it; launches that may overlap must not share
            one. Default: that of the stream, or of the captured graph (`counter_of`).
        loop: tile to use; default `tile_choice.choose`.
        signal: signal finished tiles to their reader; has `out_SN`, `loop` and `counter`.

    Raises:
        ValueError: a shape, dtype, stride or device that the kernel does not take.
    """
    if (bias_LN is None) != (scale_S is None):
        raise ValueError("bias and scale: give both or none")
    if parts not in (1, 2):
        raise ValueError(f"parts={parts}: must be 1 or 2")
    require_same_format("a", a, "w", w_LNK)
    device, S = data_of(a).device, len(data_of(a))
    w = weights(device, "w", w_LNK, k_parts=parts)
    L, N, K = w.experts, w.columns, w.channels * w.parts
    if signal is not None:
        out_SN, loop = signal.out_SN, signal.loop
        counter = signal.progress[NEXT_TILE : NEXT_TILE + 1]
    if out_SN is None:
        out_SN = data_of(a).new_empty(S, N, dtype=torch.bfloat16)
    a_rows = rows("a", a, (S, K), parts)
    require(
        device,
        offsets=(offsets, torch.int32, (L + 1,)),
        out=(out_SN, torch.bfloat16, (S, N)),
        bias=(bias_LN, torch.bfloat16, (L, N)),
        scale=(scale_S, torch.float32, (S,)),
        counter=(counter, torch.int32, (1,)),
    )
    if loop is None:
        loop = choose("grouped_gemm", a, N, K, transposed=is_transposed(w_LNK))
    else:
        require_tile(loop, a)
    config = GemmConfig(Linear(bias_LN is not None, signal is not None), loop)
    if S:
        launch_persistent(
            *(GroupedGemmKernel, config, device, options, counter),
            **dict(a=a_rows, w=w, y=out_SN, bias=bias_LN, scale=scale_S, index=None),
            offsets=offsets,
            progress=None if signal is None else signal.progress,
            **tile_sizes(signal, L),
        )
    return out_SN
