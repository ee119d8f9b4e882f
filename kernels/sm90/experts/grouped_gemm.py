"""Kernel `grouped_gemm`: y[s] = a[s] @ w[e(s)]^T (+ bias[e(s)] * scale[s]) for all experts' rows s.

fc2 forward and the data gradient of fc1, whose weights are read transposed.

Legend: S rows, K channels in, N channels out, L experts.
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
import torch
from cutlass import Int32
from torch import Tensor

from phalanx.kernels.launch_options import DEFAULT, LaunchOptions
from phalanx.kernels.sm90.exchange.tile_progress import NEXT_TILE, TileSignal, tile_sizes
from phalanx.kernels.sm90.gemm import tiles
from phalanx.kernels.sm90.gemm.epilogues import Linear
from phalanx.kernels.sm90.gemm.gemm import Gemm, GemmConfig, matrix, vector, weights, words
from phalanx.kernels.sm90.gemm.mainloop import Mainloop
from phalanx.kernels.sm90.jit.arguments import counter_of, require, weight
from phalanx.kernels.sm90.jit.launch import launch, persistent_ctas
from phalanx.kernels.sm90.jit.pointers import Bf16Ptr, Fp32Ptr, IntPtr, WordPtr


class GroupedGemmKernel(Gemm):
    """y[s] = a[s] @ w[e]^T (+ bias[e] * scale[s])."""

    @cute.jit
    def __call__(
        self,
        a: Bf16Ptr,
        w: Bf16Ptr,
        y: Bf16Ptr,
        bias: WordPtr,
        scale: Fp32Ptr,
        index: IntPtr,
        offsets: IntPtr,
        counter: IntPtr,
        progress: IntPtr,
        S: Int32,
        A: Int32,
        N: Int32,
        K: Int32,
        L: Int32,
        ctas: Int32,
        waves: Int32,
        yielding: Int32,
        first_late: Int32,
        slice_bits: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """A rows of a (S too). From waves on: `TileSignal.sizes`. `index` is null."""
        loop = self.config.mainloop
        epilogue_args = self.config.epilogue.host(
            *(loop, matrix(y, S, N), words(bias, L, N), vector(scale, S)),
            *(progress, L, waves, slice_bits),
        )
        self.run(
            matrix(a, A, K),
            weights(w, N, K, L, loop.b_transposed),
            epilogue_args,
            vector(index, S),
            offsets,
            counter,
            None,
            N,
            L,
            ctas,
            stream,
            (yielding, first_late, slice_bits),
        )


def grouped_gemm(
    a: Tensor,
    w_LNK: Tensor,
    offsets: Tensor,
    *,
    bias_LN: Tensor | None = None,
    scale_S: Tensor | None = None,
    out_SN: Tensor | None = None,
    counter: Tensor | None = None,
    options: LaunchOptions = DEFAULT,
    loop: Mainloop | None = None,
    signal: TileSignal | None = None,
) -> Tensor:
    """y[s] = a[s] @ w[e(s)]^T (+ bias[e(s)] * scale[s]), in fp32, rounded once.

    Args:
        a: bf16 [S, K], contiguous; K a multiple of 64.
        w_LNK: bf16 [L, N, K], contiguous or the transpose of a contiguous [L, K, N]; N a multiple
            of 64.
        offsets: int32 [L + 1], not decreasing, at most S: expert e has rows offsets[e] to
            offsets[e + 1]. Nothing is read or written from offsets[L] on.
        bias_LN: bf16, contiguous, together with scale_S: fp32.
        out_SN: bf16, contiguous.
        counter: int32 [1], 0 before the call and after it; launches that may overlap must not share
            one. Default: that of the stream, or of the captured graph (`counter_of`).
        options: options of the launch.
        loop: tile to use; default `tiles.choose`.
        signal: signal finished tiles to their reader; has `out_SN`, `loop` and `counter`.

    Returns:
        y_SN in bf16.

    Raises:
        ValueError: a shape, dtype, stride or device that the kernel does not take.
    """
    if (bias_LN is None) != (scale_S is None):
        raise ValueError("bias and scale: give both or none")
    (L, N, K), transposed = weight("w", w_LNK)
    S = a.shape[0]
    if signal is not None:
        out_SN, loop = signal.out_SN, signal.loop
        counter = signal.progress[NEXT_TILE : NEXT_TILE + 1]
    out = a.new_empty(S, N) if out_SN is None else out_SN
    require(
        a.device,
        a=(a, torch.bfloat16, (S, K)),
        w=(w_LNK.mT if transposed else w_LNK, torch.bfloat16, None),
        offsets=(offsets, torch.int32, (L + 1,)),
        out=(out, torch.bfloat16, (S, N)),
        bias=(bias_LN, torch.bfloat16, (L, N)),
        scale=(scale_S, torch.float32, (S,)),
        counter=(counter, torch.int32, (1,)),
    )
    loop = loop or tiles.choose("grouped_gemm", N, K, transposed=transposed)
    config = GemmConfig(Linear(bias_LN is not None, signal is not None), loop)
    if S:
        counter = counter_of(a.device) if counter is None else counter
        ctas = persistent_ctas(a.device, options)
        launch(
            GroupedGemmKernel,
            config,
            **dict(a=a, w=w_LNK, y=out, bias=bias_LN, scale=scale_S, index=None, offsets=offsets),
            **dict(counter=counter, progress=None if signal is None else signal.progress),
            **dict(S=S, A=S, N=N, K=K, L=L, ctas=ctas),
            **tile_sizes(signal, L),
        )
    return out
