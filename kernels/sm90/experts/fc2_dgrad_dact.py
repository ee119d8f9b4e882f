"""Kernel `fc2_dgrad_dact`: the data gradient of fc2 and of the activation before it, in one pass.

    dA[s] = dy[index[s]] @ w2[e], in registers only
    dh[s] = dA[s] * prob[s] * act'(h[s]);  a[s] = act(h[s]) * prob[s];  dprob[s] = dA[s] . act(h[s])

h is fetched while the tile is multiplied, and dh takes its place in shared memory. dprob leaves the
kernel as one partial sum per column tile, which `dprob` adds up in a fixed order.

Legend: S rows, N rows of dy, D hidden, F expert width, H = 2F with a gate and F without, L experts.
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
from phalanx.kernels.sm90.gemm.epilogues import ActGrad
from phalanx.kernels.sm90.gemm.gemm import Gemm, GemmConfig, matrix, vector, weights
from phalanx.kernels.sm90.gemm.mainloop import Mainloop
from phalanx.kernels.sm90.jit.arguments import counter_of, require, weight
from phalanx.kernels.sm90.jit.launch import launch, persistent_ctas
from phalanx.kernels.sm90.jit.pointers import Bf16Ptr, Fp32Ptr, IntPtr, LongPtr


class DgradKernel(Gemm):
    """dA = dy[index] @ w2[e]; dh, a and the gradient of prob from dA and h."""

    @cute.jit
    def __call__(
        self,
        dy: Bf16Ptr,
        w2: Bf16Ptr,
        h: Bf16Ptr,
        dh: Bf16Ptr,
        a: Bf16Ptr,
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
        L: Int32,
        ctas: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """S expert rows, N rows of dy."""
        loop = self.config.mainloop
        H = F * self.config.epilogue.num_gate_parts
        tiles = (F + (loop.columns - 1)) // loop.columns
        epilogue_args = self.config.epilogue.host(
            loop,
            matrix(h, S, H),
            matrix(dh, S, H),
            matrix(a, S, F),
            vector(prob, S),
            cute.make_tensor(dprob, cute.make_layout((tiles, S), stride=(S, 1))),
        )
        self.run(
            matrix(dy, N, D),
            weights(w2, F, D, L, True),
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


def fc2_dgrad_dact(
    dy: Tensor,
    w2_LDF: Tensor,
    h_SH: Tensor,
    offsets: Tensor,
    act: Activation,
    *,
    index_S: Tensor | None = None,
    prob_S: Tensor | None = None,
    ready: Tensor | None = None,
    out: tuple[Tensor, Tensor, Tensor | None] | None = None,
    counter: Tensor | None = None,
    options: LaunchOptions = DEFAULT,
    loop: Mainloop | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradient of h, recomputed activations, and partial sums of the gradient of prob.

    Args:
        dy: bf16 [N, D], or [S, D] without an index; contiguous; D a multiple of 64.
        w2_LDF: bf16, contiguous; F a multiple of 64.
        h_SH: bf16, as from `fc1_act`.
        offsets: int32 [L + 1], as in `grouped_gemm`.
        act, index_S, prob_S, ready: as in `fc1_act`.
        out: the tensors to write to and return; rows of other experts are left alone. Default: new
            ones.
        counter, options, loop: as in `grouped_gemm`.

    Returns:
        dh_SH and a_SF in bf16, and dprob [column tiles, S] in fp32, whose sum over the tiles is the
        gradient of prob (None without prob).

    Raises:
        ValueError: a shape, dtype, stride or device that the kernel does not take.
    """
    (L, D, F), transposed = weight("w2", w2_LDF)
    if transposed:
        raise ValueError("w2 must be contiguous [L, D, F]")
    S, H = h_SH.shape[0], act.width(F)
    require(
        dy.device,
        dy=(dy, torch.bfloat16, (dy.shape[0] if index_S is not None else S, D)),
        w2=(w2_LDF, torch.bfloat16, None),
        h=(h_SH, torch.bfloat16, (S, H)),
        offsets=(offsets, torch.int32, (L + 1,)),
        index=(index_S, torch.int32, (S,)),
        prob=(prob_S, torch.float32, (S,)),
        ready=(ready, torch.int64, (WORDS,)),
        counter=(counter, torch.int32, (1,)),
    )
    if loop is None:
        operands = dict(gather=index_S is not None, transposed=True)
        loop = tiles.choose("fc2_dgrad_dact", F, D, **operands)
        if act.kind == "geglu":  # the error function would not leave enough registers for more
            loop = tiles.configured("pp128", **operands)
    column_tiles = -(-F // loop.columns)
    if out is None:
        dh, a = torch.empty_like(h_SH), h_SH.new_empty(S, F)
        out = dh, a, None if prob_S is None else prob_S.new_empty(column_tiles, S)
    elif (out[2] is None) != (prob_S is None):
        raise ValueError("out: dprob is given if prob is, and not otherwise")
    else:
        require(
            dy.device,
            dh=(out[0], torch.bfloat16, (S, H)),
            a=(out[1], torch.bfloat16, (S, F)),
            dprob=(out[2], torch.float32, (column_tiles, S)),
        )
    dh, a, dprob = out
    config = GemmConfig(ActGrad(act, prob_S is not None), loop, waits=ready is not None)
    if S and dy.shape[0]:
        counter = counter_of(dy.device) if counter is None else counter
        ctas = persistent_ctas(dy.device, options)
        launch(
            DgradKernel,
            config,
            **dict(dy=dy, w2=w2_LDF, h=h_SH, dh=dh, a=a, prob=prob_S, dprob=dprob, index=index_S),
            **dict(offsets=offsets, counter=counter, ready=ready),
            **dict(S=S, N=dy.shape[0], F=F, D=D, L=L, ctas=ctas),
        )
    return dh, a, dprob
