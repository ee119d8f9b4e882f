"""Core attention by flash-attn-4 on Hopper (Dao et al., FlashAttention-4: CuTe DSL kernels).

The library is called below its autograd function, with outputs and gradients allocated here in the
layout that the layers around them have, so that nothing is copied on either side. It serves grouped
queries, values narrower than keys, sliding windows and learnable sinks with their gradient; fewer
queries than keys are the last of them. In deterministic mode the backward pass adds in a fixed
order; otherwise the gradient of the queries, and with grouped queries those of keys and values, are
sums by atomics.

On an H200 at 4096 tokens its forward pass takes 0.79 to 1.12 of the time of cuDNN's, its backward
pass 0.33 to 0.94 (`scripts/bench_libraries.py attention` measures both).

Legend: B batch, H query heads, G key-value heads (G divides H), S queries, T keys (T >= S),
d channels of query and key, v channels of value.
"""

from typing import Any

import torch
from torch import Tensor

from phalanx.kernels.attention.fa4_library import calling
from phalanx.kernels.attention.limits import refuse_heads
from phalanx.kernels.attention.rope import dense


def attention(
    q_SBHd: Tensor,
    k_TBGd: Tensor,
    v_TBGv: Tensor,
    sinks_H: Tensor | None = None,
    *,
    scale: float,
    window: int = 0,
) -> Tensor:
    """Causal attention; query i is at position T - S + i.

    Args:
        q_SBHd, k_TBGd, v_TBGv: bf16 on a Hopper GPU; read where they are if channels are contiguous
            and every row starts at a multiple of 16 bytes, copied otherwise.
        sinks_H: a logit per head in the softmax denominator (arXiv 2508.10925), bf16 or fp32.
        scale: factor on q @ k^T.
        window: keys that a query sees, itself included; 0 is no limit.

    Returns:
        o_SBHv, contiguous.

    Raises:
        ValueError: tensors that the kernels do not take.
    """
    H, d = q_SBHd.shape[2:]
    G, v = v_TBGv.shape[2:]
    if any(x.dtype != torch.bfloat16 for x in (q_SBHd, k_TBGd, v_TBGv)):
        raise ValueError(f"kernels.attention=fa4 needs bf16, not {q_SBHd.dtype}")
    if not q_SBHd.is_cuda or torch.cuda.get_device_capability(q_SBHd.device) != (9, 0):
        raise ValueError("kernels.attention=fa4 needs CUDA capability 9.0")
    if why := refuse_heads(d, v, grouped=H != G):
        raise ValueError(f"kernels.attention=fa4 {why}")
    out_SBHv, _ = forward(q_SBHd, k_TBGd, v_TBGv, sinks_H, scale, window)
    return out_SBHv


def run_forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """`attention`, and the logarithm of the softmax denominator of each row, [B, H, S] in fp32."""
    out, lse = _outputs(q, v)
    with calling() as library:
        library._flash_attn_fwd(
            *(_batch_first(_readable(x)) for x in (q, k, v)),
            softmax_scale=scale,
            learnable_sink=sinks,
            out=_batch_first(out),
            lse=lse,
            **_mask(window),
        )
    return out, lse


def run_backward(
    dout: Tensor,
    saved: list[Tensor],
    sinks: Tensor | None,
    scale: float,
    window: int,
    deterministic: bool,
) -> list[Tensor]:
    """Gradients of q, k, v, contiguous, and of the sinks if there are any.

    `saved`: q, k, v and the two results of `run_forward`.
    """
    q, k, v, out, lse = saved
    gradients = _gradients(q, k, v)
    dq, dk, dv = (_batch_first(x) for x in gradients)
    with calling() as library:
        returned = library._flash_attn_bwd(
            *(_batch_first(_readable(x)) for x in (q, k, v, out)),
            _batch_first(dout.contiguous()),
            lse,
            softmax_scale=scale,
            deterministic=deterministic,
            learnable_sink=sinks,
            dq=dq,
            dk=dk,
            dv=dv,
            **_mask(window),
        )
    return [*gradients, *returned[3:]]


forward = torch.library.custom_op("phalanx::fa4", run_forward, mutates_args=())
backward = torch.library.custom_op("phalanx::fa4_backward", run_backward, mutates_args=())


@forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _outputs(q, v)


@backward.register_fake
def _(dout: Tensor, saved: list[Tensor], sinks: Tensor | None, *rest: Any) -> list[Tensor]:
    return [*_gradients(*saved[:3]), *([] if sinks is None else [torch.empty_like(sinks)])]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(q, k, v, *output, *([] if sinks is None else [sinks]))
    ctx.set_materialize_grads(False)  # none of the logarithms, nor zeros in its place


def _backward(ctx: Any, dout: Tensor, dlse: None) -> tuple[Tensor | None, ...]:
    *saved, sinks = ctx.saved_tensors if len(ctx.saved_tensors) == 6 else (*ctx.saved_tensors, None)
    deterministic = torch.are_deterministic_algorithms_enabled()
    gradients = backward(dout, saved, sinks, ctx.scale, ctx.window, deterministic)
    dq, dk, dv, dsinks = gradients if len(gradients) == 4 else (*gradients, None)
    return dq, dk, dv, dsinks, None, None


forward.register_autograd(_backward, setup_context=_save)


def _mask(window: int) -> dict[str, Any]:
    """Of the last queries. A window is of keys before the query's, and after it."""
    if not window:
        return dict(causal=True)
    return dict(causal=True, window_size_left=window - 1, window_size_right=0)


def _outputs(q_SBHd: Tensor, v_TBGv: Tensor) -> tuple[Tensor, Tensor]:
    S, B, H, _ = q_SBHd.shape
    out_SBHv = q_SBHd.new_empty(S, B, H, v_TBGv.shape[-1])
    return out_SBHv, q_SBHd.new_empty(B, H, S, dtype=torch.float32)


def _gradients(*tensors: Tensor) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in tensors]


def _batch_first(x_SBHd: Tensor) -> Tensor:
    return x_SBHd.transpose(0, 1)


def _readable(x: Tensor) -> Tensor:
    """Without strides of 0, for which other kernels would be compiled."""
    return x.contiguous() if 0 in x.stride() else dense(x)
