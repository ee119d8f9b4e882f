"""The expert MLP of an MoE layer and the sum back to tokens, with autograd, for every backend.

Between dispatch and the tokens' return: `grouped_mlp` runs each expert on the rows that the routing
plan gives it and adds a token's expert rows up. `expert_mlp` and `combine` are its two halves, for
transports that need rows in expert order. `dense_mlp` is the case of one expert that has all rows.
Nothing is read on the host, and everything can be captured in a CUDA graph. The ops below are
`kernels.ops`; what they save and recompute is said there.

Shape legend: N rows of x, K experts per token, S expert rows (static), L local experts, D hidden, F
expert width, H = 2F for gated activations and F for others, e(s) the expert of row s.
"""

import torch
from torch import Tensor

from kernels import debug, ops
from kernels.activation import Activation
from kernels.backend import NO_MARGINS, Margins, Rows
from kernels.ops import Traffic


def grouped_mlp(
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
    order_L: Tensor | None = None,
    margins: Margins = NO_MARGINS,
    dynamic: bool = True,
    accumulate: bool = False,
    traffic: Traffic | None = None,
) -> Tensor:
    """out[n] = sum over the expert rows s of n of prob[s] * MLP_e(s)(x[n]).

    MLP_e(x) = act(x @ w1[e]^T + b1[e]) @ w2[e]^T + b2[e]. Same values as `combine` of `expert_mlp`,
    but the backward pass never holds the gradient of an expert row: it is read from the gradient of
    its token. Differentiable, once, in x, the weights, the biases and `row_prob_S`. Between forward
    and backward live x, h [S, H] and the plan: 2 * N * D + 2 * S * H bytes in bf16 and indices
    (SonicMoE, arXiv 2512.14080, section 3.2).

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
        backend: `reference`, `torch` or `fused`; see `kernels.registry`.
        order_L: int32, experts in the order in which the fused scheduler should take them.
        margins: SMs that the kernels of each pass leave free (fused only).
        dynamic: kernels claim tiles on the device rather than deal them out in turn (fused only).
        accumulate: add the gradients of parameters with a `main_grad` of their shape, fp32 or of
            their dtype, to that, and set `grad_added_to_main_grad`, as Megatron-Core's data
            parallel wrapper expects.
        traffic: exchanges that go on meanwhile (fused only): rows of x and of out's gradient are
            waited for, and gradients of x and its probabilities are handed over as they are made.

    Returns:
        out_ND in x's dtype, added in fp32 in the order of k and rounded once; 0 without experts.

    Raises:
        ValueError: unknown backend, or shapes and dtypes that do not fit together; with
            PHALANX_DEBUG=1 also indices of rows that are not there (`kernels.debug`).
    """
    rows = Rows(row_index_S, row_prob_S, offsets, inverse_NK, order_L)
    _check(x_ND, w1, w2, b1, b2, rows, activation)
    how = (activation, backend, margins, dynamic, accumulate)
    return _call(x_ND, w1, w2, b1, b2, rows, *how, summed=True, traffic=traffic)


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
    order_L: Tensor | None = None,
    margins: Margins = NO_MARGINS,
    dynamic: bool = True,
    accumulate: bool = False,
) -> Tensor:
    """y[s] = prob[s] * MLP_e(s)(x[row_index[s]]): what `grouped_mlp` sums, in expert order.

    Arguments, gradients and errors are those of `grouped_mlp`.

    Returns:
        y_SD in x's dtype, unspecified in the padding (it may hold NaN).
    """
    rows = Rows(row_index_S, row_prob_S, offsets, inverse_NK, order_L)
    _check(x_ND, w1, w2, b1, b2, rows, activation)
    how = (activation, backend, margins, dynamic, accumulate)
    return _call(x_ND, w1, w2, b1, b2, rows, *how, summed=False)


def dense_mlp(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    *,
    activation: Activation,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    backend: str,
    margins: Margins = NO_MARGINS,
    dynamic: bool = True,
    accumulate: bool = False,
) -> Tensor:
    """act(x @ w1^T + b1) @ w2^T + b2: a dense MLP or shared experts, one group of all rows.

    Differentiable, once, in all tensors; saved for backward are x and h.

    Args:
        x: [..., D], bf16 or fp32; the weights and biases share its dtype.
        w1, w2: [H, D] and [D, F]. b1, b2: [H] and [D], each optional.
        activation, backend, margins, dynamic, accumulate: as in `grouped_mlp`.

    Returns:
        [..., D] in x's dtype.

    Raises:
        ValueError: unknown backend, or shapes and dtypes that do not fit together.
    """
    if x.ndim < 1 or w1.ndim != 2 or w2.ndim != 2:
        raise ValueError(f"expected x [..., D] and weights [., .], got {_shapes(x, w1, w2)}")
    x_ND = x.reshape(-1, x.shape[-1])
    rows = _one_group(x_ND)
    biases = [b if b is None else b[None] for b in (b1, b2)]
    _check(x_ND, w1[None], w2[None], biases[0], biases[1], rows, activation)
    how = (activation, backend, margins, dynamic, accumulate)
    return _call(x_ND, w1, w2, b1, b2, rows, *how, summed=False).view(x.shape)


