"""MXFP8 and NVFP4 over any backend: its GEMMs read operands that were quantized and dequantized.

Every product is that of a GEMM in the format, and only the order of sums is the backend's: so the
recipes of Blackwell train on any device. It saves neither time nor memory. As blocks lie along the
contraction, every product quantizes its operands from their unquantized values, and inputs and
activations are saved unquantized. Biases and their gradients, and the share of fc2's bias in the
gradient of the probabilities, are computed from unquantized values.

Operands have the values of `extras.microscaling.mxfp8` and `extras.microscaling.nvfp4`, bit for
bit, in their own dtype: bf16 has all of them but its denormal numbers and overflows. Those of NVFP4
are e2m1 * scale; the sum of a product remains to be multiplied by the fp32 scale of each expert's
tensor (`nvfp4.tensor_scale`). Triton kernels on CUDA, the definition itself elsewhere. Nothing is
read on the host.

Shape legend as in `kernels.expert_mlp.backend`; C channels, T rows of columns.
"""

from typing import ClassVar, Literal, NamedTuple, cast

import torch
from torch import Tensor

from phalanx.extras.microscaling import mxfp8, nvfp4
from phalanx.extras.microscaling.nvfp4 import tensor_scale
from phalanx.kernels.expert_mlp.backend import (
    Backend,
    DelegatingMixin,
    HiddenGrads,
    UnquantizedMixin,
    put,
)
from phalanx.kernels.expert_mlp.calls import (
    Fc1Call,
    Fc2DgradCall,
    Linear,
    Operand,
    Rows,
    RowsCall,
    WgradCall,
)
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan, gather_rows, used_rows
from phalanx.kernels.expert_mlp.main_grad import Buffer
from phalanx.kernels.expert_mlp.torch_grouped import expert_of_row
from phalanx.kernels.quantize import blocks
from phalanx.kernels.quantize.recipe import Microscaling

type Format = Literal["mxfp8", "nvfp4"]


class Values(NamedTuple):
    """An operand that was quantized and dequantized."""

    matrix: Tensor
    amax_L: Tensor | None  # fp32 largest magnitude of each expert's tensor; None for MXFP8


@torch.no_grad()
def rows(
    x_SC: Tensor, offsets: Tensor, form: Format, parts: int = 1, *, stochastic: bool = False
) -> Values:
    """Expert rows that are contracted over their channels.

    Args:
        x_SC: bf16 or fp32, contiguous; rows from offsets[L] on are undefined in the result.
        offsets: int32 [L + 1], first row of each expert.
        parts: equal ranges of C whose borders no block crosses.
        stochastic: round NVFP4 stochastically.
    """
    if x_SC.is_cuda:
        from phalanx.extras.microscaling import emulate_gpu

        return Values(*emulate_gpu.rows(x_SC, offsets, form, parts, stochastic=stochastic))
    if form == "mxfp8":
        return Values(mxfp8.dequantize(mxfp8.quantize(x_SC, parts), parts).to(x_SC.dtype), None)
    q = nvfp4.quantize_rows(x_SC, offsets, parts, stochastic=stochastic)
    return Values(nvfp4.values_of_rows(q, parts).to(x_SC.dtype), q.amax)


@torch.no_grad()
def columns(x_SC: Tensor, offsets: Tensor, form: Format, *, stochastic: bool = False) -> Values:
    """Expert rows [T, C] that are contracted over tokens, at `column_offsets`; see `rows`."""
    if x_SC.is_cuda:
        from phalanx.extras.microscaling import emulate_gpu

        return Values(*emulate_gpu.columns(x_SC, offsets, form, stochastic=stochastic))
    if form == "mxfp8":
        values_CT = mxfp8.dequantize(mxfp8.quantize_columns(x_SC, offsets))
        return Values(values_CT.T.to(x_SC.dtype).contiguous(), None)
    q = nvfp4.quantize_columns(x_SC, offsets, stochastic=stochastic)
    return Values(nvfp4.values_of_rows(q).T.to(x_SC.dtype).contiguous(), q.amax)


def column_offsets(offsets: Tensor, form: Format) -> Tensor:
    """int32 [L + 1]: offset of each expert's rows in `columns`."""
    return blocks.column_offsets(offsets, {"mxfp8": mxfp8, "nvfp4": nvfp4}[form].BLOCK)


@torch.no_grad()
def weights(w_LOI: Tensor, form: Format, parts: int = 1, parts_in: int = 1) -> Values:
    """Weights that are contracted over I, contiguous or transposed; parts are as in `rows`."""
    if w_LOI.is_cuda:
        from phalanx.extras.microscaling import emulate_gpu

        return Values(*emulate_gpu.weights(w_LOI, form, parts, parts_in))
    if form == "mxfp8":
        q = mxfp8.quantize(w_LOI, parts_in)
        return Values(mxfp8.dequantize(q, parts_in).to(w_LOI.dtype), None)
    q4 = nvfp4.quantize_weights(w_LOI, parts, parts_in)
    return Values(nvfp4.values_of_weights(q4, parts, parts_in).to(w_LOI.dtype), q4.amax)


