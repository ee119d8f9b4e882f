"""Plain torch in fp32 (fp64 for fp64 inputs), one expert at a time: the oracle of the expert MLP.

Reads the offsets on the host and is slow; runs any size and dtype on any device. Results are
rounded to the input's dtype exactly where `kernels.expert_mlp.backend` says so, and padding rows
are NaN, so that tests detect a consumer that reads them.
"""

import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels.elementwise.sums import plus
from phalanx.kernels.expert_mlp.activation import Activation, formula
from phalanx.kernels.expert_mlp.backend import HiddenGrads, Options, UnquantizedMixin, put
from phalanx.kernels.expert_mlp.calls import (
    BiasGradCall,
    Fc1Call,
    Fc2DgradCall,
    Linear,
    Operand,
    RowsCall,
    WgradCall,
)
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan, PlanSize, gather_pairs, sort_pairs
from phalanx.kernels.expert_mlp.main_grad import Buffer


def activation(h: Tensor, act: Activation) -> Tensor:
    """Definition of every activation: [..., H] -> [..., F] in the dtype of h."""
    gate, up = h.chunk(2, -1) if act.gated else (h, None)
    if act.limit:
        gate = gate.clamp(max=act.limit)
        up = None if up is None else up.clamp(-act.limit, act.limit)
    value = _value(gate, act)
    return value if up is None else value * (up + act.offset)


def activation_backward(dvalue: Tensor, h: Tensor, act: Activation) -> Tensor:
    """Gradient of h, [..., H] in its dtype, from that of `activation(h, act)`."""
    gate, up = h.chunk(2, -1) if act.gated else (h, None)
    gate_passes = up_passes = torch.ones((), dtype=torch.bool, device=h.device)
    if act.limit:  # a clamp passes the gradient up to and with its limit
        gate_passes, gate = gate <= act.limit, gate.clamp(max=act.limit)
        if up is not None:
            up_passes, up = up.abs() <= act.limit, up.clamp(-act.limit, act.limit)
    scaled = dvalue if up is None else dvalue * (up + act.offset)
    dgate = torch.where(gate_passes, _value_backward(scaled, gate, act), 0.0)
    if up is None:
        return dgate
    dup = torch.where(up_passes, dvalue * _value(gate, act), 0.0)
    return torch.cat((dgate, dup), -1)


def _value(gate: Tensor, act: Activation) -> Tensor:
    name = act.facts.torch
    return getattr(F, name)(gate) if name else formula(act).value(gate, act)


def _value_backward(grad: Tensor, gate: Tensor, act: Activation) -> Tensor:
    name = act.facts.torch
    if name:
        return getattr(torch.ops.aten, f"{name}_backward")(grad, gate)
    return grad * formula(act).slope(gate, act)


def reference(options: Options) -> "Reference":
    """The backend `reference` of `configs.tables.backends`, which has no options."""
    return Reference()


