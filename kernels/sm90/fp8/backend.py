"""The fused kernels in FP8 as a backend of the expert MLP.

An adapter, as `kernels.sm90.experts.backend` is, whose plan, its backward and the sum of a token's
experts it shares. Compared with `kernels.quantize.emulated_fp8` operands of weight gradients are
transposed from rows in FP8, not quantised a second time from bf16: the same values but where the
smallest of a block underflow (`kernels.quantize.quantize.transpose_rows`).

Shape legend as in `kernels.expert_mlp.backend`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from phalanx.kernels.expert_mlp.backend import HiddenGrads
from phalanx.kernels.expert_mlp.calls import (
    Fc1Call,
    Fc2DgradCall,
    Linear,
    Operand,
    Rows,
    RowsCall,
    WgradCall,
)
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.quantize.blocks import Quantized
from phalanx.kernels.quantize.emulated_fp8 import EmulatedFP8
from phalanx.kernels.quantize.fp8_copies import weight_copies
from phalanx.kernels.quantize.fp8_operands import FP8Operands, in_dtype
from phalanx.kernels.quantize.quantize import (
    column_offsets,
    empty_transpose,
    quantize_rows,
    transpose_rows,
)
from phalanx.kernels.quantize.recipe import Fp8Block
from phalanx.kernels.sm90.experts.backend import Fused


class FusedFP8(FP8Operands, Fused):
    """`kernels.expert_mlp.backend.Backend` on Hopper, in FP8.

    Args:
        sm_margin: as for `Fused`.
        recipe: with weight gradients in bf16, kernels in bf16 compute their operands from values
            that went through FP8: exact, for comparison, and slow.
        keep: FP8 copies of weights stay with them (`kernels.quantize.fp8_copies`).
    """

    def __init__(self, sm_margin: int, recipe: Fp8Block, keep: bool) -> None:
        FP8Operands.__init__(self, recipe)
        Fused.__init__(self, sm_margin)
        self._keep = keep
        self._launch_options: dict[str, Any] = dict(sm_margin=sm_margin)
        self._emulated = EmulatedFP8(Fused(sm_margin), recipe)

    def fc1_act(self, call: Fc1Call) -> tuple[Rows | None, Rows]:
        from phalanx.kernels.sm90.fp8.fc1_act import fp8_fc1_act

        out, plan = None, call.plan
        for layer, part in call.fc1.expert_groups(plan):
            out = fp8_fc1_act(
                call.x_ND,
                self._weights(layer),
                part.offsets,
                call.act,
                index_S=plan.row_index_S,
                prob_S=plan.row_prob_S,
                bias_LH=layer.bias_LO,
                keep_h=call.keep_h,
                ready=None if part.of_replicas else call.ready,
                out=out,
                **self._launch_options,
            )
        assert out is not None
        h_SH, a = out
        if h_SH is not None and self._recipe.hidden == "fp8":
            return quantize_rows(h_SH, call.fc1.parts), a
        return h_SH, a

    def rows(self, call: RowsCall) -> Tensor:
        return self._rows(call)

    def _rows(self, call: RowsCall, *, free: int = 0) -> Tensor:
        """`rows`, leaving `free` more SMs to others."""
        from phalanx.kernels.sm90.fp8.grouped_gemm import fp8_grouped_gemm

        y_SO, scale_S = None, self._scale_of_bias(call.linear, call.plan, call.a_SI.data)
        for layer, part in call.linear.expert_groups(call.plan):
            y_SO = fp8_grouped_gemm(
                call.a_SI,
                self._weights(layer),
                part.offsets,
                parts=layer.parts_in,
                bias_LN=layer.bias_LO,
                scale_S=scale_S,
                out_SN=y_SO,
                signal=None if part.of_replicas else call.signal,
                **self._launch_options | dict(sm_margin=self._sm_margin + free),
            )
        assert y_SO is not None
        return y_SO

    def fc2_dgrad_dact(self, call: Fc2DgradCall) -> HiddenGrads:
        from phalanx.kernels.sm90.fp8.fc2_dgrad_dact import fp8_fc2_dgrad_dact

        if self._recipe.wgrad == "bf16":
            return self._emulated.fc2_dgrad_dact(call)
        dy, plan, act = call.dy, call.plan, call.act
        h_SH = self._in_bf16(Operand(call.h_SH, parts=act.facts.halves))
        index_S = plan.row_index_S if dy.gather else None
        out = None
        for layer, part in call.fc2.transposed.expert_groups(plan):
            out = fp8_fc2_dgrad_dact(
                dy.matrix,
                self._weights(layer),
                h_SH,
                part.offsets,
                act,
                index_S=index_S,
                prob_S=plan.row_prob_S,
                ready=None if part.of_replicas else call.ready,
                out=out,
                **self._launch_options,
            )
        assert out is not None
        dh, a, partial_CS = out
        return HiddenGrads(dh, a, self._dprob(partial_CS, dy, call.fc2, plan), None)

    def rows_and_columns(
        self, call: RowsCall | None, plan: ExpertPlan, operands: Sequence[Operand]
    ) -> tuple[Tensor | None, list[Operand]]:
        from phalanx.kernels.sm90.fp8.transpose_overlap import overlap_transposes

        quantized = [i for i, x in enumerate(operands) if isinstance(x.matrix, Quantized)]
        # SMs of a margin belong to exchanges, which transposes would hold up.
        if call is None or self._sm_margin or self._recipe.wgrad == "bf16" or not quantized:
            return super().rows_and_columns(call, plan, operands)
        columns, transposes, moved_bytes = list(operands), [], 0
        for i in quantized:
            kwargs = self._transpose(operands[i], plan)
            out = empty_transpose(**kwargs)
            columns[i] = Operand(out, parts=operands[i].parts)
            transposes.append(partial(transpose_rows, **kwargs, out=out))
            moved_bytes += 2 * out.data_CT.numel()
        y_SO = overlap_transposes(
            lambda free: self._rows(call, free=free),
            2.0 * len(call.a_SI.data) * call.linear.weight_LOI[0].numel(),
            transposes,
            moved_bytes,
            call.a_SI.data.device,
        )
        return y_SO, columns

    def wgrad(self, call: WgradCall) -> Tensor:
        from phalanx.kernels.sm90.fp8.wgrad import fp8_wgrad

        if self._recipe.wgrad == "bf16":
            return self._emulated.wgrad(call)
        d, plan, into = call.d, call.plan, call.into
        return fp8_wgrad(
            d.matrix,
            call.v.matrix,
            plan.relocated(column_offsets).offsets,
            parts=d.parts,
            out_LOI=None if into is None else into.out,
            accumulate=into is not None and into.add,
            zeros=into is None or into.zeros,
            order_L=plan.order_L,
            **self._launch_options,
        )

    def _weights(self, linear: Linear) -> Quantized:
        copies = weight_copies(linear, keep=self._keep)
        return (
            Quantized(copies.data_LIO, copies.scale.mT) if linear.is_transposed else copies.forward
        )

    def _in_bf16(self, x: Operand) -> Tensor:
        values: Tensor = in_dtype(x, torch.bfloat16)
        return values
