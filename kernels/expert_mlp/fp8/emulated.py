"""The FP8 recipe over any backend: its GEMMs read operands that were quantized and dequantized.

The dequantized values are exact in bf16 (`kernels.quantize.blocks`), so every product is that of an
FP8 GEMM, and only the order of sums is the backend's. It trains with the recipe on any device, and
is the reference of the fused FP8 kernels. It saves no time.

Shape legend as in `kernels.expert_mlp.backend`.
"""

from typing import ClassVar

import torch
from torch import Tensor

from phalanx.kernels.expert_mlp.backend import Backend, DelegatingMixin, HiddenGrads
from phalanx.kernels.expert_mlp.calls import (
    BiasGradCall,
    Fc1Call,
    Fc2DgradCall,
    Linear,
    Operand,
    Rows,
    RowsCall,
    WgradCall,
)
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.fp8.operands import FP8Operands, in_dtype
from phalanx.kernels.quantize.blocks import (
    Quantized,
    QuantizedColumns,
    dequantize_columns,
    dequantize_weights,
)
from phalanx.kernels.quantize.quantize import (
    quantize_columns,
    quantize_rows,
    quantize_weights,
)
from phalanx.kernels.quantize.recipe import FORMATS, Fp8Block


class EmulatedFP8(FP8Operands, DelegatingMixin):
    """`kernels.expert_mlp.backend.Backend` with the recipe, by one without."""

    fuses_gather: ClassVar[bool] = True

    def __init__(self, inner: Backend, recipe: Fp8Block) -> None:
        super().__init__(recipe)
        self._inner, self._grad = inner, FORMATS[recipe.grad_format]

    def _columns(
        self, x_SC: Tensor, plan: ExpertPlan, parts: int, dtype: torch.dtype
    ) -> QuantizedColumns:
        return quantize_columns(x_SC, plan.offsets, parts, dtype)

    def fc1_act(self, call: Fc1Call) -> tuple[Rows | None, Rows]:
        fc1 = call.fc1
        x_ND = in_dtype(Operand(call.x_ND), fc1.weight_LOI.dtype)
        h_SH, a_SF = self._inner.fc1_act(call._replace(x_ND=x_ND, fc1=_through_fp8(fc1)))
        return h_SH, self._activations(a_SF, call.plan)

    def _activations(self, a_SF: Tensor, plan: ExpertPlan) -> Quantized:
        return self.quantize(a_SF)

    def rows(self, call: RowsCall) -> Tensor:
        linear = call.linear
        a_SI = in_dtype(Operand(call.a_SI, parts=linear.parts_in), linear.weight_LOI.dtype)
        return self._inner.rows(call._replace(a_SI=a_SI, linear=_through_fp8(linear)))

    def fc2_dgrad_dact(self, call: Fc2DgradCall) -> HiddenGrads:
        fc2, plan, parts = call.fc2, call.plan, call.act.facts.halves
        dy = call.dy._replace(matrix=in_dtype(call.dy, fc2.weight_LOI.dtype))
        hidden = self._inner.fc2_dgrad_dact(call._replace(dy=dy, fc2=_through_fp8(fc2)))
        dh, a = hidden.dh_SH, hidden.a_SF
        dh_rows = self._hidden_gradient(dh, parts, plan)
        if self._recipe.wgrad == "bf16":
            return hidden._replace(dh_SH=dh_rows, dh_columns=dh)
        a_columns = self._columns(a, plan, 1, torch.float8_e4m3fn)
        dh_columns = self._columns(dh, plan, parts, self._grad)
        return hidden._replace(dh_SH=dh_rows, a_SF=a_columns, dh_columns=dh_columns)

    def _hidden_gradient(self, dh_SH: Tensor, parts: int, plan: ExpertPlan) -> Quantized:
        return quantize_rows(dh_SH, parts, self._grad)

    def wgrad(self, call: WgradCall) -> Tensor:
        dtype, plan = torch.bfloat16, call.plan
        d, v = (x._replace(matrix=_dequantized(x, dtype, plan)) for x in (call.d, call.v))
        return self._inner.wgrad(call._replace(d=d, v=v))

    def bias_grad(self, call: BiasGradCall) -> Tensor:
        d = call.d._replace(matrix=in_dtype(call.d, torch.bfloat16))
        return self._inner.bias_grad(call._replace(d=d))


def _dequantized(x: Operand, dtype: torch.dtype, plan: ExpertPlan) -> Tensor:
    """The values of an operand of weight gradients, in `dtype` if it is in FP8."""
    q = x.matrix
    if not isinstance(q, QuantizedColumns):
        return in_dtype(x, dtype)
    rows = q.data_CT.shape[1]  # no less than expert rows
    return dequantize_columns(q, plan.all_offsets, rows, x.parts).to(dtype)


def _through_fp8(linear: Linear) -> Linear:
    """The layer with weights that were quantized and dequantized."""
    if linear.is_transposed:  # blocks are the same of a matrix and of its transpose
        return linear._replace(weight_LOI=_through_fp8(linear.transposed).weight_LOI.mT)
    w_LOI = linear.weight_LOI
    values = dequantize_weights(quantize_weights(w_LOI, linear.parts).forward, linear.parts)
    return linear._replace(weight_LOI=values.to(w_LOI.dtype))
