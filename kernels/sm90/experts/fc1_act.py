"""Kernel `fc1_act`: the first linear layer of the experts and the activation after it, in one pass.

    h[s] = x[index[s]] @ w1[e]^T + b1[e], rounded;  a[s] = act(h[s]) * prob[s]

h is saved for the backward pass. A tile holds channels of the gate and the same ones of the linear
half, so a thread has both of a pair in registers; w1 stays canonical, [gate; up].

Legend: S rows, N rows of x, D hidden, F expert width, H = 2F with a gate and F without, L experts.
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
import torch
from cutlass import Int32
from torch import Tensor

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.launch_options import DEFAULT, LaunchOptions
from phalanx.kernels.sm90.exchange.ready import WORDS
from phalanx.kernels.sm90.gemm import tiles
from phalanx.kernels.sm90.gemm.epilogues import Act
from phalanx.kernels.sm90.gemm.gemm import Gemm, GemmConfig, matrix, vector, weights, words
from phalanx.kernels.sm90.gemm.mainloop import Mainloop
from phalanx.kernels.sm90.jit.arguments import counter_of, require, weight
from phalanx.kernels.sm90.jit.launch import launch, persistent_ctas
from phalanx.kernels.sm90.jit.pointers import Bf16Ptr, Fp32Ptr, IntPtr, LongPtr, WordPtr


class Fc1Kernel(Gemm):
    """h = x[index] @ w1[e]^T + b1[e]; a = act(h) * prob."""

    @cute.jit
    def __call__(
        self,
        x: Bf16Ptr,
        w1: Bf16Ptr,
        h: Bf16Ptr,
        a: Bf16Ptr,
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
        L: Int32,
        ctas: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """S expert rows, N rows of x."""
        loop = self.config.mainloop
        H = F * self.config.epilogue.num_gate_parts
        epilogue_args = self.config.epilogue.host(
            loop, matrix(h, S, H), matrix(a, S, F), words(bias, L, H), vector(prob, S)
        )
        self.run(
            matrix(x, N, D),
            weights(w1, H, D, L, False),
            epilogue_args,
            vector(index, S),
            offsets,
            counter,
            ready,
            F,
            L,
            ctas,
            stream,
        )


def fc1_act(
    x: Tensor,
    w1_LHD: Tensor,
    offsets: Tensor,
    act: Activation,
    *,
    index_S: Tensor | None = None,
    prob_S: Tensor | None = None,
    bias_LH: Tensor | None = None,
    keep_h: bool = True,
    ready: Tensor | None = None,
    out: tuple[Tensor | None, Tensor] | None = None,
    counter: Tensor | None = None,
    options: LaunchOptions = DEFAULT,
    loop: Mainloop | None = None,
) -> tuple[Tensor | None, Tensor]:
    """h[s] = x[index[s]] @ w1[e]^T + b1[e] and a[s] = act(h[s]) * prob[s], each rounded once.

    Args:
        x: bf16 [N, D], or [S, D] without an index; contiguous; D a multiple of 64.
        w1_LHD: bf16, contiguous; with a gate its F rows and then those of the linear half, F a
            multiple of 64.
        offsets: int32 [L + 1], as in `grouped_gemm`.
        act: the activation; computed from h as it is rounded.
        index_S: int32 row of x. prob_S: fp32 factor of a; default 1.
        bias_LH: bf16, contiguous.
        keep_h: return h too; without it, it is not written.
        ready: int64 [6] of `ready.ready_words`, on the device: rows of x, picked by an index, are
            still in flight.
        out: h_SH (None without keep_h) and a_SF to write to; rows of other experts are left alone.
            Default: new ones.
        counter, options, loop: as in `grouped_gemm`.

    Returns:
        h_SH (or None) and a_SF in bf16.

    Raises:
        ValueError: a shape, dtype, stride or device that the kernel does not take.
    """
    (L, H, D), transposed = weight("w1", w1_LHD)
    F = H // 2 if act.gated else H
    if transposed or F % 64:
        raise ValueError(f"w1 must be contiguous [L, {H}, D], the width {F} a multiple of 64")
    S = x.shape[0] if index_S is None else index_S.shape[0]
    require(
        x.device,
        x=(x, torch.bfloat16, (x.shape[0], D)),
        w1=(w1_LHD, torch.bfloat16, None),
        offsets=(offsets, torch.int32, (L + 1,)),
        index=(index_S, torch.int32, (S,)),
        prob=(prob_S, torch.float32, (S,)),
        bias=(bias_LH, torch.bfloat16, (L, H)),
        ready=(ready, torch.int64, (WORDS,)),
        counter=(counter, torch.int32, (1,)),
    )
    if out is None:
        out = x.new_empty(S, H) if keep_h else None, x.new_empty(S, F)
    elif (out[0] is not None) != keep_h:
        raise ValueError(f"out: with keep_h={keep_h} h must {'' if keep_h else 'not '}be given")
    else:
        require(x.device, h=(out[0], torch.bfloat16, (S, H)), a=(out[1], torch.bfloat16, (S, F)))
    h, a = out
    if loop is None:
        gather, parts = index_S is not None, H // F
        loop = tiles.choose("fc1_act", F, D, gather=gather, transposed=False, num_gate_parts=parts)
    epilogue = Act(act, bias_LH is not None, keep_h, prob_S is not None)
    config = GemmConfig(epilogue, loop, waits=ready is not None)
    if S and x.shape[0]:
        counter = counter_of(x.device) if counter is None else counter
        ctas = persistent_ctas(x.device, options)
        launch(
            Fc1Kernel,
            config,
            **dict(x=x, w1=w1_LHD, h=h, a=a, bias=bias_LH, prob=prob_S, index=index_S),
            **dict(offsets=offsets, counter=counter, ready=ready),
            **dict(S=S, N=x.shape[0], F=F, D=D, L=L, ctas=ctas),
        )
    return h, a