class Reference(UnquantizedMixin):
    """`kernels.expert_mlp.backend.Backend` by loops over experts."""

    fuses_gather: ClassVar[bool] = True

    def plan(self, topk_idx_NK: Tensor, topk_prob_NK: Tensor, size: PlanSize) -> ExpertPlan:
        return sort_pairs(topk_idx_NK, topk_prob_NK, size)

    def plan_backward(self, dprob_S: Tensor, inverse_NK: Tensor) -> Tensor:
        return gather_pairs(dprob_S, inverse_NK)

    def fc1_act(self, call: Fc1Call) -> tuple[Tensor | None, Tensor]:
        x_ND, fc1, plan, act = call.x_ND, call.fc1, call.plan, call.act
        S, width = _count(x_ND, plan), fc1.weight_LOI.shape[1]
        h_SH = _padding(x_ND, S, width)
        a_SF = _padding(x_ND, S, width // 2 if act.gated else width)
        for e, span in enumerate(_spans(plan.offsets)):
            w1_HD, b1_LH = fc1.weight_LOI[e], fc1.bias_LO
            h = (
                _at_least_fp32(_expert_rows(Operand(x_ND, gather=True), plan, span))
                @ _at_least_fp32(w1_HD).T
            )
            h = h * _alpha(fc1, e)
            h_SH[span] = (h if b1_LH is None else h + _at_least_fp32(b1_LH[e])).to(x_ND.dtype)
            a_SF[span] = (activation(_at_least_fp32(h_SH[span]), act) * _prob(plan, span)).to(
                x_ND.dtype
            )
        return h_SH if call.keep_h else None, a_SF

    def rows(self, call: RowsCall) -> Tensor:
        a_SI, linear, plan = call.a_SI, call.linear, call.plan
        y_SO = _padding(a_SI, a_SI.shape[0], linear.weight_LOI.shape[1])
        for e, span in enumerate(_spans(plan.offsets)):
            y = (
                _at_least_fp32(a_SI[span])
                @ _at_least_fp32(linear.weight_LOI[e]).T
                * _alpha(linear, e)
            )
            if linear.bias_LO is not None:
                y = y + _at_least_fp32(linear.bias_LO[e]) * _prob(plan, span)
            y_SO[span] = y.to(a_SI.dtype)
        return y_SO

    def fc2_dgrad_dact(self, call: Fc2DgradCall) -> HiddenGrads:
        dy, fc2, h_SH = call.dy, call.fc2, call.h_SH
        plan, act = call.plan, call.act
        S, ffn, dtype = h_SH.shape[0], fc2.weight_LOI.shape[2], dy.matrix.dtype
        dh_SH, a_SF = _padding(dy.matrix, S, h_SH.shape[1]), _padding(dy.matrix, S, ffn)
        dprob_S = None if plan.row_prob_S is None else torch.zeros_like(plan.row_prob_S)
        for e, span in enumerate(_spans(plan.offsets)):
            dy_SD, w2_DF, b2_LD = (
                _at_least_fp32(_expert_rows(dy, plan, span)),
                fc2.weight_LOI[e],
                fc2.bias_LO,
            )
            h, dvalue = (
                _at_least_fp32(h_SH[span]),
                dy_SD @ _at_least_fp32(w2_DF) * _alpha(fc2, e),
            )
            value, prob = activation(h, act), _prob(plan, span)
            dh_SH[span] = activation_backward(dvalue * prob, h, act).to(dtype)
            a_SF[span] = (value * prob).to(dtype)
            if dprob_S is not None:
                dprob = (dvalue * value).sum(1)
                dprob_S[span] = dprob if b2_LD is None else dprob + dy_SD @ _at_least_fp32(b2_LD[e])
        return HiddenGrads(dh_SH, a_SF, dprob_S, None)

    def wgrad(self, call: WgradCall) -> Tensor:
        return self._sums(call)

    def wgrad_pair(self, first: WgradCall, second: WgradCall) -> Tensor:
        return self._sums(first, second)

    def _sums(self, *calls: WgradCall) -> Tensor:
        d, v, plan, into = calls[0]
        if into is None:
            shape = (plan.offsets.shape[0] - 1, d.matrix.shape[1], v.matrix.shape[1])
            into = Buffer(d.matrix.new_empty(shape), add=False)
        out, spans = into.out, [_spans(call.plan.offsets) for call in calls]
        for e, of_calls in enumerate(zip(*spans, strict=True)):
            dw_OI: Any = 0
            for call, span in zip(calls, of_calls, strict=True):
                d_SO, v_SI = (
                    _at_least_fp32(_expert_rows(x, call.plan, span)) for x in (call.d, call.v)
                )
                dw_OI = dw_OI + d_SO.T @ v_SI
            out[e] = (out[e] + dw_OI if into.add else dw_OI).to(out.dtype)
        return out

    def bias_grad(self, call: BiasGradCall) -> Tensor:
        d, plan = call.d, call.plan
        db_LO = _at_least_fp32(d.matrix.new_zeros(plan.offsets.shape[0] - 1, d.matrix.shape[1]))
        for e, span in enumerate(_spans(plan.offsets)):
            d_SO = _at_least_fp32(_expert_rows(d, plan, span))
            db_LO[e] = (d_SO * _prob(plan, span) if call.scale else d_SO).sum(0)
        return put(db_LO, call.into)

    def combine(self, y_SD: Tensor, inverse_NK: Tensor, addends: Sequence[Tensor] = ()) -> Tensor:
        out_ND = _at_least_fp32(y_SD.new_zeros(inverse_NK.shape[0], y_SD.shape[1]))
        for row_N in inverse_NK.unbind(1):
            local = (row_N >= 0).nonzero().squeeze(1)
            out_ND[local] += _at_least_fp32(y_SD.index_select(0, row_N[local]))
        return plus(out_ND.to(y_SD.dtype), addends)


def _at_least_fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _count(x_ND: Tensor, plan: ExpertPlan) -> int:
    return x_ND.shape[0] if plan.row_index_S is None else plan.row_index_S.shape[0]


def _expert_rows(x: Operand, plan: ExpertPlan, span: slice) -> Tensor:
    rows: Tensor = x.matrix
    if x.gather and plan.row_index_S is not None:
        return rows.index_select(0, plan.row_index_S[span])
    return rows[span]


def _prob(plan: ExpertPlan, span: slice) -> Tensor | float:
    return 1.0 if plan.row_prob_S is None else plan.row_prob_S[span, None]


def _alpha(linear: Linear, expert: int) -> Tensor | float:
    return 1.0 if linear.alpha_L is None else linear.alpha_L[expert]


def _padding(like: Tensor, rows: int, columns: int) -> Tensor:
    return like.new_full((rows, columns), float("nan"))


def _spans(offsets: Tensor) -> list[slice]:
    ends = offsets.tolist()
    return [slice(begin, end) for begin, end in itertools.pairwise(ends)]