class EmulatedMicroscaling(UnquantizedMixin, DelegatingMixin):
    """`kernels.expert_mlp.backend.Backend` with the recipe, by one without."""

    fuses_gather: ClassVar[bool] = False

    def __init__(self, inner: Backend, recipe: Microscaling) -> None:
        self._inner, self._recipe = inner, recipe
        self._format = cast(Format, recipe.format)

    def columns(self, x: Operand, plan: ExpertPlan) -> Operand:
        if self._recipe.wgrad == "bf16" or isinstance(x.matrix, Values):
            return x
        return Operand(self._columns(_gathered(x, plan), plan, x.gradient))

    def fc1_act(self, call: Fc1Call) -> tuple[Rows | None, Rows]:
        x_SD = _gathered(Operand(call.x_ND, gather=True), call.plan)
        x_SD, fc1 = self._operands(x_SD, call.fc1, call.plan, gradient=False)
        plan = call.plan._replace(row_index_S=None)
        return self._inner.fc1_act(call._replace(x_ND=x_SD, fc1=fc1, plan=plan))

    def rows(self, call: RowsCall) -> Tensor:
        linear = call.linear
        a_SI, linear = self._operands(call.a_SI, linear, call.plan, gradient=linear.is_transposed)
        return self._inner.rows(call._replace(a_SI=a_SI, linear=linear))

    def fc2_dgrad_dact(self, call: Fc2DgradCall) -> HiddenGrads:
        fc2, plan = call.fc2, call.plan
        exact_dy_SD = _gathered(call.dy, plan)
        dy_SD, fc2_dgrad = self._operands(exact_dy_SD, fc2.transposed, plan, gradient=True)
        hidden = self._inner.fc2_dgrad_dact(
            call._replace(dy=Operand(dy_SD), fc2=fc2_dgrad.transposed)
        )
        if hidden.dprob_S is not None and fc2.bias_LO is not None:
            bias_SD = fc2.bias_LO.index_select(0, expert_of_row(plan.offsets, exact_dy_SD))
            dprob_S = hidden.dprob_S + (exact_dy_SD.float() * bias_SD.float()).sum(-1)
            dprob_S = torch.where(used_rows(dprob_S, plan.offsets), dprob_S, 0.0)
            hidden = hidden._replace(dprob_S=dprob_S)
        if self._recipe.wgrad == "bf16":
            return hidden._replace(dh_columns=hidden.dh_SH)
        return hidden._replace(
            a_SF=self._columns(hidden.a_SF, plan, gradient=False),
            dh_columns=self._columns(hidden.dh_SH, plan, gradient=True),
        )

    def wgrad(self, call: WgradCall) -> Tensor:
        if self._recipe.wgrad == "bf16":
            return self._inner.wgrad(call)
        d_TO, v_TI = call.d.matrix, call.v.matrix
        plan = call.plan.relocated(lambda offsets: column_offsets(offsets, self._format))
        plan = plan._replace(row_index_S=None)
        exact = WgradCall(Operand(d_TO.matrix), Operand(v_TI.matrix), plan, call.into)
        if d_TO.amax_L is None:
            return self._inner.wgrad(exact)
        shape = (len(plan.offsets) - 1, d_TO.matrix.shape[1], v_TI.matrix.shape[1])
        sums_LOI = Buffer(d_TO.matrix.new_empty(shape, dtype=torch.float32), add=False)
        dw_LOI = self._inner.wgrad(exact._replace(into=sums_LOI))
        scale_L = plan.select(tensor_scale(d_TO.amax_L, v_TI.amax_L))
        dw_LOI.mul_(scale_L[:, None, None])
        return put(dw_LOI.to(d_TO.matrix.dtype) if call.into is None else dw_LOI, call.into)

    def _operands(
        self, x_SI: Tensor, linear: Linear, plan: ExpertPlan, *, gradient: bool
    ) -> tuple[Tensor, Linear]:
        """Both operands quantized and dequantized, the weights with the scale of the product."""
        number_format, parts_in = self._format, linear.parts_in
        random = gradient and self._recipe.stochastic
        x = rows(x_SI, plan.offsets, number_format, parts_in, stochastic=random)
        w = weights(linear.weight_LOI, number_format, linear.parts, parts_in)
        alpha_L = None
        if x.amax_L is not None and w.amax_L is not None:
            alpha_L = tensor_scale(x.amax_L, w.amax_L)
        return x.matrix, linear._replace(weight_LOI=w.matrix, alpha_L=alpha_L)

    def _columns(self, x_SC: Tensor, plan: ExpertPlan, gradient: bool) -> Values:
        random = gradient and self._recipe.stochastic
        return columns(x_SC, plan.offsets, self._format, stochastic=random)


def _gathered(x: Operand, plan: ExpertPlan) -> Tensor:
    if not x.gather or plan.row_index_S is None:
        return x.matrix
    return gather_rows(x.matrix, plan.row_index_S, plan.offsets)
