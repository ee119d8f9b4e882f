"""Weight gradients of stacked experts: sums of outer products over each expert's rows.

fc1: d is the gradient of the pre-activations and v the gathered input; fc2: d the gathered output
gradient and v the activations. One launch of `wgrad_kernel`, straight into the accumulated
gradient, on the current stream and without reading anything on the host.
"""

import torch
from torch import Tensor

from phalanx.kernels.launch_options import DEFAULT, LaunchOptions
from phalanx.kernels.sm90.experts.contraction import BOX, D, V
from phalanx.kernels.sm90.experts.wgrad_kernel import WgradConfig, WgradKernel
from phalanx.kernels.sm90.jit.arguments import counter_of
from phalanx.kernels.sm90.jit.launch import check, launch, persistent_ctas

__all__ = ["WgradConfig", "WgradKernel", "choose", "wgrad"]


def choose(I: int) -> int:  # noqa: E741
    """Columns of a tile: 256 or 192, whichever wastes fewer."""
    return min((256, 192), key=lambda columns: -I % columns)


def wgrad(
    d: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    d_index_S: Tensor | None = None,
    v_index_S: Tensor | None = None,
    out_LOI: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    accumulate: bool = False,
    zeros: bool = True,
    order_L: Tensor | None = None,
    counter: Tensor | None = None,
    options: LaunchOptions = DEFAULT,
    tile: int | None = None,
) -> Tensor:
    """dw[e] (+)= sum over expert e's rows s of outer(d[s], v[s]), in fp32, rounded once.

    Args:
        d: bf16 [S, O], contiguous, O a multiple of 64; with d_index_S [N, O], and d[s] is row
            d_index_S[s].
        v: bf16 [S, I] likewise, with v_index_S.
        offsets: int32 [L + 1], not decreasing, at most S: expert e has rows offsets[e] to
            offsets[e + 1].
        d_index_S, v_index_S: int32 [S], at most one of them; not read from offsets[L] on.
        out_LOI: bf16 or fp32, contiguous; default: a new one of `dtype`.
        accumulate: add to out_LOI instead of writing it. In bf16 what is added is rounded before,
            and the sum after. Experts without rows are left alone.
        zeros: without `accumulate` experts without rows get zeros; otherwise they are left alone.
        order_L: int32 [L], the experts in the order in which they should be started, best by
            falling number of rows.
        counter: int32 [1], 0 before the call and 0 after it; launches that may overlap must not
            share one. Default: a new one.
        options: options of the launch.
        tile: columns of a tile (128, 192, 256); default `choose`.

    Returns:
        dw_LOI.

    Raises:
        ValueError: a shape, dtype, stride or device that the kernel does not take.
    """
    if d.ndim != 2 or v.ndim != 2 or offsets.ndim != 1:
        shapes = [list(t.shape) for t in (d, v, offsets)]
        raise ValueError(f"d, v and offsets must be [S, O], [S, I] and [L + 1], not {shapes}")
    if d_index_S is not None and v_index_S is not None:
        raise ValueError("d_index_S and v_index_S: give at most one of them")
    (N, O), I, L = d.shape, v.shape[1], offsets.shape[0] - 1  # noqa: E741
    gathered, index = None, None
    S = N
    if d_index_S is not None:
        gathered, index, S = D, d_index_S, v.shape[0]
    if v_index_S is not None:
        gathered, index, N = V, v_index_S, v.shape[0]
    if O % BOX or I % BOX or not O or not I or L < 1:
        raise ValueError(f"O={O}, I={I}, L={L}: O and I must be positive multiples of {BOX}")
    if accumulate and out_LOI is None:
        raise ValueError("accumulate: needs out_LOI to add to")
    out = d.new_empty(L, O, I, dtype=dtype) if out_LOI is None else out_LOI
    if out.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"out (or dtype) must be torch.bfloat16 or torch.float32, not {out.dtype}")
    config = WgradConfig(
        columns=choose(I) if tile is None else tile,
        fp32_out=out.dtype == torch.float32,
        add=accumulate,
        zeros=zeros or accumulate,
        gathered=gathered,
        ordered=order_L is not None,
    )
    bf16, int32 = torch.bfloat16, torch.int32
    check(d.device, "d", d, bf16, (N if gathered == D else S, O))
    check(d.device, "v", v, bf16, (N if gathered == V else S, I))
    check(d.device, "offsets", offsets, int32, (L + 1,))
    check(d.device, "out", out, out.dtype, (L, O, I))
    if index is not None:
        check(d.device, "v_index" if gathered == V else "d_index", index, int32, (S,))
    if order_L is not None:
        check(d.device, "order", order_L, int32, (L,))
    if counter is not None:
        check(d.device, "counter", counter, int32, (1,))
    ctas = persistent_ctas(d.device, options)
    if S == 0 or N == 0:
        return out if accumulate or not zeros else out.zero_()
    if counter is None:
        counter = counter_of(d.device)
    launch(
        WgradKernel,
        config,
        **dict(d=d, v=v, dw=out, index=index, offsets=offsets, order=order_L, counter=counter),
        **dict(S=S, O=O, I=I, L=L, ctas=ctas),
    )
    return out
