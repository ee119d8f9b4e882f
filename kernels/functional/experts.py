"""The experts of an MoE layer as functions of tensors, with autograd.

The router and the weights are the caller's. All experts are on this device, so no token is dropped
and nothing is read on the host, except for the checks of PHALANX_DEBUG=1. Under torch.autocast they
compute in its dtype, as torch.nn.functional.linear does; DTensors are replaced by their local
parts, and their gradients are DTensors. torch.compile sees custom ops.

Legend: T tokens, S rows sorted by expert, K experts per token, E experts, D hidden, F expert width,
H = 2F for gated activations and F for others.
"""

from collections.abc import Sequence
from typing import Any, Unpack, cast

import torch
from torch import Tensor

from phalanx.kernels.derivatives import refuse_transforms
from phalanx.kernels.elementwise.rows import as_int32, clear_padding
from phalanx.kernels.expert_mlp.backend import rows_for
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.grouped_mlp import check, differentiates, grouped_mlp
from phalanx.kernels.expert_mlp.mlp_spec import MLPWeights
from phalanx.kernels.functional import custom_ops
from phalanx.kernels.functional.choice import BackendChoice, Problem, choose, explain
from phalanx.kernels.functional.layouts import in_kernel_layout, in_kernel_shapes, layout_named
from phalanx.kernels.functional.options import (
    ExpertOptions,
    check_channels,
    check_choices,
    check_devices,
    check_floats,
    check_integers,
    check_tensor,
    check_weights,
    check_width,
    constant,
    constants,
    with_defaults,
)
from phalanx.kernels.routing.plan import make_plan
from phalanx.kernels.tracing import outside_graphs


def grouped_experts(
    x: Tensor,
    topk_idx: Tensor,
    topk_prob: Tensor,
    w1: Tensor,
    w2: Tensor,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    **options: Unpack[ExpertOptions],
) -> Tensor:
    """out = sum over the K experts e of a token of topk_prob[e] * MLP_e(x).

    MLP_e(x) = act(x @ w1[e]^T + b1[e]) @ w2[e]^T + b2[e]. Differentiable, once, in x, topk_prob,
    the weights and the biases.

    >>> import torch
    >>> from phalanx.kernels.api import grouped_experts
    >>> x, w1, w2 = torch.randn(16, 64), torch.randn(8, 2 * 128, 64), torch.randn(8, 64, 128)
    >>> topk_prob, topk_idx = torch.randn(16, 8).softmax(-1).topk(2)
    >>> grouped_experts(x, topk_idx, topk_prob, w1, w2, activation="swiglu").shape
    torch.Size([16, 64])

    Args:
        x: [..., D] fp32, bf16, fp16 or fp64. T may be 0.
        topk_idx: [..., K] integers, experts of each token; an id outside 0 to E - 1 counts as none.
        topk_prob: [..., K] of floats, their weights, used in fp32.
        w1, b1: [E, 2F, D] as F gate and F up rows, or [E, F, D] without a gate, in x's dtype; [E,
            2F] or [E, F].
        w2, b2: [E, D, F] and [E, D].
        options: `ExpertOptions`.

    Returns:
        [..., D] in x's dtype, under torch.autocast in that of autocast.

    Raises:
        TypeError: an option that does not exist.
        ValueError: shapes, dtypes or devices that do not fit, an unknown value of an option, or a
            backend that cannot run here.
    """
    check_choices(x, topk_idx, topk_prob)
    x_TD, weights, chosen = operands(x.reshape(-1, x.shape[-1]), (w1, w2, b1, b2), options)
    K, E = topk_idx.shape[-1], weights.w1.shape[0]
    shaped = in_kernel_shapes(weights, chosen["layout"])
    spec, backend, halves = _choose("x", x_TD, shaped, chosen, K)
    plan = make_plan(
        as_int32(topk_idx.reshape(-1, K), E),
        topk_prob.reshape(-1, K).float(),
        first_expert=0,
        local_experts=E,
        rows=max(1, rows_for(x_TD.shape[0] * K, E, backend)),
        backend=backend,
    )
    check(x_TD, shaped, plan, halves)
    return _run(x_TD, weights, plan, spec, chosen["accumulate"]).view(x.shape)


