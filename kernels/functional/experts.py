"""The experts of an MoE layer as one function of tensors, with autograd, and its other signatures.

The router and the weights are the caller's. Without a `group` all experts are on this device, so no
token is dropped and nothing is read on the host, except for the checks of PHALANX_DEBUG=1. Under
torch.autocast they compute in its dtype, as torch.nn.functional.linear does; DTensors are replaced
by their local parts, and their gradients are DTensors. torch.compile sees custom ops.

Legend: T tokens, S rows sorted by expert, N either of them, K experts per token, E experts, D
hidden, F expert width, H = 2F for gated activations and F for others.
"""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, Unpack, cast

import torch
from torch import Tensor

from phalanx.kernels.derivatives import refuse_transforms
from phalanx.kernels.elementwise.rows import as_int32, clear_padding
from phalanx.kernels.expert_mlp.backend import rows_for
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan, check_plan, is_debugging
from phalanx.kernels.expert_mlp.grouped_mlp import differentiates, grouped_mlp
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec, MLPWeights
from phalanx.kernels.functional import custom_ops, eager
from phalanx.kernels.functional.choice import (
    BackendChoice,
    Problem,
    choose,
    explain,
    fitted,
    specification,
)
from phalanx.kernels.functional.layouts import in_kernel_layout, in_kernel_shapes, layout_named
from phalanx.kernels.functional.options import (
    Chosen,
    ExpertOptions,
    check_channels,
    check_choices,
    check_devices,
    check_floats,
    check_integers,
    check_rows,
    check_tensor,
    check_weights,
    with_defaults,
)
from phalanx.kernels.routing.plan import make_plan
from phalanx.kernels.tracing import outside_graphs


class TopK(NamedTuple):
    """The experts of each token."""

    idx: Tensor  # [..., K] integers; an id outside 0 to E - 1 counts as none
    prob: Tensor  # [..., K] of floats, their weights, used in fp32


class SortedRows(NamedTuple):
    """The rows of each expert, one expert after the other; rows behind them are padding."""

    counts: Tensor | Sequence[int]
    """[E] integers of any dtype on the rows' device, which the host does not read; or on the host,
    which a CUDA graph cannot capture."""
    prob: Tensor | None = None  # [S] of floats, weights of the rows, used in fp32; None: 1

    @classmethod
    def of_ends(cls, ends: Tensor | Sequence[int], prob: Tensor | None = None) -> "SortedRows":
        """Rows by the end of each expert's, [E] integers, as `torch._grouped_mm` takes them."""
        ends = torch.as_tensor(ends)
        return cls(ends.diff(prepend=ends.new_zeros(1)), prob)


