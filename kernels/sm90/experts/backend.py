"""The fused kernels of this package as a backend of the expert MLP, in bf16 and in FP8.

An adapter: every operation of `kernels.expert_mlp.backend` calls functions of this package,
imported at their first use.

Shape legend as in `kernels.expert_mlp.backend`; C column tiles of the kernel that wrote partial
sums.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from phalanx.kernels.expert_mlp.backend import (
    BackendOfParts,
    HiddenGrads,
    Options,
    UnquantizedMixin,
)
from phalanx.kernels.expert_mlp.calls import (
    BiasGradCall,
    Fc1Call,
    Fc2DgradCall,
    HiddenRows,
    Linear,
    Operand,
    Rows,
    RowsCall,
    WgradCall,
    tensors_of,
)
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan, PlanSize
from phalanx.kernels.expert_mlp.fp8 import FP8Operands, weight_copy
from phalanx.kernels.launch_options import LaunchOptions
from phalanx.kernels.quantize.blocks import Quantized
from phalanx.kernels.quantize.quantize import (
    column_offsets,
    empty_transpose,
    transpose_rows,
)
from phalanx.kernels.quantize.recipe import Fp8Block
from phalanx.kernels.sm90.jit.stand_ins import import_kernels


class Fused(UnquantizedMixin):
    """`kernels.expert_mlp.backend.BackendOfParts` on Hopper, in bf16."""

    fuses_gather: ClassVar[bool] = True
    writes_into_out: ClassVar[bool] = True
    waits_for_weights: ClassVar[bool] = True

    def __init__(self, launch: LaunchOptions) -> None:
        self._launch = launch

    def plan(self, topk_idx_NK: Tensor, topk_prob_NK: Tensor, size: PlanSize) -> ExpertPlan:
        from phalanx.kernels.sm90.routing.plan import plan

        return plan(topk_idx_NK, topk_prob_NK, **size._asdict())

    def plan_backward(self, dprob_S: Tensor, inverse_NK: Tensor) -> Tensor:
        from phalanx.kernels.sm90.routing.plan import plan_backward

        return plan_backward(dprob_S, inverse_NK)

    def fc1_act(self, call: Fc1Call) -> tuple[Rows | None, Rows]:
        from phalanx.kernels.sm90.experts.fc1_act import fc1_act

        plan = call.plan
        return fc1_act(
            call.x_ND,
            self._weights(call.fc1),
            plan.offsets,
            call.act,
            index_S=plan.row_index_S,
            prob_S=plan.row_prob_S,
            bias_LH=call.fc1.bias_LO,
            keep_h=call.keep_h,
            ready=call.ready,
            out=call.out,
            options=self._launch,
        )

    def rows(self, call: RowsCall) -> Tensor:
        from phalanx.kernels.sm90.experts.grouped_gemm import grouped_gemm

        linear, weights = call.linear, self._weights(call.linear)
        return grouped_gemm(
            call.a_SI,
            weights,
            call.plan.offsets,
            parts=linear.parts_in if isinstance(weights, Quantized) else 1,
            bias_LN=linear.bias_LO,
            scale_S=self._scale_of_bias(linear, call.plan, tensors_of(call.a_SI)[0]),
            out_SN=call.out,
            options=self._launch.leaving(call.free_sms),
            signal=call.signal,
        )

    def fc2_dgrad_dact(self, call: Fc2DgradCall) -> HiddenGrads:
        return self.finish_fc2_dgrad(self.fc2_dgrad_rows(call), call)

    def fc2_dgrad_rows(self, call: Fc2DgradCall) -> HiddenRows:
        from phalanx.kernels.sm90.experts.fc2_dgrad_dact import fc2_dgrad_dact

        dy, plan = call.dy, call.plan
        return fc2_dgrad_dact(
            dy.matrix,
            self._weights(call.fc2.transposed),
            call.h_SH,
            plan.offsets,
            call.act,
            index_S=plan.row_index_S if dy.gather else None,
            prob_S=plan.row_prob_S,
            ready=call.ready,
            out=call.out,
            options=self._launch,
        )

    def finish_fc2_dgrad(self, rows: HiddenRows, call: Fc2DgradCall) -> HiddenGrads:
        dh_SH, a_SF, partial_CS = rows
        dprob_S = self._dprob(partial_CS, call.dy, call.fc2.bias_LO, call.plan)
        return HiddenGrads(dh_SH, a_SF, dprob_S, None)

    def wgrad(self, call: WgradCall) -> Tensor:
        from phalanx.kernels.sm90.wgrad.wgrad import wgrad

        (d, v, offsets, index_S), into = call.rows, call.into
        return wgrad(
            d,
            v,
            offsets,
            index_S=index_S,
            out_LOI=None if into is None else into.out,
            accumulate=into is not None and into.add,
            zeros=into is None or into.zeros,
            order_L=call.plan.order_L,
            options=self._launch,
        )

    def wgrad_pair(self, first: WgradCall, second: WgradCall) -> Tensor:
        from phalanx.kernels.sm90.wgrad.wgrad import wgrad_pair

        into = first.into
        assert into is not None
        return wgrad_pair(
            first.rows,
            second.rows,
            into.out,
            accumulate=into.add,
            zeros=into.zeros,
            order_L=first.plan.order_L,
            options=self._launch,
        )

    def bias_grad(self, call: BiasGradCall) -> Tensor:
        from phalanx.kernels.sm90.experts.bias_grad import bias_grad

        d, plan, into = call.d, call.plan, call.into
        return bias_grad(
            d.matrix,
            plan.offsets,
            parts=d.parts,
            scale_S=plan.row_prob_S if call.scale else None,
            index_S=plan.row_index_S if d.gather else None,
            out_LO=None if into is None else into.out,
            dtype=torch.float32,
            accumulate=into is not None and into.add,
            behind=plan.is_behind,
        )

    def combine(self, y_SD: Tensor, inverse_NK: Tensor, addends: Sequence[Tensor] = ()) -> Tensor:
        from phalanx.kernels.sm90.experts.combine import combine

        return combine(y_SD, inverse_NK, addends=addends)

    def _weights(self, linear: Linear) -> Tensor | Quantized:
        return linear.weight_LOI

    def _scale_of_bias(self, linear: Linear, plan: ExpertPlan, like_S: Tensor) -> Tensor | None:
        if linear.bias_LO is None:
            return None
        if plan.row_prob_S is None:
            return torch.ones(like_S.shape[0], device=like_S.device)
        return plan.row_prob_S

    def _dprob(
        self, partial_CS: Tensor | None, dy: Operand, b2_LD: Tensor | None, plan: ExpertPlan
    ) -> Tensor | None:
        from phalanx.kernels.sm90.experts.bias_products_triton import bias_products
        from phalanx.kernels.sm90.experts.fc2_dgrad_dact import dprob

        if partial_CS is None:
            return None
        table_NL = None
        if b2_LD is not None and len(tensors_of(dy.matrix)[0]):
            table_NL = bias_products(dy.matrix, b2_LD)
        index_S = plan.row_index_S if dy.gather else None
        return dprob(partial_CS, plan.offsets, table_NL=table_NL, index_S=index_S)


class FusedFP8(FP8Operands, Fused):
    """`kernels.expert_mlp.backend.BackendOfParts` on Hopper, in FP8.

    Compared with `kernels.expert_mlp.fp8` operands of weight gradients are transposed from rows in
    FP8, not quantised a second time from bf16: the same values but where the smallest of a block
    underflow (`kernels.quantize.quantize.transpose_rows`). With `keep` FP8 copies of weights stay
    with them.
    """

    waits_for_weights: ClassVar[bool] = False  # they are quantized first

    def __init__(self, launch: LaunchOptions, recipe: Fp8Block, keep: bool) -> None:
        FP8Operands.__init__(self, recipe)
        Fused.__init__(self, launch)
        self._keep = keep

    def rows_and_columns(
        self,
        call: RowsCall | None,
        plan: ExpertPlan,
        operands: Sequence[Operand],
        rows: Callable[[RowsCall], Tensor] | None = None,
    ) -> tuple[Tensor | None, list[Operand]]:
        from phalanx.kernels.sm90.fp8.transpose_overlap import overlap_transposes

        quantized = [i for i, x in enumerate(operands) if isinstance(x.matrix, Quantized)]
        # SMs of a margin belong to exchanges, which transposes would hold up.
        if call is None or self._launch.sm_margin or not quantized:
            return super().rows_and_columns(call, plan, operands, rows)
        columns, transposes, moved_bytes = list(operands), [], 0
        for i in quantized:
            kwargs = self._transpose(operands[i], plan)
            out = empty_transpose(**kwargs)
            columns[i] = Operand(out, parts=operands[i].parts)
            transposes.append(partial(transpose_rows, **kwargs, out=out))
            moved_bytes += 2 * out.data_CT.numel()
        y_SO = overlap_transposes(
            lambda free: (rows or self.rows)(call._replace(free_sms=free)),
            2.0 * len(call.a_SI.data) * call.linear.weight_LOI[0].numel(),
            transposes,
            moved_bytes,
            call.a_SI.data.device,
        )
        return y_SO, columns

    def wgrad(self, call: WgradCall) -> Tensor:
        return super().wgrad(_of_columns(call))

    def wgrad_pair(self, first: WgradCall, second: WgradCall) -> Tensor:
        return super().wgrad_pair(_of_columns(first), _of_columns(second))

    def _weights(self, linear: Linear) -> Quantized:
        return weight_copy(linear, keep=self._keep)


def _of_columns(call: WgradCall) -> WgradCall:
    """The call with a plan for the tokens of columns, in whole blocks."""
    return call._replace(plan=call.plan.relocated(column_offsets))


def fused(options: Options) -> BackendOfParts:
    """The fused kernels for Hopper, in bf16 or FP8; a ValueError for other recipes."""
    import_kernels()
    if options.recipe is None:
        return Fused(options.launch)
    if not isinstance(options.recipe, Fp8Block):
        name = options.recipe.format
        raise ValueError(f"kernels.backend=fused has no {name}: use kernels=torch")
    if options.recipe.wgrad == "bf16":
        raise ValueError("kernels.backend=fused has no precision.wgrad=bf16: use kernels=torch")
    return FusedFP8(options.launch, options.recipe, options.keep_fp8)