def dense_first(
    x_ND: Tensor,
    w1: Tensor,
    *,
    activation: Activation,
    backend: str,
    margins: Margins = NO_MARGINS,
    dynamic: bool = True,
    accumulate: bool = False,
) -> tuple[Tensor, Tensor]:
    """First half of `dense_mlp` without biases, for something to be done before the second.

    Args:
        x_ND: bf16 or fp32, as w1 [H, D] is.
        activation, backend, margins, dynamic, accumulate: as in `grouped_mlp`.

    Returns:
        h_NH and a_NF, for `dense_second`, which is where h has its gradient from; a has none.

    Raises:
        ValueError: unknown backend, or shapes and dtypes that do not fit together.
    """
    F = w1.shape[0] // 2 if activation.gated else w1.shape[0]
    if x_ND.ndim != 2 or w1.shape != (activation.width(F), x_ND.shape[1]) or w1.dtype != x_ND.dtype:
        raise ValueError(f"expected x [N, D] and w1 [H, D] of one dtype, got {_shapes(x_ND, w1)}")
    how = ops.how(activation, backend, margins, dynamic, summed=False)
    x_ND = x_ND.contiguous()
    return ops.DenseFirst.apply(x_ND, w1, _one_group(x_ND), how, accumulate)


def dense_second(
    h_NH: Tensor,
    a_NF: Tensor,
    w2: Tensor,
    *,
    activation: Activation,
    backend: str,
    margins: Margins = NO_MARGINS,
    dynamic: bool = True,
    accumulate: bool = False,
) -> Tensor:
    """Second half of `dense_mlp`: a @ w2^T, with the bits of the whole.

    Args:
        h_NH, a_NF: of `dense_first`; only h is saved for the backward pass.
        w2: [D, F].
        activation, backend, margins, dynamic, accumulate: as in `dense_first`.

    Raises:
        ValueError: unknown backend, or shapes and dtypes that do not fit together.
    """
    if w2.ndim != 2 or w2.shape[1] != a_NF.shape[1] or w2.dtype != a_NF.dtype:
        raise ValueError(f"expected a [N, F] and w2 [D, F] of one dtype, got {_shapes(a_NF, w2)}")
    how = ops.how(activation, backend, margins, dynamic, summed=False)
    return ops.DenseSecond.apply(h_NH, a_NF, w2, _one_group(h_NH), how, accumulate)


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
    Differentiable, once, in y.

    Args:
        y_SD: as from `expert_mlp`; padding is not read.
        row_index_S, offsets: as in `grouped_mlp`; they lead the gradient back.
        inverse_NK: int32, below S.
        backend: `reference`, `torch` or `fused`, which give the same bits.

    Returns:
        out_ND in y's dtype.

    Raises:
        ValueError: unknown backend; with PHALANX_DEBUG=1 a row that is not there.
    """
    if debug.on():
        debug.check_inverse(inverse_NK, int(offsets[-1]))
    return ops.combine(y_SD, row_index_S, offsets, inverse_NK, backend)


def _call(
    x_ND: Tensor,
    w1: Tensor,
    w2: Tensor,
    b1: Tensor | None,
    b2: Tensor | None,
    rows: Rows,
    act: Activation,
    backend: str,
    margins: Margins,
    dynamic: bool,
    accumulate: bool,
    *,
    summed: bool,
    traffic: Traffic | None = None,
) -> Tensor:
    given = [t for t in (x_ND, w1, w2, b1, b2, rows.prob_S) if t is not None]
    keep_h = torch.is_grad_enabled() and any(t.requires_grad for t in given)  # for backward only
    how = (*ops.how(act, backend, margins, dynamic, summed=summed), keep_h, accumulate)
    tensors = (x_ND.contiguous(), w1, w2, b1, b2)
    if traffic is not None:
        if backend != "fused":
            raise ValueError(f"traffic: only the fused kernels wait for rows, not {backend}")
        return ops.Beside.apply(*tensors, rows, traffic, *how)
    plan = (rows.index_S, rows.prob_S, rows.offsets, rows.inverse_NK, rows.order_L)
    out, _ = ops.grouped_mlp(*tensors, *plan, *how)
    return out


def _one_group(x_ND: Tensor) -> Rows:
    """All rows of x are one expert's."""
    N = x_ND.shape[0]
    # Made on the device: a tensor of Python numbers would be copied there.
    ends = torch.arange(0, N + 1, N, dtype=torch.int32, device=x_ND.device) if N else None
    offsets = torch.zeros(2, dtype=torch.int32, device=x_ND.device) if ends is None else ends
    return Rows(None, None, offsets, None)


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
    (N, D), (L, _, F) = x.shape, w2.shape
    S = N if rows.index_S is None else rows.index_S.shape[0]
    K = 0 if rows.inverse_NK is None else rows.inverse_NK.shape[-1]
    H = act.width(F)
    expected: list[tuple[str, Tensor | None, tuple[int, ...], torch.dtype]] = [
        ("w1", w1, (L, H, D), x.dtype),
        ("w2", w2, (L, D, F), x.dtype),
        ("b1", b1, (L, H), x.dtype),
        ("b2", b2, (L, D), x.dtype),
        ("row_index", rows.index_S, (S,), torch.int32),
        ("row_prob", rows.prob_S, (S,), torch.float32),
        ("offsets", rows.offsets, (L + 1,), torch.int32),
        ("inverse", rows.inverse_NK, (N, K), torch.int32),
        ("order", rows.order_L, (L,), torch.int32),
    ]
    for name, tensor, shape, dtype in expected:
        if tensor is not None and (tensor.shape != shape or tensor.dtype != dtype):
            raise ValueError(
                f"{name} must be {dtype} {list(shape)}, not {tensor.dtype} {list(tensor.shape)}"
            )
    if debug.on():
        debug.check_rows(rows, N)


def _shapes(*tensors: Tensor) -> str:
    return ", ".join(str(list(t.shape)) for t in tensors)