class ExpertGroup(Protocol):
    """Ranks that share experts: `parallel.expert_parallel.ExpertParallelGroup`."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def exchange(self, x_TD: Tensor, routing: TopK, weights: MLPWeights, spec: MLPSpec) -> Tensor:
        """Weighted sums [T, D] of the experts of all ranks; collective.

        `routing`: int32 ids of all experts, -1 for none, and fp32 probabilities, both [T, K].
        """
        ...


def experts(
    x: Tensor,
    routing: TopK | SortedRows,
    weights: Sequence[Tensor | None],
    options: ExpertOptions | None = None,
    group: ExpertGroup | None = None,
) -> Tensor:
    """The experts of tokens, or of rows that are sorted by expert: all others call this function.

    `TopK`: out = sum over the K experts e of a token of prob[e] * MLP_e(x). `SortedRows`: out[s] =
    prob[s] * MLP_e(x[s]), where e is the expert of row s; 0 in the padding, whose content has no
    effect. MLP_e(x) = act(x @ w1[e]^T + b1[e]) @ w2[e]^T + b2[e]. Differentiable, once, in x, prob,
    the weights and the biases.

    >>> import torch
    >>> from phalanx.kernels.api import SortedRows, TopK, experts
    >>> x, weights = torch.randn(16, 64), (torch.randn(8, 2 * 128, 64), torch.randn(8, 64, 128))
    >>> prob, idx = torch.randn(16, 8).softmax(-1).topk(2)
    >>> experts(x, TopK(idx, prob), weights, {"activation": "swiglu"}).shape
    torch.Size([16, 64])
    >>> experts(x, SortedRows([4, 0, 5, 1, 0, 2, 3, 0]), weights)[15].abs().sum()
    tensor(0.)

    Args:
        x: [..., D] with `TopK`, [S, D] with `SortedRows`, of fp32, bf16, fp16 or fp64; may be
            empty.
        routing: which rows each expert reads.
        weights: w1 [E, 2F, D] as F gate and F up rows, or [E, F, D] without a gate; w2 [E, D, F];
            b1 [E, 2F or F] and b2 [E, D], or None, or neither; in x's dtype.
        options: `ExpertOptions`.
        group: ranks that share the experts (`phalanx.parallel.expert_parallel`): `weights` are of
            this rank, ids are those of all experts, and each rank has as many tokens as any other.
            Collective, forward and backward; torch.compile breaks the graph here.

    Returns:
        Shaped as x and in its dtype, under torch.autocast in that of autocast.

    Raises:
        TypeError: an option that does not exist.
        ValueError: shapes, dtypes or devices that do not fit, an unknown value of an option, a
            backend that cannot run here, or counts on the host that are negative or whose sum
            exceeds S.
    """
    if group is not None:
        return _over_ranks(x, routing, weights, options or {}, group)
    if isinstance(routing, TopK):
        check_choices(x, *routing)
        name, K = "x", routing.idx.shape[-1]
    elif isinstance(routing, SortedRows):
        check_rows(x, routing.prob)
        name, K = "rows", 0
    else:
        raise ValueError(f"routing must be a TopK or SortedRows, not {type(routing).__name__}")
    x_ND, stored, chosen = _operands(x, weights, options or {})
    shaped = in_kernel_shapes(stored, chosen.layout)
    problem = _problem(x_ND, shaped.w2, K)
    spec, backend, halves = choose(chosen.constants, problem, chosen.layout)
    check_channels(name, x_ND, shaped, halves, chosen.kind)
    if not chosen.accumulate and eager.takes(backend, x_ND, *stored):
        out_ND = _run_eagerly(x_ND, stored, routing, spec, backend)
        return out_ND if x.ndim == 2 else out_ND.view(x.shape)
    plan = _plan(routing, x_ND, len(shaped.w1), backend)
    if is_debugging():
        check_plan(plan, x_ND.shape[0])
    return _run(x_ND, stored, plan, spec, chosen.accumulate).view(x.shape)


@outside_graphs
def _over_ranks(
    x: Tensor,
    routing: TopK | SortedRows,
    weights: Sequence[Tensor | None],
    options: ExpertOptions,
    group: ExpertGroup,
) -> Tensor:
    if not isinstance(routing, TopK):
        raise ValueError("group: ranks exchange tokens with their experts: give a TopK as routing")
    check_choices(x, *routing)
    refuse_transforms("expert parallelism", x, routing.prob, *weights)
    if not routing.idx.numel():  # on no rank: nothing travels
        return experts(x, routing, weights, options)
    x_TD, stored, chosen = _operands(x, weights, options)
    shaped, K = in_kernel_shapes(stored, chosen.layout), routing.idx.shape[-1]
    problem = Problem(*_problem(x_TD, shaped.w2, K))
    problem, layout = fitted(chosen.constants, problem, chosen.layout)
    with torch.autocast(x.device.type, enabled=False):
        spec = specification(chosen.constants, problem)
        check_channels("x", x_TD, shaped, spec.activation.facts.halves, chosen.kind)
        own = in_kernel_layout(stored, layout)
        E = len(own.w1) * group.size
        idx_TK = as_int32(routing.idx.reshape(-1, K), E)
        idx_TK = torch.where((idx_TK >= 0) & (idx_TK < E), idx_TK, -1)
        choices = TopK(idx_TK, routing.prob.reshape(-1, K).float())
        return group.exchange(x_TD, choices, own, spec).view(x.shape)


def _operands(
    x: Tensor, weights: Sequence[Tensor | None], options: ExpertOptions
) -> tuple[Tensor, MLPWeights, Chosen]:
    """Input [N, D] and weights in the dtype of the products, in their layout; all options."""
    chosen = with_defaults(options)
    if not 2 <= len(weights) <= 4:
        raise ValueError(f"weights must be w1, w2, b1 and b2, or w1 and w2, not {len(weights)}")
    stored = MLPWeights(*map(local, weights))  # type: ignore[arg-type]
    check_weights(stored)
    check_devices(x, **stored._asdict())
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        x, tensors = x.to(product_dtype(x)), (stored.w1, stored.w2, stored.b1, stored.b2)
        w1, w2, b1, b2 = (t if t is None else t.to(product_dtype(t)) for t in tensors)
        stored = MLPWeights(w1, w2, b1, b2)  # type: ignore[arg-type]
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1]), stored, chosen


def _problem(x: Tensor, w2: Tensor, K: int) -> tuple[Any, ...]:
    """Fields of a `Problem`; K is 0 for rows that are sorted."""
    E, D, F = w2.shape
    # Under torch.compile these sizes become constants: the choice depends on them.
    return (x.device, x.dtype, *map(operator.index, (D, F, E, K)), not K)


def _run_eagerly(
    x_ND: Tensor, weights: MLPWeights, routing: TopK | SortedRows, spec: str, backend: str
) -> Tensor:
    E, prob = len(weights.w1), routing.prob
    if isinstance(routing, SortedRows):
        prob_S = None if prob is None else prob.float()
        return eager.run(x_ND, weights, _offsets(routing.counts, x_ND, E), prob_S, spec, None)
    idx_NK, prob_NK = _pairs(routing, E)
    rows = max(1, rows_for(idx_NK.numel(), E, backend))
    return eager.run(x_ND, weights, idx_NK, prob_NK, spec, eager.Sizes(E, rows, backend))


def _pairs(routing: TopK, experts: int) -> TopK:
    idx_NK, prob_NK = routing
    if idx_NK.ndim != 2:  # an operator that changes nothing would still take microseconds
        K = idx_NK.shape[-1]
        idx_NK, prob_NK = idx_NK.reshape(-1, K), prob_NK.reshape(-1, K)
    return TopK(as_int32(idx_NK, experts), prob_NK.float())


def _plan(routing: TopK | SortedRows, x_ND: Tensor, experts: int, backend: str) -> ExpertPlan:
    prob = routing.prob
    if isinstance(routing, SortedRows):
        prob_S = None if prob is None else prob.float().contiguous()
        return ExpertPlan(None, prob_S, _offsets(routing.counts, x_ND, experts), None)
    pairs = _pairs(routing, experts)
    return make_plan(
        *pairs,
        first_expert=0,
        local_experts=experts,
        rows=max(1, rows_for(pairs.idx.numel(), experts, backend)),
        backend=backend,
    )


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
    """`experts` of tokens: out = sum over the K experts e of a token of topk_prob[e] * MLP_e(x).

    >>> import torch
    >>> from phalanx.kernels.api import grouped_experts
    >>> x, w1, w2 = torch.randn(16, 64), torch.randn(8, 2 * 128, 64), torch.randn(8, 64, 128)
    >>> topk_prob, topk_idx = torch.randn(16, 8).softmax(-1).topk(2)
    >>> grouped_experts(x, topk_idx, topk_prob, w1, w2, activation="swiglu").shape
    torch.Size([16, 64])

    `topk_idx` and `topk_prob` [..., K] are those of `TopK`; all else is as for `experts`.
    """
    return experts(x, TopK(topk_idx, topk_prob), (w1, w2, b1, b2), options)


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
    """`experts` of sorted rows: out[s] = row_prob[s] * MLP_e(rows[s]) for the expert e of row s.

    >>> import torch
    >>> from phalanx.kernels.api import grouped_experts_sorted
    >>> rows, w1, w2 = torch.randn(10, 64), torch.randn(3, 2 * 128, 64), torch.randn(3, 64, 128)
    >>> grouped_experts_sorted(rows, [4, 0, 5], None, w1, w2)[9].abs().sum()
    tensor(0.)

    `counts` [E] and `row_prob` [S] are those of `SortedRows`; all else is as for `experts`.
    """
    return experts(rows, SortedRows(counts, row_prob), (w1, w2, b1, b2), options)


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
        w1, w2: [E, H, D] and [E, D, F] of this rank, or as `layout` says.
        top_k: experts of a token; None: the rows are sorted, as for `grouped_experts_sorted`.
        options: those of the call.

    Raises:
        TypeError: an option that does not exist.
        ValueError: an unknown value of an option, or a backend that cannot run here.
    """
    chosen = with_defaults(options)
    check_floats("x", x)
    check_weights((w1, w2))
    stored = layout_named(chosen.layout)
    E, D, F = (local(w2).mT if stored.transposed else local(w2)).shape
    problem = Problem(x.device, product_dtype(x), D, F, E, top_k or 0, top_k is None)
    wider, _ = fitted(chosen.constants, problem)
    choice = explain(chosen.constants, wider)
    if wider != problem:
        choice = choice._replace(reason=f"{choice.reason}; F is padded to {wider.ffn}")
    return choice


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
    spec, layout = custom_ops.decode(encoded)
    weights = in_kernel_layout(weights, layout)
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
