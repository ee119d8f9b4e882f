"""The FP8 recipe for experts: operands of GEMMs, copies of weights, and an emulation.

The emulation is over any backend, whose GEMMs read operands that were quantized and dequantized.
Their values are exact in bf16 (`kernels.quantize.blocks`), so every product is that of an FP8 GEMM,
and only the order of sums is the backend's. It trains with the recipe on any device, and is the
reference of the fused FP8 kernels. It saves no time.

Copies of weights are made for each use, four times per MLP layer and micro-batch, in the layout
that is read and in memory that is freed right after; or cached on the parameter between two updates
of it, in both layouts, for two bytes per parameter.

Shape legend as in `kernels.expert_mlp.backend`.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from phalanx.kernels.expert_mlp.backend import (
    Backend,
    DelegatingMixin,
    HiddenGrads,
    SequentialMixin,
)
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
from phalanx.kernels.expert_mlp.main_grad import facts_of
from phalanx.kernels.quantize.blocks import (
    Quantized,
    QuantizedColumns,
    QuantizedWeights,
    dequantize_columns,
    dequantize_weights,
)
from phalanx.kernels.quantize.quantize import (
    dequantize_rows,
    quantize_columns,
    quantize_layout,
    quantize_rows,
    quantize_weights,
    transpose_rows,
)
from phalanx.kernels.quantize.recipe import FORMATS, Fp8Block


class FP8Operands(SequentialMixin):
    """`quantize` and `columns` of a `kernels.expert_mlp.backend.Backend`."""

    def __init__(self, recipe: Fp8Block) -> None:
        self._recipe = recipe

    def quantize(self, x: Rows, *, gradient: bool = False) -> Quantized:
        if isinstance(x, Quantized):
            return x
        return quantize_rows(x, dtype=FORMATS[self._recipe.grad_format if gradient else "e4m3"])

    def columns(self, x: Operand, plan: ExpertPlan) -> Operand:
        if isinstance(x.matrix, QuantizedColumns):
            return x
        if self._recipe.wgrad == "bf16":
            return x._replace(matrix=in_dtype(x, torch.bfloat16))
        return Operand(transpose_rows(**self._transpose(x, plan)), parts=x.parts)

    def _transpose(self, x: Operand, plan: ExpertPlan) -> dict[str, Any]:
        index_S = plan.row_index_S if x.gather else None
        return dict(q=x.matrix, offsets=plan.offsets, index_S=index_S, parts=x.parts)


def in_dtype(x: Operand, dtype: torch.dtype) -> Rows:
    """The values of rows: FP8 rows in `dtype`, others unchanged."""
    rows = x.matrix
    return dequantize_rows(rows, x.parts, dtype) if isinstance(rows, Quantized) else rows


def weight_copy(linear: Linear, *, keep: bool) -> Quantized:
    """FP8 weights [L, O, I] with contiguous channels in; `keep` caches until `forget`."""
    stored = linear.transposed if linear.is_transposed else linear
    facts = None if linear.source is None else facts_of(linear.source)
    copies: QuantizedWeights | None = None if facts is None else facts.fp8_copies
    if copies is None:
        if facts is None or not keep:
            transposed = linear.is_transposed
            return quantize_layout(stored.weight_LOI, stored.parts, transposed=transposed)
        facts.fp8_copies = copies = quantize_weights(stored.weight_LOI, stored.parts)
    return copies.transposed if linear.is_transposed else copies.forward


def forget(parameters: Iterable[Tensor]) -> None:
    """Drop the cached copies of parameters, before the first use of updated weights."""
    for parameter in parameters:
        facts_of(parameter).fp8_copies = None


@contextmanager
def within_a_step(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Copies cached before the context are not used in it, and those cached in it end with it.

    They lie between activations of the step. An eager step whose copies lasted until the next one
    would keep the allocator from returning the blocks around them, which a graph cannot use.
    """
    forget(parameters)
    try:
        yield
    finally:
        forget(parameters)


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
    if linear.is_transposed:  # blocks are the same of a matrix and of its transpose
        return linear._replace(weight_LOI=_through_fp8(linear.transposed).weight_LOI.mT)
    w_LOI = linear.weight_LOI
    values = dequantize_weights(quantize_weights(w_LOI, linear.parts).forward, linear.parts)
    return linear._replace(weight_LOI=values.to(w_LOI.dtype))
