"""Weight gradients of linear layers, added to Megatron-Core's fp32 buffers inside the GEMM.

Megatron-Core asks Apex for this (`fused_weight_gradient_mlp_cuda`); torch can do it too, through
cuBLASLt: bf16 operands, an fp32 result, added to what is there. Without it every micro-batch writes
each gradient in bf16, reads it again and adds it: for an output layer of 200 thousand tokens that
is more traffic than the layer's weights make.
"""

import torch
from torch import Tensor


class Accumulate:
    """Functions that Megatron-Core calls; the names are those of Apex."""

    @staticmethod
    @torch.no_grad()
    def wgrad_gemm_accum_fp32(input_TI: Tensor, grad_TO: Tensor, main_grad_OI: Tensor) -> None:
        """main_grad += grad^T @ input, in fp32."""
        torch.ops.aten.addmm.dtype_out(
            main_grad_OI, grad_TO.t(), input_TI, torch.float32, out=main_grad_OI
        )

    @staticmethod
    @torch.no_grad()
    def wgrad_gemm_accum_fp16(input_TI: Tensor, grad_TO: Tensor, main_grad_OI: Tensor) -> None:
        """The same where gradients are reduced in the dtype of the operands."""
        main_grad_OI.addmm_(grad_TO.t(), input_TI)


def install() -> None:
    """Give Megatron-Core this accumulation where Apex is absent."""
    import megatron.core.tensor_parallel.layers as layers

    if not layers._grad_accum_fusion_available:
        layers.fused_weight_gradient_mlp_cuda = Accumulate
        layers._grad_accum_fusion_available = True
