"""The FP8 recipe over any backend: its GEMMs read operands that were quantized and dequantized.

The dequantized values are exact in bf16 (`kernels.quantize.blocks`), so every product is that of an
FP8 GEMM, and only the order of sums is the backend's. It trains with the recipe on any device, and
is the reference of the fused FP8 kernels. It saves no time.

Shape legend as in `kernels.expert_mlp.backend`.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.backend import (
    Backend,
    HiddenGrads,
    Linear,
    Operand,
    PlanSize,
    Rows,
)
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.main_grad import Buffer
from phalanx.kernels.quantize.blocks import (
    Quantized,
    QuantizedColumns,
    dequantize_columns,
    dequantize_weights,
)
from phalanx.kernels.quantize.fp8_operands import FP8Operands, in_dtype
from phalanx.kernels.quantize.quantize import (
    quantize_columns,
    quantize_rows,
    quantize_weights,
)
from phalanx.kernels.quantize.recipe import FORMATS, Fp8Block


class DelegatingMixin:
    """Operations that a backend with a recipe delegates to one without."""

    _exact: Backend

    def plan(self, topk_idx_NK: Tensor, topk_prob_NK: Tensor, size: PlanSize) -> ExpertPlan:
        return self._exact.plan(topk_idx_NK, topk_prob_NK, size)

    def plan_backward(self, dprob_S: Tensor, inverse_NK: Tensor) -> Tensor:
        return self._exact.plan_backward(dprob_S, inverse_NK)

    def combine(self, y_SD: Tensor, inverse_NK: Tensor, addends: Sequence[Tensor] = ()) -> Tensor:
        return self._exact.combine(y_SD, inverse_NK, addends)


class EmulatedFP8(FP8Operands, DelegatingMixin):
    """`kernels.expert_mlp.backend.Backend` with the recipe, by one without."""

    fuses_gather: ClassVar[bool] = True

    def __init__(self, exact: Backend, recipe: Fp8Block) -> None:
        super().__init__(recipe)
        self._exact, self._grad = exact, FORMATS[recipe.grad_format]

    def _columns(
        self, x_SC: Tensor, plan: ExpertPlan, parts: int, dtype: torch.dtype
    ) -> QuantizedColumns:
        return quantize_columns(x_SC, plan.offsets, self._recipe.wgrad_blocks, parts, dtype)

    def fc1_act(
        self,
        x_ND: Rows,
        fc1: Linear,
        plan: ExpertPlan,
        act: Activation,
        *,
        keep_h: bool = True,
        ready: Tensor | None = None,
    ) -> tuple[Rows | None, Rows]:
        x = in_dtype(Operand(x_ND), fc1.weight_LOI.dtype)
        fc1_ = _through_fp8(fc1)
        h_SH, a_SF = self._exact.fc1_act(x, fc1_, plan, act, keep_h=keep_h, ready=ready)
        if isinstance(h_SH, Tensor) and self._recipe.hidden == "fp8":
            h_SH = quantize_rows(h_SH, fc1.parts)
        return h_SH, self._activations(a_SF, plan)

    def _activations(self, a_SF: Tensor, plan: ExpertPlan) -> Quantized:
        return self.quantize(a_SF)

    def rows(self, a_SI: Rows, linear: Linear, plan: ExpertPlan, *, signal: Any = None) -> Tensor:
        a = in_dtype(Operand(a_SI, parts=linear.parts_in), linear.weight_LOI.dtype)
        return self._exact.rows(a, _through_fp8(linear), plan, signal=signal)

    def fc2_dgrad_dact(
        self,
        dy: Operand,
        fc2: Linear,
        h_SH: Rows,
        plan: ExpertPlan,
        act: Activation,
        *,
        ready: Tensor | None = None,
    ) -> HiddenGrads:
        dtype, parts = fc2.weight_LOI.dtype, act.facts.halves
        dy = dy._replace(matrix=in_dtype(dy, dtype))
        h = in_dtype(Operand(h_SH, parts=parts), dtype)
        hidden = self._exact.fc2_dgrad_dact(dy, _through_fp8(fc2), h, plan, act, ready=ready)
        dh, a = hidden.dh_SH, hidden.a_SF
        dh_rows = self._hidden_gradient(dh, parts, plan)
        if self._recipe.wgrad == "bf16":
            return hidden._replace(dh_SH=dh_rows, dh_columns=dh)
        a_columns = self._columns(a, plan, 1, torch.float8_e4m3fn)
        dh_columns = self._columns(dh, plan, parts, self._grad)
        return hidden._replace(dh_SH=dh_rows, a_SF=a_columns, dh_columns=dh_columns)

    def _hidden_gradient(self, dh_SH: Tensor, parts: int, plan: ExpertPlan) -> Quantized:
        return quantize_rows(dh_SH, parts, self._grad)

    def wgrad(self, d: Operand, v: Operand, plan: ExpertPlan, into: Buffer | None = None) -> Tensor:
        dtype = torch.bfloat16
        d, v = (x._replace(matrix=_dequantized(x, dtype, plan)) for x in (d, v))
        return self._exact.wgrad(d, v, plan, into)

    def bias_grad(
        self, d: Operand, plan: ExpertPlan, *, scale: bool, into: Buffer | None = None
    ) -> Tensor:
        d = d._replace(matrix=in_dtype(d, torch.bfloat16))
        return self._exact.bias_grad(d, plan, scale=scale, into=into)


def _dequantized(x: Operand, dtype: torch.dtype, plan: ExpertPlan) -> Tensor:
    """The values of an operand of weight gradients, in `dtype` if it is in FP8."""
    q = x.matrix
    if not isinstance(q, QuantizedColumns):
        return in_dtype(x, dtype)
    rows = q.data_CT.shape[1]  # no less than expert rows
    return dequantize_columns(q, plan.all_offsets, rows, x.parts).to(dtype)


def _through_fp8(linear: Linear) -> Linear:
    """The layer with weights that were quantized and dequantized."""
    return linear.map_experts(_values)


def _values(linear: Linear) -> Linear:
    if linear.is_transposed:  # blocks are the same of a matrix and of its transpose
        return linear._replace(weight_LOI=_values(linear.transposed).weight_LOI.mT)
    w_LOI = linear.weight_LOI
    values = dequantize_weights(quantize_weights(w_LOI, linear.parts).forward, linear.parts)
    return linear._replace(weight_LOI=values.to(w_LOI.dtype))
