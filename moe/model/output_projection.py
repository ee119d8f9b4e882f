"""The projection after attention, whose GEMM adds the bias if there is one (GPT-OSS).

Megatron-Core 0.19.2 adds the bias in a separate operation, which reads and writes all tokens once
more. cuBLASLt adds it while it writes the product (torch.addmm), rounding once.

Legend: T tokens, I channels of all heads, D hidden.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import RowParallelLinear
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.kernels.expert_mlp import main_grad
from phalanx.kernels.expert_mlp.dense_linear import dense_linear
from phalanx.parallel.megatron.recipe_linear import computes_by
from phalanx.parallel.megatron.weight_grad import accumulate


class OutputProjection(RowParallelLinear):
    """Megatron-Core's RowParallelLinear with the bias inside the GEMM, on one tensor parallel GPU.

    On a CPU it has Megatron-Core's bits, and with several tensor parallel ranks the bias is added
    after their sum.
    """

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Output [s, B, D] of [s, B, I], and the bias if it has yet to be added."""
        if self.bias is None or not input_.is_cuda or self.tp_group.size() > 1:
            out, bias = super().forward(input_)
            return out, bias
        x_TI, spec = input_.flatten(0, -2), computes_by(self)
        if spec is not None:
            out_TD = dense_linear(x_TI, self.weight, self.bias, spec)
        else:
            fuses = self.gradient_accumulation_fusion
            out_TD = _Biased.apply(x_TI, self.weight, self.bias, fuses)
        return out_TD.view(*input_.shape[:-1], -1), None


class _Biased(torch.autograd.Function):
    """x @ w^T + b; the gradient of w is added to its buffer, if there is one."""

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, w_DI: Tensor, b_D: Tensor, accumulate: bool) -> Tensor:
        ctx.save_for_backward(x_TI, w_DI)
        ctx.accumulated = w_DI if accumulate and main_grad.takes(w_DI) else None
        return torch.addmm(b_D, x_TI, w_DI.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, w_DI = ctx.saved_tensors
        need_x, need_w, need_b, _ = ctx.needs_input_grad
        dx_TI = d_TD @ w_DI if need_x else None
        dw_DI = _weight_grad(ctx.accumulated, d_TD, x_TI) if need_w else None
        return dx_TI, dw_DI, d_TD.sum(0) if need_b else None, None


def _weight_grad(accumulated: Tensor | None, d_TD: Tensor, x_TI: Tensor) -> Tensor | None:
    if accumulated is None:
        return d_TD.t() @ x_TI

    def compute(buffer: main_grad.Buffer) -> None:
        if not buffer.add:
            buffer.out.zero_()
        accumulate(x_TI, d_TD, buffer.out)

    return main_grad.write(accumulated, compute)
