"""Logits of the router in fp32, from bf16 activations and weights without a copy in fp32.

Megatron-Core 0.19.2 writes an fp32 copy of the activations for each of its three GEMMs. A product
of two bf16 numbers is exact in fp32, so on a GPU a GEMM of bf16 operands with an fp32 sum has the
same logits without the copy. Their gradient is fp32 and enters the other two GEMMs as a bf16 number
plus its bf16 remainder, 16 binary digits together; the results are rounded to the 8 of bf16 anyway.

Legend: T tokens, D hidden, E experts.
"""

from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import router_gating_linear
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.kernels.routing.topk_scores import TINY


def gate(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None) -> Tensor:
    """x @ weight^T + bias, bf16 or fp32: logits [T, E] in fp32, or in fp64 of fp64."""
    if x_TD.is_cuda and x_TD.dtype == weight_ED.dtype == torch.bfloat16:
        return Gate.apply(x_TD, weight_ED, bias_E)
    dtype = torch.promote_types(weight_ED.dtype, torch.float32)
    return router_gating_linear(x_TD, weight_ED, bias_E, dtype)


class Gate(torch.autograd.Function):
    """`gate` of bf16 operands."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None) -> Tensor:
        """Logits [T, E], fp32."""
        ctx.save_for_backward(x_TD, weight_ED)
        ctx.bias = bias_E is not None
        logits_TE = product(x_TD, weight_ED.t())
        return logits_TE if bias_E is None else logits_TE.add_(bias_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Gradients of the inputs, in bf16, from the fp32 gradient of the logits."""
        x_TD, weight_ED = ctx.saved_tensors
        both, dbias_E = _split(grad_TE, ctx.bias)
        dx_TD = both @ torch.cat((weight_ED, weight_ED))
        high_ED, low_ED = product(both.t(), x_TD).chunk(2)
        dweight_ED = torch.empty_like(weight_ED)
        torch.add(high_ED, low_ED, out=dweight_ED)
        return dx_TD, dweight_ED, dbias_E


def _split(grad_TE: Tensor, summed: bool) -> tuple[Tensor, Tensor | None]:
    """bf16 numbers and their bf16 remainders [T, 2 E], and the sum over tokens if `summed`."""
    if grad_TE.is_cuda:
        from phalanx.kernels.routing.forced_triton import split

        return split(grad_TE.contiguous(), torch.bfloat16 if summed else None)
    high_TE = grad_TE.bfloat16()
    both = torch.cat((high_TE, (grad_TE - high_TE).bfloat16()), 1)
    return both, grad_TE.sum(0).bfloat16() if summed else None


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of bf16 matrices on a GPU, with an fp32 sum and result."""
    return torch.mm(a, b, out_dtype=torch.float32)


def loss_scores(logits_TE: Tensor, score: str) -> Tensor:
    """Scores [T, E] for the balancing losses, which sum to 1 for every token."""
    if score == "softmax":
        return logits_TE.softmax(-1)
    score_TE = logits_TE.sigmoid()
    return score_TE / (score_TE.sum(-1, keepdim=True) + TINY)
