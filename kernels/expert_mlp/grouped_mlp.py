"""The expert MLP of an MoE layer and the sum back to tokens, with autograd, for every backend.

Between dispatch and the tokens' return: `grouped_mlp` runs each expert on the rows that the routing
plan gives it and adds a token's expert rows up. `kernels.expert_mlp.dense_halves` is the case of
one expert that has all rows. Nothing is read on the host, and everything can be captured in a CUDA
graph. What is saved and recomputed is said in `kernels.expert_mlp.autograd`.

Shape legend: N rows of x, K experts per token, S expert rows (static), L local experts, D hidden, F
expert width, H = 2F for gated activations and F for others, e(s) the expert of row s.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from phalanx.kernels import debug
from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.autograd import Arrived, ExpertMLP, How, Overlap
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec, MLPWeights
from phalanx.kernels.expert_mlp.replicas import ReplicaExchange
from phalanx.kernels.sm90.limits import COMBINE_ADDENDS as MOST_ADDENDS


def grouped_mlp(
    x_ND: Tensor,
    weights: MLPWeights,
    plan: ExpertPlan,
    spec: MLPSpec,
    *,
    overlap: Overlap | None = None,
    arrived: Arrived | None = None,
    addends: Sequence[Tensor] = (),
    made_h: Callable[..., None] | None = None,
    replicas: ReplicaExchange | None = None,
) -> Tensor:
    """out[n] = sum over the expert rows s of n of prob[s] * MLP_e(s)(x[n]), plus the addends.

    MLP_e(x) = act(x @ w1[e]^T + b1[e]) @ w2[e]^T + b2[e]. Differentiable, once, in x, the weights,
    the biases and the plan's probabilities. The backward pass never holds the gradient of an expert
    row: it is read from the gradient of its token. Between forward and backward live x, h [S, H]
    and the plan: 2 * N * D + 2 * S * H bytes in bf16 and indices (SonicMoE, arXiv 2512.14080,
    section 3.2).

    Args:
        x_ND: bf16 or fp32; the weights and biases share its dtype.
        weights: of the local experts.
        plan: which row each expert reads. Rows from offsets[L] on are padding: nothing that is
            there has an influence. Without `inverse_NK` expert rows are not summed.
        spec: the activation, in fp32 (its product with prob is rounded to x's dtype), and how.
        overlap: exchanges that run meanwhile (fused only): rows of x and of out's gradient are
            waited for, and gradients of x and its probabilities are handed over as they are made.
        arrived: x in FP8, and in the backward pass the gradient of out; x_ND is then without data.
        addends: up to two tensors as out, which have its gradient. `fused` adds them to the sums
            before these are rounded, other backends one after the other in x's dtype.
        made_h: is called with the tensors that are saved of h, unless h is computed again.
        replicas: experts of other ranks, whose places in the plan are behind those of the local
            ones.

    Returns:
        out_ND in x's dtype, added in fp32 in the order of k and rounded once; 0 without experts
        and addends.
        Without `inverse_NK` y_SD in the order of experts, unspecified in the padding (it may hold
        NaN).

    Raises:
        ValueError: unknown backend, or shapes and dtypes that do not fit together; with
            PHALANX_DEBUG=1 also indices of rows that are not there (`kernels.debug`).
    """
    check(x_ND, weights, plan, spec.activation, replicas=replicas is not None)
    if overlap is not None and spec.backend != "fused":
        raise ValueError(f"overlap: only the fused kernels wait for rows, not {spec.backend}")
    if replicas is not None and spec.backend == "cudnn":
        raise ValueError(
            "replicas: kernels=cudnn has none: set parallel.expert_replication=0 or kernels=torch"
        )
    if addends and (overlap is not None or plan.inverse_NK is None):
        raise ValueError("addends: only the sums of tokens have some, not what is sent or rows")
    if len(addends) > MOST_ADDENDS:
        raise ValueError(f"addends: at most {MOST_ADDENDS}, not {len(addends)}")
    prob_S = None if overlap is not None else plan.row_prob_S
    if overlap is not None and spec.recipe is not None and arrived is None:
        raise ValueError("overlap: rows that are still to be quantized must have come before")
    if arrived is not None and spec.recipe is None:
        raise ValueError("arrived: only a recipe takes rows in FP8")
    how = How(spec, differentiates(x_ND, weights, plan), overlap, arrived, made_h, replicas)
    x_ND = x_ND.contiguous() if arrived is None else x_ND
    more = [addend.contiguous() for addend in addends]
    return ExpertMLP.apply(x_ND, *weights, prob_S, plan, how, *more)


def differentiates(x: Tensor, weights: MLPWeights, plan: ExpertPlan) -> bool:
    """Whether there can be a backward pass, for which h is kept."""
    given = [t for t in (x, *weights, plan.row_prob_S) if t is not None]
    return torch.is_grad_enabled() and any(t.requires_grad for t in given)


def check(
    x: Tensor, weights: MLPWeights, plan: ExpertPlan, act: Activation, *, replicas: bool = False
) -> None:
    """ValueError for shapes and dtypes that do not fit together; with replicas a plan has places
    for more experts than there are weights."""
    w1, w2, b1, b2 = weights
    if x.ndim != 2 or w1.ndim != 3 or w2.ndim != 3:
        raise ValueError(f"expected x [N, D] and weights [L, ., .], got {_shapes(x, w1, w2)}")
    (N, D), (L, _, F) = x.shape, w2.shape
    S = N if plan.row_index_S is None else plan.row_index_S.shape[0]
    K = 0 if plan.inverse_NK is None else plan.inverse_NK.shape[-1]
    H = act.width(F)
    if plan.row_index_S is not None and plan.inverse_NK is None:
        raise ValueError("a plan with row_index_S needs inverse_NK, which leads gradients back")
    expected: list[tuple[str, Tensor | None, tuple[int, ...], torch.dtype]] = [
        ("w1", w1, (L, H, D), x.dtype),
        ("w2", w2, (L, D, F), x.dtype),
        ("b1", b1, (L, H), x.dtype),
        ("b2", b2, (L, D), x.dtype),
        ("row_index", plan.row_index_S, (S,), torch.int32),
        ("row_prob", plan.row_prob_S, (S,), torch.float32),
        ("offsets", plan.offsets, plan.offsets.shape if replicas else (L + 1,), torch.int32),
        ("inverse", plan.inverse_NK, (N, K), torch.int32),
        ("order", plan.order_L, (plan.offsets.numel() - 1,), torch.int32),
    ]
    for name, tensor, shape, dtype in expected:
        if tensor is not None and (tensor.shape != shape or tensor.dtype != dtype):
            raise ValueError(
                f"{name} must be {dtype} {list(shape)}, not {tensor.dtype} {list(tensor.shape)}"
            )
    if debug.on():
        debug.check_plan(plan, N)


def _shapes(*tensors: Tensor) -> str:
    return ", ".join(str(list(t.shape)) for t in tensors)