def grouped_experts_sorted(
    rows: Tensor,
    counts: Tensor | Sequence[int],
    row_prob: Tensor | None,
    w1: Tensor,
    w2: Tensor,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    **options: Unpack[ExpertOptions],
) -> Tensor:
    """out[s] = row_prob[s] * MLP_e(rows[s]), where e is the expert of row s.

    Differentiable, once, in rows, row_prob, the weights and the biases.

    >>> import torch
    >>> from phalanx.kernels.api import grouped_experts_sorted
    >>> rows, w1, w2 = torch.randn(10, 64), torch.randn(3, 2 * 128, 64), torch.randn(3, 64, 128)
    >>> grouped_experts_sorted(rows, [4, 0, 5], None, w1, w2)[9].abs().sum()
    tensor(0.)

    Args:
        rows: [S, D] fp32, bf16, fp16 or fp64, sorted by expert. Rows behind the sum of the counts
            are padding: their content has no effect, and their outputs and gradients are 0.
        counts: [E] rows of each expert: integers of any dtype on rows' device, which the host does
            not read; or on the host, which a CUDA graph cannot capture.
        row_prob: [S] of floats, weights of the rows, used in fp32; None: 1.
        w1, w2, b1, b2, options: as for `grouped_experts`.

    Returns:
        [S, D] in the dtype of rows, under torch.autocast in that of autocast.

    Raises:
        TypeError, ValueError: as `grouped_experts`, and counts on the host that are negative or
            whose sum exceeds S.
    """
    check_floats("rows", rows)
    check_width("rows", rows)
    if row_prob is not None:
        check_floats("row_prob", row_prob)
    if rows.ndim != 2 or (row_prob is not None and row_prob.shape != rows.shape[:1]):
        prob = None if row_prob is None else list(row_prob.shape)
        raise ValueError(
            f"expected rows [S, D] and row_prob [S], not {list(rows.shape)} and {prob}"
        )
    check_devices(rows, row_prob=row_prob)
    rows_SD, weights, chosen = operands(rows, (w1, w2, b1, b2), options)
    offsets = _offsets(counts, rows_SD, weights.w1.shape[0])
    shaped = in_kernel_shapes(weights, chosen["layout"])
    spec, _, halves = _choose("rows", rows_SD, shaped, chosen, None)
    prob_S = None if row_prob is None else row_prob.float().contiguous()
    plan = ExpertPlan(None, prob_S, offsets, None)
    check(rows_SD, shaped, plan, halves)
    return _run(rows_SD, weights, plan, spec, chosen["accumulate"])


def operands(
    x: Tensor, weights: Sequence[Tensor | None], options: ExpertOptions
) -> tuple[Tensor, MLPWeights, dict[str, Any]]:
    """Input and weights in the dtype of the products, in their layout; all options."""
    chosen = with_defaults(options)
    w1, w2, b1, b2 = map(local, weights)
    check_weights((w1, w2, b1, b2))
    assert w1 is not None and w2 is not None
    check_devices(x, w1=w1, w2=w2, b1=b1, b2=b2)
    x, weights = in_product_dtype(x, MLPWeights(w1, w2, b1, b2))
    return x, weights, chosen


def _choose(
    name: str, x: Tensor, weights: MLPWeights, chosen: dict[str, Any], K: int | None
) -> tuple[str, str, int]:
    E, D, F = weights.w2.shape
    # Under torch.compile these sizes become constants: the choice depends on them.
    sizes = [constant(size) for size in (D, F, E, K or 0)]
    problem = (x.device, x.dtype, *sizes, K is None)
    found = choose(constants(chosen), problem, chosen["layout"])
    activation = chosen["activation"]
    kind = activation if isinstance(activation, str) else activation.kind
    check_channels(name, x, weights, found[2], kind)
    return found


def _offsets(counts: Tensor | Sequence[int], rows_SD: Tensor, experts: int) -> Tensor:
    """int32 [E + 1]: first row of each expert, at most S."""
    S, device = rows_SD.shape[0], rows_SD.device
    on_host = not isinstance(counts, Tensor) or (rows_SD.is_cuda and not counts.is_cuda)
    if not isinstance(counts, Tensor):
        try:
            counts = torch.tensor(counts)
        except (TypeError, ValueError, RuntimeError):
            found = type(counts).__name__
            raise ValueError(f"counts must be a tensor or a list, not {found}") from None
    check_tensor("counts", counts)
    check_integers("counts", counts, "the rows of each expert")
    if counts.device.type != "cpu":
        check_devices(rows_SD, counts=counts)
    if counts.shape != (experts,):
        raise ValueError(
            f"counts must be [{experts}], the rows of each expert, not {list(counts.shape)}"
        )
    if on_host and (least := int(counts.min())) < 0:
        raise ValueError(f"counts must not be negative, as {least} is")
    if on_host and (total := int(counts.sum())) > S:
        raise ValueError(f"counts sum to {total}, more than the {S} rows")
    ends = counts.to(device, torch.int64).cumsum(0).clamp(max=S)
    return torch.nn.functional.pad(ends, (1, 0)).to(torch.int32)


