"""The expert MLP on torch._grouped_mm with offsets on the device: the host reads no row count.

Every GEMM of the layer is one call for all experts; the elementwise work between them is compiled
to one kernel each on CUDA and runs eagerly elsewhere. torch._grouped_mm neither reads nor writes
rows past the last offset; the few sums over rows that are not GEMMs mask them. Bias gradients are
GEMMs too, with a column of ones or of probabilities: deterministic, fp32 inside.

Shape legend as in `kernels.expert_mlp.backend`; C columns of 16 bytes, the narrowest matrix that
the GEMM takes.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from phalanx.kernels.elementwise.sums import plus
from phalanx.kernels.expert_mlp.activation import Activation, Formula, formula
from phalanx.kernels.expert_mlp.backend import HiddenGrads, Options, UnquantizedMixin, put
from phalanx.kernels.expert_mlp.calls import (
    BiasGradCall,
    Fc1Call,
    Fc2DgradCall,
    Operand,
    RowsCall,
    WgradCall,
)
from phalanx.kernels.expert_mlp.expert_plan import (
    ExpertPlan,
    PlanSize,
    gather_pairs,
    gather_rows,
    sort_pairs,
    used_rows,
)


def grouped(options: Options) -> "Grouped":
    """The backend `torch` of `configs.tables.backends`, which has no options."""
    return Grouped()


class Grouped(UnquantizedMixin):
    """`kernels.expert_mlp.backend.Backend` on torch._grouped_mm: bf16, and on a CPU also fp32.

    On a CPU every GEMM is one in fp32, whose result is rounded.
    """

    fuses_gather: ClassVar[bool] = False

    def plan(self, topk_idx_NK: Tensor, topk_prob_NK: Tensor, size: PlanSize) -> ExpertPlan:
        return sort_pairs(topk_idx_NK, topk_prob_NK, size)

    def plan_backward(self, dprob_S: Tensor, inverse_NK: Tensor) -> Tensor:
        return gather_pairs(dprob_S, inverse_NK)

    def fc1_act(self, call: Fc1Call) -> tuple[Tensor | None, Tensor]:
        fc1, plan, act = call.fc1, call.plan, call.act
        w1_LDH, b1_LH = fc1.weight_LOI.transpose(1, 2), fc1.bias_LO
        x_SD = _gather(Operand(call.x_ND, gather=True), plan)
        z_SH = _grouped_mm(x_SD, w1_LDH, plan, fc1.alpha_L)
        expert_S = None if b1_LH is None else expert_of_row(plan.offsets, z_SH)
        biased = (z_SH, b1_LH, expert_S, plan.row_prob_S)
        return as_one_kernel(_bias_act, *biased, act, formula(act))

    def rows(self, call: RowsCall) -> Tensor:
        linear, plan = call.linear, call.plan
        y_SO = _grouped_mm(call.a_SI, linear.weight_LOI.transpose(1, 2), plan, linear.alpha_L)
        if linear.bias_LO is None:
            return y_SO
        expert_S = expert_of_row(plan.offsets, y_SO)
        return as_one_kernel(_scaled_bias, y_SO, linear.bias_LO, expert_S, plan.row_prob_S)

    def fc2_dgrad_dact(self, call: Fc2DgradCall) -> HiddenGrads:
        fc2, h_SH, plan, act = call.fc2, call.h_SH, call.plan, call.act
        dy_SD = _gather(call.dy, plan)
        da_SF = _grouped_mm(dy_SD, fc2.weight_LOI, plan, fc2.alpha_L)
        used_S = used_rows(h_SH, plan.offsets)
        inputs = (da_SF, h_SH, plan.row_prob_S, used_S, act, formula(act))
        if fc2.bias_LO is None or plan.row_prob_S is None:
            grads = as_one_kernel(_act_backward, *inputs)
        else:
            expert_S = expert_of_row(plan.offsets, h_SH)
            grads = as_one_kernel(_act_backward, *inputs, dy_SD, fc2.bias_LO, expert_S)
        dh_SH, a_SF, dprob_S = grads
        return HiddenGrads(dh_SH, a_SF, dprob_S, None)

    def wgrad(self, call: WgradCall) -> Tensor:
        plan = call.plan
        return put(_grouped_mm(_gather(call.d, plan).T, _gather(call.v, plan), plan), call.into)

    def bias_grad(self, call: BiasGradCall) -> Tensor:
        plan = call.plan
        d_SO = _gather(call.d, plan)
        columns = 16 // d_SO.element_size()
        if call.scale and plan.row_prob_S is not None:
            terms_SC = _exact_columns(plan.row_prob_S, d_SO.dtype, columns)
        else:
            terms_SC = d_SO.new_zeros(d_SO.shape[0], columns)
            terms_SC[:, 0] = 1
        db_LO = _grouped_mm(terms_SC.T, d_SO, plan).sum(1, dtype=torch.float32)
        return put(db_LO, call.into)

    def combine(self, y_SD: Tensor, inverse_NK: Tensor, addends: Sequence[Tensor] = ()) -> Tensor:
        return plus(as_one_kernel(_sum_slots, y_SD, inverse_NK), addends)


def _grouped_mm(a: Tensor, b: Tensor, plan: ExpertPlan, alpha_L: Tensor | None = None) -> Tensor:
    """[S, I] x [L, I, O] -> [S, O] or [O, S] x [S, I] -> [L, O, I]; split along S by the offsets.

    The first is multiplied by an expert's alpha. A weight gradient passes a transposed row-major
    and a row-major matrix, the one pair of layouts for which CUDA takes groups that end anywhere;
    others need multiples of 8 rows. The first group starts at row 0: in the second part of a plan
    it is one of the rows before its own, which is dropped.
    """
    if a.is_cuda and a.dtype != torch.bfloat16:  # torch would copy the offsets to the host
        raise ValueError(
            f"kernels=torch takes bf16 on CUDA, not {a.dtype}: set precision=bf16 or "
            "kernels=reference"
        )
    if not a.numel():
        groups = () if b.ndim == 3 else (plan.offsets.shape[0] - 1,)
        return a.new_zeros(*groups, a.shape[0], b.shape[-1])
    contracts_rows = b.ndim == 2
    ends = plan.offsets if contracts_rows and plan.is_behind else plan.offsets[1:]
    first = len(ends) - (len(plan.offsets) - 1)
    if not a.is_cuda:
        # In bf16 oneDNN would compile a kernel for every new number of rows: 0.5 ms, and 0.6 MB
        # that are never freed. In fp32 MKL has one kernel for all of them.
        a, dtype = a.float(), a.dtype
        few = not contracts_rows and len(a) < len(ends)
        product = _of_few(a, b, ends) if few else torch._grouped_mm(a, b.float(), offs=ends)
        product = product[first:] if contracts_rows else product
        return (product if alpha_L is None else _scaled(product, alpha_L, plan)).to(dtype)
    product = torch._grouped_mm(a, b, offs=ends)
    product = product[first:] if contracts_rows else product
    return product if alpha_L is None else _scaled(product, alpha_L, plan)


def _of_few(a_SI: Tensor, b_LIO: Tensor, ends_L: Tensor) -> Tensor:
    """Rows of few tokens: torch would multiply, and copy, the weights of all experts."""
    product_SO = a_SI.new_zeros(len(a_SI), b_LIO.shape[-1])
    for expert, (begin, end) in enumerate(itertools.pairwise([0, *ends_L.tolist()])):
        if begin < end:
            product_SO[begin:end] = a_SI[begin:end] @ b_LIO[expert].float()
    return product_SO


def _scaled(y_SO: Tensor, alpha_L: Tensor, plan: ExpertPlan) -> Tensor:
    return as_one_kernel(_times_alpha, y_SO, alpha_L, expert_of_row(plan.offsets, y_SO))


def _times_alpha(y_SO: Tensor, alpha_L: Tensor, expert_S: Tensor) -> Tensor:
    return (y_SO.float() * alpha_L.index_select(0, expert_S)[:, None]).to(y_SO.dtype)


def _gather(x: Operand, plan: ExpertPlan) -> Tensor:
    if not x.gather or plan.row_index_S is None:
        return x.matrix
    return gather_rows(x.matrix, plan.row_index_S, plan.offsets)


def expert_of_row(offsets: Tensor, expert_rows: Tensor) -> Tensor:
    """int32 expert of each of the expert rows, of any tensor [S, ...]; any for padding."""
    ends_L = offsets[1:]
    row_S = torch.arange(len(expert_rows), dtype=torch.int32, device=ends_L.device)
    expert_S = torch.searchsorted(ends_L, row_S, right=True, out_int32=True)
    return expert_S.clamp_(max=ends_L.shape[0] - 1)


def _exact_columns(x_S: Tensor, dtype: torch.dtype, columns: int) -> Tensor:
    """Columns in `dtype` whose sum is exactly x: the 24 bits of an fp32 are 3 x 8 of a bf16."""
    parts_SC = torch.zeros(x_S.shape[0], columns, dtype=dtype, device=x_S.device)
    for c in range(1 if dtype == torch.float32 else 3):
        parts_SC[:, c] = x_S
        x_S = x_S - parts_SC[:, c].float()
    return parts_SC


def as_one_kernel(fn: Callable[..., Any], x: Tensor, *args: Any) -> Any:
    """fn(x, *args), compiled on CUDA: C++ for a CPU takes longer to build than it saves."""
    return (_compiled(fn) if x.is_cuda else fn)(x, *args)


@functools.cache
def _compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    # emulate_precision_casts: otherwise inductor drops the rounding of h inside a kernel, and the
    # forward pass's activations would differ from those that the backward pass recomputes.
    # deterministic: otherwise the kernel of a sum is autotuned, and may differ from run to run.
    return torch.compile(fn, options={"emulate_precision_casts": True, "deterministic": True})


def _bias_act(
    z_SH: Tensor,
    b1_LH: Tensor | None,
    expert_S: Tensor | None,
    prob_S: Tensor | None,
    act: Activation,
    functions: Formula,
) -> tuple[Tensor, Tensor]:
    h_SH = z_SH
    if b1_LH is not None and expert_S is not None:
        h_SH = (z_SH.float() + b1_LH.index_select(0, expert_S).float()).to(z_SH.dtype)
    gate, up, _ = _gate_and_up(h_SH.float(), act)
    value = functions.value(gate, act)
    value = value if up is None else value * up
    return h_SH, _times(value, prob_S).to(z_SH.dtype)


def _scaled_bias(y_SO: Tensor, bias_LO: Tensor, expert_S: Tensor, prob_S: Tensor | None) -> Tensor:
    bias_SO = bias_LO.index_select(0, expert_S).float()
    return (y_SO.float() + _times(bias_SO, prob_S)).to(y_SO.dtype)


def _times(value: Tensor, prob_S: Tensor | None) -> Tensor:
    return value if prob_S is None else value * prob_S[:, None]


def _act_backward(
    da_SF: Tensor,
    h_SH: Tensor,
    prob_S: Tensor | None,
    used_S: Tensor,
    act: Activation,
    functions: Formula,
    dy_SD: Tensor | None = None,
    b2_LD: Tensor | None = None,
    expert_S: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    gate, up, inside = _gate_and_up(h_SH.float(), act)
    value, slope = functions.value(gate, act), functions.slope(gate, act)
    da = da_SF.float()
    dv = _times(da, prob_S)
    if up is None:
        dh_SH = dv * slope
    else:
        dh_SH = torch.cat((dv * up * slope, dv * value), -1)
        value = value * up
    if inside is not None:
        dh_SH = torch.where(inside, dh_SH, 0.0)
    a_SF = _times(value, prob_S).to(h_SH.dtype)
    dh_SH = dh_SH.to(h_SH.dtype)
    if prob_S is None:
        return dh_SH, a_SF, None
    dprob_S = (da * value).sum(-1)
    if dy_SD is not None and b2_LD is not None and expert_S is not None:
        dprob_S = dprob_S + (dy_SD.float() * b2_LD.index_select(0, expert_S).float()).sum(-1)
    return dh_SH, a_SF, torch.where(used_S, dprob_S, 0.0)


def _gate_and_up(h: Tensor, act: Activation) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Clamped gate, clamped up channels plus offset, and the mask of the clamp."""
    gate, up = h.chunk(2, -1) if act.gated else (h, None)
    inside = None
    if act.limit:
        inside = gate <= act.limit
        gate = gate.clamp(max=act.limit)
        if up is not None:
            inside = torch.cat((inside, up.abs() <= act.limit), -1)
            up = up.clamp(-act.limit, act.limit)
    return gate, None if up is None else up + act.offset, inside


def _sum_slots(y_SD: Tensor, inverse_NK: Tensor) -> Tensor:
    out_ND = torch.zeros(
        inverse_NK.shape[0], y_SD.shape[1], dtype=torch.float32, device=y_SD.device
    )
    for row_N in inverse_NK.unbind(1):
        picked_ND = y_SD.index_select(0, row_N.clamp(min=0)).float()
        out_ND = out_ND + torch.where(row_N[:, None] >= 0, picked_ND, 0.0)
    return out_ND.to(y_SD.dtype)
