"""Kernel `fc1_act`: the first linear layer of the experts and the activation after it, in one pass.

    h[s] = x[index[s]] @ w1[e]^T + b1[e], rounded;  a[s] = act(h[s]) * prob[s]

h is saved for the backward pass, in bf16. A tile holds channels of the gate and the same ones of
the linear half, so a thread has both of a pair in registers; w1 stays canonical, [gate; up]. With
operands in FP8 a is rounded to bf16 and then quantised, with a scale for 128 channels of a row: bit
for bit `quantize_rows` of what the kernel in bf16 would have written.

Legend: S rows, N rows of x, D hidden, F expert width, H = 2F with a gate and F without, L experts.
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
import torch
from cutlass import Int32
from torch import Tensor

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.launch_options import DEFAULT, LaunchOptions
from phalanx.kernels.quantize.blocks import Quantized
from phalanx.kernels.sm90.exchange.waves import WORDS
from phalanx.kernels.sm90.experts.tile_choice import choose, require_tile
from phalanx.kernels.sm90.fp8.act import Fp8Act
from phalanx.kernels.sm90.gemm.epilogues import Act
from phalanx.kernels.sm90.gemm.gemm import Gemm, GemmConfig
from phalanx.kernels.sm90.gemm.mainloop import Mainloop
from phalanx.kernels.sm90.gemm.operands import (
    Matrix,
    as_rows,
    data_of,
    is_transposed,
    new_rows,
    require_output,
    require_same_format,
    rows,
    weights,
)
from phalanx.kernels.sm90.gemm.tensors import Rows, Weights, matrix, vector, words
from phalanx.kernels.sm90.jit.launch import launch_persistent, require
from phalanx.kernels.sm90.jit.pointers import Bf16Ptr, Fp32Ptr, IntPtr, LongPtr, WordPtr


class Fc1Kernel(Gemm):
    """h = x[index] @ w1[e]^T + b1[e]; a = act(h) * prob."""

    @cute.jit
    def __call__(
        self,
        x: Rows,
        w1: Weights,
        h: Bf16Ptr,
        a: Rows,
        bias: WordPtr,
        prob: Fp32Ptr,
        index: IntPtr,
        offsets: IntPtr,
        counter: IntPtr,
        ready: LongPtr,
        ctas: Int32,
        stream: cuda.CUstream,
    ) -> None:
        S, H, L = a.rows, w1.columns, w1.experts
        epilogue_args = self.config.epilogue.host(
            self.config.mainloop, matrix(h, S, H), a, words(bias, L, H), vector(prob, S)
        )
        self.run(x, w1, epilogue_args, index, offsets, counter, ready, S, ctas, stream)


def fc1_act(
    x: Matrix,
    w1_LHD: Matrix,
    offsets: Tensor,
    act: Activation,
    *,
    index_S: Tensor | None = None,
    prob_S: Tensor | None = None,
    bias_LH: Tensor | None = None,
    keep_h: bool = True,
    ready: Tensor | None = None,
    out: tuple[Tensor | None, Matrix] | None = None,
    counter: Tensor | None = None,
    options: LaunchOptions = DEFAULT,
    loop: Mainloop | None = None,
) -> tuple[Tensor | None, Matrix]:
    """h[s] = x[index[s]] @ w1[e]^T + b1[e] and a[s] = act(h[s]) * prob[s], each rounded once.

    Args:
        x: bf16 [N, D], or [S, D] without an index, contiguous; or e4m3, where rows are contiguous
            and begin at multiples of 16 bytes, with a scale for 128 channels: fp32 [N, blocks of
            D], of any strides. D is a multiple of 64.
        w1_LHD: bf16, contiguous; or e4m3, contiguous, with a scale for 128 x 128: fp32 [L, blocks
            of H, blocks of D], of any strides, where with a gate blocks restart in the linear half.
            With a gate its F rows come before those of the linear half; F is a multiple of 64.
        index_S: int32 row of x. prob_S: fp32 factor of a; default 1.
        bias_LH: bf16, contiguous.
        keep_h: return h too; without it, it is not written.
        ready: int64 [6] of `waves.ready_words`, on the device: rows of x (in FP8 with their
            scales), picked by an index, are still in flight.
        out: h_SH (None without keep_h) and a_SF to write to; rows of other experts are left alone.
            Default: new ones.
        offsets, counter, options, loop: as in `grouped_gemm`.

    Returns:
        h_SH in bf16 (or None), and a_SF in bf16; from operands in FP8 in e4m3, with a scale for 128
            channels of a row.

    Raises:
        ValueError: a shape, dtype, stride or device that the kernel does not take.
    """
    require_same_format("x", x, "w1", w1_LHD)
    device, parts = data_of(x).device, 2 if act.gated else 1
    if is_transposed(w1_LHD):
        raise ValueError("w1 must be contiguous [L, H, D]")
    w1 = weights(device, "w1", w1_LHD, n_parts=parts)
    L, H, D = w1.experts, w1.columns, w1.channels
    F, N = H // parts, len(data_of(x))
    S = N if index_S is None else len(index_S)
    x_rows = rows("x", x, (N, D))
    require(
        device,
        offsets=(offsets, torch.int32, (L + 1,)),
        index=(index_S, torch.int32, (S,)),
        prob=(prob_S, torch.float32, (S,)),
        bias=(bias_LH, torch.bfloat16, (L, H)),
        ready=(ready, torch.int64, (WORDS,)),
        counter=(counter, torch.int32, (1,)),
    )
    if data_of(x).dtype == torch.float8_e5m2:
        raise ValueError("x must be torch.float8_e4m3fn, not torch.float8_e5m2")
    if out is None:
        h = data_of(x).new_empty(S, H, dtype=torch.bfloat16) if keep_h else None
        out = h, new_rows(x, S, F)
    elif (out[0] is not None) != keep_h:
        raise ValueError(f"out: with keep_h={keep_h} h must {'' if keep_h else 'not '}be given")
    else:
        require(device, h=(out[0], torch.bfloat16, (S, H)))
        require_output("a", out[1], x, (S, F))
    h, a = out
    if loop is None:
        loop = choose("fc1_act", x, F, D, gather=index_S is not None, num_gate_parts=parts)
    else:
        require_tile(loop, x)
    epilogue = Fp8Act if isinstance(x, Quantized) else Act
    config = GemmConfig(
        epilogue(act, bias_LH is not None, keep_h, prob_S is not None),
        loop,
        waits=ready is not None,
    )
    if S and N:
        launch_persistent(
            *(Fc1Kernel, config, device, options, counter),
            **dict(x=x_rows, w1=w1, h=h, a=as_rows(a), bias=bias_LH, prob=prob_S),
            **dict(index=index_S, offsets=offsets, ready=ready),
        )
    return h, a