def _run(x: Tensor, weights: MLPWeights, plan: ExpertPlan, spec: str, accumulate: bool) -> Tensor:
    if accumulate:
        return _run_in_place(x, weights, plan, spec)
    index, prob, offsets, inverse, _, order, _ = plan
    tensors = (x.contiguous(), *weights, index, prob, offsets, inverse, order)
    # A custom op, into which torch.compile does not trace.
    out, _ = custom_ops.grouped_experts(*tensors, spec, differentiates(x, weights, plan))
    return out


@outside_graphs
def _run_in_place(x: Tensor, weights: MLPWeights, plan: ExpertPlan, encoded: str) -> Tensor:
    refuse_transforms("accumulate=True", x, *weights, plan.row_prob_S)
    spec = custom_ops.decode(encoded)
    weights = in_kernel_layout(weights, custom_ops.layout_in(encoded))
    with torch.autocast(x.device.type, enabled=False):
        if plan.inverse_NK is not None:
            return grouped_mlp(x, weights, plan, spec)
        if x.requires_grad:
            x = x.view_as(x)
            x.register_hook(lambda dx: _cleared(dx, plan.offsets))
        return _cleared(grouped_mlp(x, weights, plan, spec), plan.offsets)


def _cleared(rows_SD: Tensor, offsets: Tensor) -> Tensor:
    clear_padding(rows_SD, offsets)
    return rows_SD


def local[T: Tensor | None](weight: T) -> T:
    """This rank's part of a DTensor; other tensors, and None, unchanged."""
    # Not by its type, whose import takes half a second.
    sharded: Any = weight
    return cast(T, sharded.to_local()) if hasattr(sharded, "to_local") else weight


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of products of x: that of an active autocast region, or its own."""
    kind = x.device.type
    casts = x.is_floating_point() and x.dtype != torch.float64  # as autocast does
    if not casts or kind == "meta" or not torch.is_autocast_enabled(kind):  # "meta" has none
        return x.dtype
    return torch.get_autocast_dtype(kind)


def in_product_dtype(x: Tensor, weights: MLPWeights) -> tuple[Tensor, MLPWeights]:
    """Both in the dtype of an active autocast region; unchanged outside of one."""
    w1, w2, b1, b2 = weights
    biases = (b if b is None else b.to(product_dtype(b)) for b in (b1, b2))
    return x.to(product_dtype(x)), MLPWeights(
        w1.to(product_dtype(w1)), w2.to(product_dtype(w2)), *biases
    )


def resolve_backend(
    x: Tensor, w1: Tensor, w2: Tensor, top_k: int | None = None, **options: Unpack[ExpertOptions]
) -> BackendChoice:
    """The backend that `grouped_experts` takes for these tensors, and why it is that one.

    >>> import torch
    >>> from phalanx.kernels.api import resolve_backend
    >>> x, w1, w2 = torch.randn(16, 64), torch.randn(8, 2 * 128, 64), torch.randn(8, 64, 128)
    >>> choice = resolve_backend(x, w1, w2, top_k=2)
    >>> choice.backend, choice.reads_counts
    ('reference', True)

    Args:
        x: [..., D], of which dtype and device are read. Under torch.autocast its dtype is taken.
        w1: [E, H, D] of this rank, or as `layout` says.
        w2: [E, D, F] of this rank, or as `layout` says.
        top_k: experts of a token; None: the rows are sorted, as for `grouped_experts_sorted`.
        options: those of the call.

    Raises:
        TypeError: an option that does not exist.
        ValueError: an unknown value of an option, or a backend that cannot run here.
    """
    chosen = with_defaults(options)
    check_floats("x", x)
    check_weights((w1, w2))
    stored = layout_named(chosen["layout"])
    E, D, F = (local(w2).mT if stored.transposed else local(w2)).shape
    problem = Problem(x.device, product_dtype(x), D, F, E, top_k or 0, top_k is None)
    return explain(constants(chosen), problem)
