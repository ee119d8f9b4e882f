"""The fused kernels in FP8 as a backend of the expert MLP.

An adapter like `kernels.sm90.experts.backend`, from which it has the plan, its backward and the sum
of a token's experts. Compared with `kernels.expert_mlp.emulated_fp8` operands of weight gradients
are transposed from rows in FP8, not quantised a second time from bf16: the same values but where
the smallest of a block underflow (`kernels.quantize.quantize.transpose_rows`).

Shape legend as in `kernels.expert_mlp.backend`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.backend import HiddenGrads, Linear, Operand, Rows
from phalanx.kernels.expert_mlp.emulated_fp8 import EmulatedFP8
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.fp8_operands import FP8Operands, in_dtype
from phalanx.kernels.expert_mlp.main_grad import Buffer
from phalanx.kernels.quantize.blocks import Quantized
from phalanx.kernels.quantize.fp8_copies import weight_copies
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
        sm_margin, dynamic: as for `Fused`.
        recipe: with weight gradients in bf16, kernels in bf16 compute their operands from values
            that went through FP8: exact, for comparison, and slow.
        keep: FP8 copies of weights stay with them (`kernels.quantize.fp8_copies`).
    """

    def __init__(self, sm_margin: int, dynamic: bool, recipe: Fp8Block, keep: bool) -> None:
        FP8Operands.__init__(self, recipe)
        Fused.__init__(self, sm_margin, dynamic)
        self._keep = keep
        self._launch_options: dict[str, Any] = dict(sm_margin=sm_margin, dynamic=dynamic)
        self._emulated = EmulatedFP8(Fused(sm_margin, dynamic), recipe)

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
        from phalanx.kernels.sm90.fp8.fc1_act import fp8_fc1_act

        out = None
        for layer, part in fc1.expert_groups(plan):
            out = fp8_fc1_act(
                x_ND,
                self._weights(layer),
                part.offsets,
                act,
                index_S=plan.row_index_S,
                prob_S=plan.row_prob_S,
                bias_LH=layer.bias_LO,
                keep_h=keep_h,
                ready=None if part.of_replicas else ready,
                out=out,
                **self._launch_options,
            )
        assert out is not None
        h_SH, a = out
        if h_SH is not None and self._recipe.hidden == "fp8":
            return quantize_rows(h_SH, fc1.parts), a
        return h_SH, a

    def rows(self, a_SI: Rows, linear: Linear, plan: ExpertPlan, *, signal: Any = None) -> Tensor:
        return self._rows(a_SI, linear, plan, signal=signal)

    def _rows(
        self, a_SI: Rows, linear: Linear, plan: ExpertPlan, *, signal: Any = None, free: int = 0
    ) -> Tensor:
        """`rows`, leaving `free` more SMs to others."""
        from phalanx.kernels.sm90.fp8.grouped_gemm import fp8_grouped_gemm

        y_SO, scale_S = None, self._scale_of_bias(linear, plan, a_SI.data)
        for layer, part in linear.expert_groups(plan):
            y_SO = fp8_grouped_gemm(
                a_SI,
                self._weights(layer),
                part.offsets,
                parts=layer.parts_in,
                bias_LN=layer.bias_LO,
                scale_S=scale_S,
                out_SN=y_SO,
                signal=None if part.of_replicas else signal,
                **self._launch_options | dict(sm_margin=self._sm_margin + free),
            )
        assert y_SO is not None
        return y_SO

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
        from phalanx.kernels.sm90.fp8.fc2_dgrad_dact import fp8_fc2_dgrad_dact

        if self._recipe.wgrad == "bf16":
            return self._emulated.fc2_dgrad_dact(dy, fc2, h_SH, plan, act, ready=ready)
        parts = act.facts.halves
        h_SH = self._in_bf16(Operand(h_SH, parts=parts))
        index_S = plan.row_index_S if dy.gather else None
        out = None
        for layer, part in fc2.transposed.expert_groups(plan):
            out = fp8_fc2_dgrad_dact(
                dy.matrix,
                self._weights(layer),
                h_SH,
                part.offsets,
                act,
                index_S=index_S,
                prob_S=plan.row_prob_S,
                ready=None if part.of_replicas else ready,
                out=out,
                **self._launch_options,
            )
        assert out is not None
        dh, a, partial_CS = out
        return HiddenGrads(dh, a, self._dprob(partial_CS, dy, fc2, plan), None)

    def rows_and_columns(
        self, a_SI: Rows | None, linear: Linear, plan: ExpertPlan, operands: Sequence[Operand]
    ) -> tuple[Tensor | None, list[Operand]]:
        from phalanx.kernels.sm90.fp8.transpose_overlap import overlap_transposes

        quantized = [i for i, x in enumerate(operands) if isinstance(x.matrix, Quantized)]
        # SMs of a margin belong to exchanges, which transposes would hold up.
        if a_SI is None or self._sm_margin or self._recipe.wgrad == "bf16" or not quantized:
            return super().rows_and_columns(a_SI, linear, plan, operands)
        columns, transposes, moved_bytes = list(operands), [], 0
        for i in quantized:
            kwargs = self._transpose(operands[i], plan)
            out = empty_transpose(**kwargs)
            columns[i] = Operand(out, parts=operands[i].parts)
            transposes.append(partial(transpose_rows, **kwargs, out=out))
            moved_bytes += 2 * out.data_CT.numel()
        y_SO = overlap_transposes(
            lambda free: self._rows(a_SI, linear, plan, free=free),
            2.0 * len(a_SI.data) * linear.weight_LOI[0].numel(),
            transposes,
            moved_bytes,
            a_SI.data.device,
        )
        return y_SO, columns

    def wgrad(self, d: Operand, v: Operand, plan: ExpertPlan, into: Buffer | None = None) -> Tensor:
        from phalanx.kernels.sm90.fp8.wgrad import fp8_wgrad

        if self._recipe.wgrad == "bf16":
            return self._emulated.wgrad(d, v, plan, into)
        return fp8_wgrad(
            d.matrix,
            v.matrix,
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
