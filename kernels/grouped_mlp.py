"""The expert MLP of an MoE layer and the sum back to tokens, with autograd, for every backend.

Between dispatch and combine: `expert_mlp` runs each expert on the rows that the routing plan gives
it, `combine` adds a token's expert rows up. The autograd functions are written once over the
operations of `kernels.backend`. Saved for backward are x and h alone; activations are recomputed
from h. No gradient is added up in an order that depends on timing: x's is a gather-and-sum through
the inverse map.

Shape legend: N rows of x, K experts per token, S expert rows (static), L local experts, D hidden, F
expert width, H = 2F for gated activations and F for others, e(s) the expert of row s.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.activation import Activation
from kernels.backend import Backend, Rows
from kernels.reference import Reference
from kernels.torch_backend import Grouped

_BACKENDS: dict[str, Backend] = {"reference": Reference(), "torch": Grouped()}


def expert_mlp(
    x_ND: Tensor,
    w1: Tensor,
    w2: Tensor,
    *,
    row_index_S: Tensor,
    row_prob_S: Tensor,
    offsets: Tensor,
    inverse_NK: Tensor,
    activation: Activation,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    backend: str,
) -> Tensor:
    """y[s] = prob[s] * (act(x[row_index[s]] @ w1[e]^T + b1[e]) @ w2[e]^T + b2[e]), with e = e(s).

    Differentiable in x, the weights, the biases and `row_prob_S`.

    Args:
        x_ND: bf16 or fp32; the weights and biases share its dtype.
        w1: [L, H, D]; if gated, the gate's F rows and then those of the linear half.
        w2: [L, D, F].
        row_index_S: int32 row of x.
        row_prob_S: fp32 routing probability.
        offsets: int32 [L + 1], not decreasing; expert e has rows offsets[e] to offsets[e + 1]. Rows
            from offsets[L] on are padding: nothing that is there has an influence.
        inverse_NK: int32, the expert rows that read each row of x; -1 for none.
        activation: between the layers, in fp32; its product with prob is rounded to x's dtype.
        b1, b2: [L, H] and [L, D], each optional.
        backend: `reference` or `torch`; see `kernels.registry`.

    Returns:
        y_SD in x's dtype, unspecified in the padding (it may hold NaN).

    Raises:
        ValueError: unknown backend, or shapes and dtypes that do not fit together.
    """
    rows = Rows(row_index_S, row_prob_S, offsets, inverse_NK)
    _check(x_ND, w1, w2, b1, b2, rows, activation)
    return _ExpertMLP.apply(x_ND, w1, w2, b1, b2, *rows, activation, _backend(backend))


def combine(
    y_SD: Tensor,
    *,
    row_index_S: Tensor,
    offsets: Tensor,
    inverse_NK: Tensor,
    backend: str = "torch",
) -> Tensor:
    """out[n] = sum over k with inverse[n, k] >= 0 of y[inverse[n, k]].

    Added in fp32 in the order k = 0 .. K - 1 and rounded once to y's dtype; 0 without experts.

    Args:
        y_SD: as from `expert_mlp`; padding is not read.
        row_index_S, offsets: as in `expert_mlp`; they lead the gradient back.
        inverse_NK: int32, below S.
        backend: `reference` or `torch`, which give the same bits.

    Returns:
        out_ND in y's dtype.

    Raises:
        ValueError: unknown backend.
    """
    return _Combine.apply(y_SD, row_index_S, offsets, inverse_NK, _backend(backend))


def _backend(name: str) -> Backend:
    if name not in _BACKENDS:
        raise ValueError(
            f"kernels.backend={name} has no expert MLP here: use "
            f"kernels={' or kernels='.join(_BACKENDS)}"
        )
    return _BACKENDS[name]


class _ExpertMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        w1_LHD: Tensor,
        w2_LDF: Tensor,
        b1_LH: Tensor | None,
        b2_LD: Tensor | None,
        index_S: Tensor,
        prob_S: Tensor,
        offsets: Tensor,
        inverse_NK: Tensor,
        act: Activation,
        ops: Backend,
    ) -> Tensor:
        rows = Rows(index_S, prob_S, offsets, inverse_NK)
        h_SH, a_SF = ops.fc1_act(x_ND, w1_LHD, b1_LH, rows, act)
        ctx.save_for_backward(x_ND, w1_LHD, w2_LDF, b2_LD, h_SH, *rows)
        ctx.act, ctx.ops = act, ops
        return ops.rows(a_SF, w2_LDF, rows, b2_LD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_SD: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, w1_LHD, w2_LDF, b2_LD, h_SH, *index = ctx.saved_tensors
        rows, ops = Rows(*index), ctx.ops
        need_x, need_w1, need_w2, need_b1, need_b2 = ctx.needs_input_grad[:5]
        dy_SD = dy_SD.contiguous()
        dh_SH, a_SF, dprob_S = ops.fc2_dgrad_dact(dy_SD, w2_LDF, b2_LD, h_SH, rows, ctx.act)
        dw2 = ops.wgrad(dy_SD, a_SF, rows, gather=False) if need_w2 else None
        db2 = ops.bias_grad(dy_SD, rows, scale=True) if need_b2 else None
        del a_SF  # the largest buffer of the backward after dh
        dw1 = ops.wgrad(dh_SH, x_ND, rows, gather=True) if need_w1 else None
        db1 = ops.bias_grad(dh_SH, rows, scale=False) if need_b1 else None
        dx = None
        if need_x:
            dx = ops.combine(ops.rows(dh_SH, w1_LHD.transpose(1, 2), rows), rows.inverse_NK)
        return dx, dw1, dw2, db1, db2, None, dprob_S, None, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y_SD: Tensor, index_S: Tensor, offsets: Tensor, inverse_NK: Tensor, ops: Backend
    ) -> Tensor:
        ctx.save_for_backward(index_S, offsets)
        return ops.combine(y_SD, inverse_NK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_ND: Tensor) -> tuple[Tensor | None, ...]:
        index_S, offsets = ctx.saved_tensors
        row_S = torch.arange(index_S.shape[0], dtype=torch.int32, device=index_S.device)
        index_S = index_S.masked_fill(row_S >= offsets[-1], 0)
        return dout_ND.index_select(0, index_S), None, None, None, None


def _check(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    b1: Tensor | None,
    b2: Tensor | None,
    rows: Rows,
    act: Activation,
) -> None:
    if x.ndim != 2 or w1.ndim != 3 or w2.ndim != 3:
        raise ValueError(f"expected x [N, D] and weights [L, ., .], got {_shapes(x, w1, w2)}")
    (N, D), (L, _, F), S = x.shape, w2.shape, rows.index_S.shape[0]
    H = act.width(F)
    expected: list[tuple[str, Tensor | None, tuple[int, ...], torch.dtype]] = [
        ("w1", w1, (L, H, D), x.dtype),
        ("w2", w2, (L, D, F), x.dtype),
        ("b1", b1, (L, H), x.dtype),
        ("b2", b2, (L, D), x.dtype),
        ("row_index", rows.index_S, (S,), torch.int32),
        ("row_prob", rows.prob_S, (S,), torch.float32),
        ("offsets", rows.offsets, (L + 1,), torch.int32),
        ("inverse", rows.inverse_NK, (N, rows.inverse_NK.shape[-1]), torch.int32),
    ]
    for name, tensor, shape, dtype in expected:
        if tensor is not None and (tensor.shape != shape or tensor.dtype != dtype):
            raise ValueError(
                f"{name} must be {dtype} {list(shape)}, not {tensor.dtype} {list(tensor.shape)}"
            )


def _shapes(*tensors: Tensor) -> str:
    return ", ".join(str(list(t.shape)) for t in tensors)
