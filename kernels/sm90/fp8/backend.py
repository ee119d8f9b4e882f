"""The fused kernels in FP8 as a backend of the expert MLP.

An adapter, as `kernels.sm90.experts.backend` is, whose plan, its backward and the sum of a token's
experts it shares. Compared with `kernels.expert_mlp.fp8.emulated` operands of weight gradients are
transposed from rows in FP8, not quantised a second time from bf16: the same values but where the
smallest of a block underflow (`kernels.quantize.quantize.transpose_rows`).

Shape legend as in `kernels.expert_mlp.backend`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

from torch import Tensor

from phalanx.kernels.expert_mlp.calls import Linear, Operand, RowsCall, WgradCall
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.fp8.copies import weight_copy
from phalanx.kernels.expert_mlp.fp8.operands import FP8Operands
from phalanx.kernels.launch_options import LaunchOptions
from phalanx.kernels.quantize.blocks import Quantized
from phalanx.kernels.quantize.quantize import (
    column_offsets,
    empty_transpose,
    transpose_rows,
)
from phalanx.kernels.quantize.recipe import Fp8Block
from phalanx.kernels.sm90.experts.backend import Fused


class FusedFP8(FP8Operands, Fused):
    """`kernels.expert_mlp.backend.BackendOfParts` on Hopper, in FP8.

    Args:
        launch: as for `Fused`.
        recipe: with weight gradients in FP8.
        keep: FP8 copies of weights stay with them (`kernels.expert_mlp.fp8.copies`).
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
