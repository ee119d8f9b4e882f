"""The fused kernels of this package as a backend of the expert MLP.

An adapter and nothing more: every operation of `kernels.expert_mlp.backend` calls functions of this
package, imported at their first use.

Shape legend as in `kernels.expert_mlp.backend`; C column tiles of the kernel that wrote partial
sums.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.backend import (
    HiddenGrads,
    Linear,
    Operand,
    PlanSize,
    UnquantizedMixin,
)
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.main_grad import Buffer


class Fused(UnquantizedMixin):
    """`kernels.expert_mlp.backend.Backend` on Hopper, in bf16.

    Args:
        sm_margin: SMs that every GEMM leaves free.
        dynamic: GEMMs claim tiles on the device; otherwise CTA i takes tiles i, i + CTAs, ...
    """

    fuses_gather: ClassVar[bool] = True

    def __init__(self, sm_margin: int, dynamic: bool) -> None:
        self._sm_margin, self._dynamic = sm_margin, dynamic

    def plan(self, topk_idx_NK: Tensor, topk_prob_NK: Tensor, size: PlanSize) -> ExpertPlan:
        from phalanx.kernels.sm90.routing.plan import plan

        return plan(topk_idx_NK, topk_prob_NK, **size._asdict())

    def plan_backward(self, dprob_S: Tensor, inverse_NK: Tensor) -> Tensor:
        from phalanx.kernels.sm90.routing.plan import plan_backward

        return plan_backward(dprob_S, inverse_NK)

    def fc1_act(
        self,
        x_ND: Tensor,
        fc1: Linear,
        plan: ExpertPlan,
        act: Activation,
        *,
        keep_h: bool = True,
        ready: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        from phalanx.kernels.sm90.experts.fc1_act import fc1_act

        out = None
        for layer, part in fc1.expert_groups(plan, kernel_waits=plan.row_index_S is not None):
            out = fc1_act(
                x_ND,
                layer.weight_LOI,
                part.offsets,
                act,
                index_S=plan.row_index_S,
                prob_S=plan.row_prob_S,
                bias_LH=layer.bias_LO,
                keep_h=keep_h,
                ready=layer.ready if part.of_replicas else ready,
                out=out,
                sm_margin=self._sm_margin,
                dynamic=self._dynamic,
            )
        assert out is not None
        return out

    def rows(self, a_SI: Tensor, linear: Linear, plan: ExpertPlan, *, signal: Any = None) -> Tensor:
        from phalanx.kernels.sm90.experts.grouped_gemm import grouped_gemm

        y_SO, scale_S = None, self._scale_of_bias(linear, plan, a_SI)
        for layer, part in linear.expert_groups(plan):
            y_SO = grouped_gemm(
                a_SI,
                layer.weight_LOI,
                part.offsets,
                bias_LN=layer.bias_LO,
                scale_S=scale_S,
                out_SN=y_SO,
                sm_margin=self._sm_margin,
                dynamic=self._dynamic,
                signal=None if part.of_replicas else signal,
            )
        assert y_SO is not None
        return y_SO

    def fc2_dgrad_dact(
        self,
        dy: Operand,
        fc2: Linear,
        h_SH: Tensor,
        plan: ExpertPlan,
        act: Activation,
        *,
        ready: Tensor | None = None,
    ) -> HiddenGrads:
        from phalanx.kernels.sm90.experts.fc2_dgrad_dact import fc2_dgrad_dact

        out, index_S = None, plan.row_index_S if dy.gather else None
        for layer, part in fc2.expert_groups(plan, kernel_waits=index_S is not None):
            out = fc2_dgrad_dact(
                dy.matrix,
                layer.weight_LOI,
                h_SH,
                part.offsets,
                act,
                index_S=index_S,
                prob_S=plan.row_prob_S,
                ready=layer.ready if part.of_replicas else ready,
                out=out,
                sm_margin=self._sm_margin,
                dynamic=self._dynamic,
            )
        assert out is not None
        dh_SH, a_SF, partial_CS = out
        return HiddenGrads(dh_SH, a_SF, self._dprob(partial_CS, dy, fc2, plan), None)

    def wgrad(self, d: Operand, v: Operand, plan: ExpertPlan, into: Buffer | None = None) -> Tensor:
        from phalanx.kernels.sm90.experts.wgrad import wgrad

        return wgrad(
            d.matrix,
            v.matrix,
            plan.offsets,
            d_index_S=plan.row_index_S if d.gather else None,
            v_index_S=plan.row_index_S if v.gather else None,
            out_LOI=None if into is None else into.out,
            accumulate=into is not None and into.add,
            zeros=into is None or into.zeros,
            order_L=plan.order_L,
            sm_margin=self._sm_margin,
            dynamic=self._dynamic,
        )

    def bias_grad(
        self, d: Operand, plan: ExpertPlan, *, scale: bool, into: Buffer | None = None
    ) -> Tensor:
        from phalanx.kernels.sm90.experts.bias_grad import bias_grad

        return bias_grad(
            self._in_bf16(d),
            plan.offsets,
            scale_S=plan.row_prob_S if scale else None,
            index_S=plan.row_index_S if d.gather else None,
            out_LO=None if into is None else into.out,
            dtype=torch.float32,
            accumulate=into is not None and into.add,
            behind=plan.of_replicas,
        )

    def combine(self, y_SD: Tensor, inverse_NK: Tensor, addends: Sequence[Tensor] = ()) -> Tensor:
        from phalanx.kernels.sm90.experts.combine import combine

        return combine(y_SD, inverse_NK, addends=addends)

    def _in_bf16(self, x: Operand) -> Tensor:
        """Rows as kernels in bf16 read them."""
        rows: Tensor = x.matrix
        return rows

    def _scale_of_bias(self, linear: Linear, plan: ExpertPlan, like_S: Tensor) -> Tensor | None:
        """Factor of each expert row's bias, if there is a bias."""
        if linear.bias_LO is None:
            return None
        if plan.row_prob_S is None:
            return torch.ones(like_S.shape[0], device=like_S.device)
        return plan.row_prob_S

    def _dprob(
        self, partial_CS: Tensor | None, dy: Operand, fc2: Linear, plan: ExpertPlan
    ) -> Tensor | None:
        """Gradient of the probabilities from partial sums of the column tiles."""
        from phalanx.kernels.sm90.experts.bias_products_triton import bias_products
        from phalanx.kernels.sm90.experts.dprob import dprob

        if partial_CS is None:
            return None
        table_NL = None
        all_biases_PO = fc2.all_biases_PO
        if all_biases_PO is not None and len(matrix := self._in_bf16(dy)):
            table_NL = bias_products(matrix, all_biases_PO)
        index_S = plan.row_index_S if dy.gather else None
        return dprob(partial_CS, plan.offsets, table_NL=table_NL, index_S=index_S)
