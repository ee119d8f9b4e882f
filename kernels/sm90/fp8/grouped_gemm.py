"""Kernel `grouped_gemm` in FP8: y[s] = a[s] @ w[e(s)]^T (+ bias[e(s)] * scale[s]), y in bf16.

fc2 forward, and the data gradient of fc1, whose contraction has the channels of the gate and of the
linear half as two parts.

Legend: S rows, K channels in, N channels out, L experts.
"""

from typing import ClassVar

import cuda.bindings.driver as cuda
import cutlass.cute as cute
import torch
from cutlass import Int32
from torch import Tensor

from phalanx.kernels.quantize.blocks import Quantized
from phalanx.kernels.sm90.exchange.tile_progress import NEXT_TILE, TileSignal
from phalanx.kernels.sm90.fp8.mainloop import activations, weights
from phalanx.kernels.sm90.fp8.operands import (
    BYTES,
    choose,
    require_rows,
    require_tile,
    require_weights,
    rows_tile,
    weight_sizes,
)
from phalanx.kernels.sm90.fp8.promotion import operand_scales
from phalanx.kernels.sm90.gemm.epilogues import Linear
from phalanx.kernels.sm90.gemm.gemm import Gemm, GemmConfig, matrix, vector, words
from phalanx.kernels.sm90.gemm.mainloop import Mainloop
from phalanx.kernels.sm90.jit.arguments import BF16, FP32, INT, WORD, counter_of, require
from phalanx.kernels.sm90.jit.launch import launch, persistent_ctas, sms


class Fp8GroupedGemmKernel(Gemm):
    """y[s] = a[s] @ w[e]^T (+ bias[e] * scale[s])."""

    pointers: ClassVar[tuple[tuple[type, int], ...]] = (
        *(BYTES, FP32, BYTES, FP32),
        *(BF16, WORD, FP32),
        *(INT, INT, INT),
    )
    integers: ClassVar[int] = 17

    @cute.jit
    def __call__(
        self,
        a: cute.Pointer,
        a_scale: cute.Pointer,
        w: cute.Pointer,
        w_scale: cute.Pointer,
        y: cute.Pointer,
        bias: cute.Pointer,
        scale: cute.Pointer,
        offsets: cute.Pointer,
        counter: cute.Pointer,
        progress: cute.Pointer,
        sizes: tuple[Int32, ...],
        stream: cuda.CUstream,
    ) -> None:
        """Sizes: S, N, channels of a part of K and parts, L, ctas, `TileSignal.sizes`, strides
        of a's scales, `weight_sizes` of w's, and 0."""
        S, N, each, parts, L, ctas, waves, yielding, first_late, slice_bits, *strides = sizes
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
            operand_scales(a_scale, strides[:2], w_scale, strides[2:6], 1, strides[6]),
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
    sm_margin: int = 0,
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
        counter, sm_margin, signal: as in `experts.grouped_gemm`.
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
    waves, yielding, *late = (0, 0, L, 0) if signal is None else signal.sizes(L)
    if S:
        counter = counter_of(device) if counter is None else counter
        ctas = persistent_ctas(sms(device), sm_margin)
        launch(
            Fp8GroupedGemmKernel,
            config,
            (
                *(a.data, a.scale, w_LNK.data, w_LNK.scale),
                *(out, bias_LN, scale_S, offsets, counter),
                None if signal is None else signal.progress,
            ),
            (
                *(S, N, K // parts, parts, L, ctas),
                *(waves, yielding, *late),
                *(*a.scale.stride(), *weight_sizes(w_LNK.scale), 0),
            ),
        )
    return out
