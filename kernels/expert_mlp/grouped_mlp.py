"""The expert MLP of an MoE layer and the sum back to tokens, with autograd, for every backend.

`grouped_mlp` runs each expert on the rows of the routing plan and sums a token's expert rows.
Nothing is read on the host, and everything can be captured in a CUDA graph.
`kernels.expert_mlp.autograd` describes what is saved and recomputed.

Shape legend: N rows of x, K experts per token, S expert rows (static), L local experts, D hidden, F
expert width, H = 2F for gated activations and F for others, e(s) the expert of row s.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from phalanx.kernels.derivatives import transformed
from phalanx.kernels.expert_mlp.autograd import ExpertMLP, ExpertMLPArgs
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan, check_plan, is_debugging
from phalanx.kernels.expert_mlp.interfaces import OWN, Experts, Fp8Inputs, Overlap
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec, MLPWeights
from phalanx.kernels.limits import COMBINE_ADDENDS as MOST_ADDENDS


def grouped_mlp(
    x_ND: Tensor,
    weights: MLPWeights,
    plan: ExpertPlan,
    spec: MLPSpec,
    *,
    overlap: Overlap | None = None,
    fp8_inputs: Fp8Inputs | None = None,
    addends: Sequence[Tensor] = (),
    on_saved_h: Callable[..., None] | None = None,
    experts: Experts = OWN,
    inputs_persist: bool = False,
) -> Tensor:
    """out[n] = sum over the expert rows s of n of prob[s] * MLP_e(s)(x[n]), plus the addends.

    MLP_e(x) = act(x @ w1[e]^T + b1[e]) @ w2[e]^T + b2[e]. Differentiable, once, in x, the weights,
    the biases and the plan's probabilities. The backward pass never holds the gradient of an expert
    row: it is read from the gradient of its token. Saved are x, h [S, H] and the plan: 2 * N * D +
    2 * S * H bytes in bf16 and indices (SonicMoE, arXiv 2512.14080, section 3.2).

    Args:
        x_ND: bf16 or fp32; the weights and biases share its dtype.
        plan: which row each expert reads. Rows from offsets[L] on are padding, whose content has no
            effect. Without `inverse_NK` expert rows are not summed.
        spec: the activation, in fp32 (its product with prob is rounded to x's dtype), and backend.
        overlap: exchanges that overlap this call (fused only): kernels wait for rows of x and of
            out's gradient, and gradients of x and its probabilities are sent when computed.
        fp8_inputs: x in FP8, and in the backward pass the gradient of out; x_ND has no data then.
        addends: up to two tensors shaped as out, which receive its gradient. `fused` adds them to
            the sums before these are rounded, other backends one after the other in x's dtype.
        on_saved_h: called with the tensors that are saved of h, unless h is recomputed.
        experts: the local experts alone, or others behind them, whose slots in the plan follow.
        inputs_persist: x and the gradient of out stay as they are until the end of the step, so
            that weight gradients may wait (`kernels.wgrad_queue`). Not with `overlap`, whose
            transfer of the gradient of x they hide, nor with more `experts`, whose gradients are
            sent.

    Returns:
        out_ND in x's dtype, summed in fp32 in the order of k and rounded once; 0 without experts
        and addends. Without `inverse_NK` y_SD in the order of experts; its padding may hold NaN.

    Raises:
        ValueError: unknown backend, or shapes and dtypes that do not fit together; with
            PHALANX_DEBUG=1 also indices of rows that do not exist.
    """
    check(x_ND, weights, plan, spec.activation.facts.halves, more=experts.has_more)
    if overlap is not None and not spec.facts.waits_for_rows:
        raise ValueError(f"overlap: only the fused kernels wait for rows, not {spec.backend}")
    if experts.has_more and not spec.facts.replicates:
        raise ValueError(
            f"kernels={spec.backend} has no expert replication: set "
            "parallel.expert_replication=0 or kernels=torch"
        )
    if addends and (overlap is not None or plan.inverse_NK is None):
        raise ValueError("addends: only for sums over experts, not with overlap or in expert order")
    if len(addends) > MOST_ADDENDS:
        raise ValueError(f"addends: at most {MOST_ADDENDS}, not {len(addends)}")
    prob_S = None if overlap is not None else plan.row_prob_S
    if overlap is not None and spec.recipe is not None and fp8_inputs is None:
        raise ValueError("overlap: with a recipe, rows must arrive quantized (fp8_inputs)")
    if fp8_inputs is not None and spec.recipe is None:
        raise ValueError("fp8_inputs: only a recipe takes rows in FP8")
    keep_h = differentiates(x_ND, weights, plan)
    inputs_persist = inputs_persist and overlap is None and not experts.has_more
    args = ExpertMLPArgs(spec, keep_h, overlap, fp8_inputs, on_saved_h, experts, inputs_persist)
    x_ND = x_ND.contiguous() if fp8_inputs is None else x_ND
    addends = [addend.contiguous() for addend in addends]
    return ExpertMLP.apply(x_ND, *weights, prob_S, plan, args, *addends)


def differentiates(x: Tensor, weights: MLPWeights, plan: ExpertPlan) -> bool:
    """True if a backward pass may follow, for which h is saved."""
    tensors = [t for t in (x, *weights, plan.row_prob_S) if t is not None]
    needed = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    return needed or transformed()  # tensors inside of vmap do not say it


def check(
    x: Tensor, weights: MLPWeights, plan: ExpertPlan, halves: int, *, more: bool = False
) -> None:
    """Raise ValueError for shapes and dtypes that do not fit together; `halves`: H / F.

    `more`: the plan has slots for more experts than there are weights.
    """
    w1, w2, b1, b2 = weights
    if x.ndim != 2 or w1.ndim != 3 or w2.ndim != 3:
        raise ValueError(f"expected x [N, D] and weights [L, ., .], got {_shapes(x, w1, w2)}")
    (N, D), (L, _, F) = x.shape, w2.shape
    S = N if plan.row_index_S is None else plan.row_index_S.shape[0]
    K = 0 if plan.inverse_NK is None else plan.inverse_NK.shape[-1]
    H = halves * F
    if plan.row_index_S is not None and plan.inverse_NK is None:
        raise ValueError("a plan with row_index_S needs inverse_NK for gradients")
    expected: list[tuple[str, Tensor | None, tuple[int, ...], torch.dtype]] = [
        ("w1", w1, (L, H, D), x.dtype),
        ("w2", w2, (L, D, F), x.dtype),
        ("b1", b1, (L, H), x.dtype),
        ("b2", b2, (L, D), x.dtype),
        ("row_index", plan.row_index_S, (S,), torch.int32),
        ("row_prob", plan.row_prob_S, (S,), torch.float32),
        ("offsets", plan.offsets, plan.offsets.shape if more else (L + 1,), torch.int32),
        ("inverse", plan.inverse_NK, (N, K), torch.int32),
        ("order", plan.order_L, (plan.offsets.numel() - 1,), torch.int32),
    ]
    for name, tensor, shape, dtype in expected:
        if tensor is not None and (tensor.shape != shape or tensor.dtype != dtype):
            raise ValueError(
                f"{name} must be {dtype} {list(shape)}, not {tensor.dtype} {list(tensor.shape)}"
            )
    if is_debugging():
        check_plan(plan, N)


def _shapes(*tensors: Tensor) -> str:
    return ", ".join(str(list(t.shape)) for t in tensors)
