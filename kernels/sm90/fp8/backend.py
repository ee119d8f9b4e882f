"""The fused kernels in FP8 as a backend of the expert MLP.

An adapter, as `kernels.sm90.experts.backend` is, whose plan, its backward and the sum of a token's
experts it shares. Compared with `kernels.quantize.emulated_fp8` operands of weight gradients are
transposed from rows in FP8, not quantised a second time from bf16: the same values but where the
smallest of a block underflow (`kernels.quantize.quantize.transpose_rows`).

Shape legend as in `kernels.expert_mlp.backend`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from phalanx.kernels.expert_mlp.backend import HiddenGrads
from phalanx.kernels.expert_mlp.calls import (
    Fc1Call,
    Fc2DgradCall,
    HiddenRows,
    Linear,
    Operand,
    Rows,
    RowsCall,
    WgradCall,
)
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.launch_options import LaunchOptions
from phalanx.kernels.quantize.blocks import Quantized
from phalanx.kernels.quantize.emulated_fp8 import EmulatedFP8
from phalanx.kernels.quantize.fp8_copies import weight_copies
from phalanx.kernels.quantize.fp8_operands import FP8Operands, in_dtype
from phalanx.kernels.quantize.quantize import (
    column_offsets,
    empty_transpose,
    transpose_rows,
)
from phalanx.kernels.quantize.recipe import Fp8Block
from phalanx.kernels.sm90.experts.backend import Fused


class FusedFP8(FP8Operands, Fused):
    """`kernels.replication.backend.BackendOfParts` on Hopper, in FP8.

    Args:
        launch: as for `Fused`.
        recipe: with weight gradients in bf16, kernels in bf16 compute their operands from values
            that went through FP8: exact, for comparison, and slow.
        keep: FP8 copies of weights stay with them (`kernels.quantize.fp8_copies`).
    """

    waits_for_weights: ClassVar[bool] = False
    """They are quantized first."""

    def __init__(self, launch: LaunchOptions, recipe: Fp8Block, keep: bool) -> None:
        FP8Operands.__init__(self, recipe)
        Fused.__init__(self, launch)
        self._keep = keep
        self._emulated = EmulatedFP8(Fused(launch), recipe)

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

        linear = call.linear
        return grouped_gemm(
            call.a_SI,
            self._weights(linear),
            call.plan.offsets,
            parts=linear.parts_in,
            bias_LN=linear.bias_LO,
            scale_S=self._scale_of_bias(linear, call.plan, call.a_SI.data),
            out_SN=call.out,
            signal=call.signal,
            options=self._launch.leaving(call.free_sms),
        )

    def fc2_dgrad_rows(self, call: Fc2DgradCall) -> HiddenRows:
        from phalanx.kernels.sm90.experts.fc2_dgrad_dact import fc2_dgrad_dact

        if self._recipe.wgrad == "bf16":
            return super().fc2_dgrad_rows(self._emulated.dequantized(call))
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
        hidden = super().finish_fc2_dgrad(rows, call)
        return self._emulated.quantized(hidden, call) if self._recipe.wgrad == "bf16" else hidden

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
        if call is None or self._launch.sm_margin or self._recipe.wgrad == "bf16" or not quantized:
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
        from phalanx.kernels.sm90.experts.wgrad import wgrad

        if self._recipe.wgrad == "bf16":
            return self._emulated.wgrad(call)
        plan, into = call.plan, call.into
        return wgrad(
            call.d,
            call.v,
            plan.relocated(column_offsets).offsets,
            out_LOI=None if into is None else into.out,
            accumulate=into is not None and into.add,
            zeros=into is None or into.zeros,
            order_L=plan.order_L,
            options=self._launch,
        )

    def _weights(self, linear: Linear) -> Quantized:
        copies = weight_copies(linear, keep=self._keep)
        return (
            Quantized(copies.data_LIO, copies.scale.mT) if linear.is_transposed else copies.forward
        )

    def _in_bf16(self, x: Operand) -> Tensor:
        values: Tensor = in_dtype(x, torch.bfloat16)
        return values
