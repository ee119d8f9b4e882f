"""Operands of the FP8 recipe, for emulated and for fused GEMMs."""

from typing import Any

import torch

from phalanx.kernels.expert_mlp.backend import SequentialMixin
from phalanx.kernels.expert_mlp.calls import Operand, Rows
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.quantize.blocks import Quantized, QuantizedColumns
from phalanx.kernels.quantize.quantize import dequantize_rows, quantize_rows, transpose_rows
from phalanx.kernels.quantize.recipe import FORMATS, Fp8Block


class FP8Operands(SequentialMixin):
    """`quantize` and `columns` of a `kernels.expert_mlp.backend.Backend` with the recipe."""

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
        """Arguments of `transpose_rows`."""
        index_S = plan.row_index_S if x.gather else None
        return dict(q=x.matrix, offsets=plan.offsets, index_S=index_S, parts=x.parts)


def in_dtype(x: Operand, dtype: torch.dtype) -> Rows:
    """The values of rows: FP8 rows in `dtype`, others unchanged."""
    rows = x.matrix
    return dequantize_rows(rows, x.parts, dtype) if isinstance(rows, Quantized) else rows
