"""Weight gradients of linear layers, added to Megatron-Core's fp32 buffers inside the GEMM.

Megatron-Core asks Apex for this (`fused_weight_gradient_mlp_cuda`); torch can do it too, through
cuBLASLt. Without it every micro-batch writes each gradient in bf16, reads it again and adds it: for
an output layer of 200 thousand tokens more traffic than the layer's weights make.
"""

from functools import partial

import torch
from megatron.core.parallel_state import get_global_memory_buffer
from torch import Tensor

from phalanx.kernels import wgrad_queue


class Accumulate:
    """Functions that Megatron-Core calls; the names are those of Apex."""

    @staticmethod
    def wgrad_gemm_accum_fp32(input_TI: Tensor, grad_TO: Tensor, main_grad_OI: Tensor) -> None:
        if wgrad_queue.delays() and _is_shared(input_TI):
            input_TI = input_TI.clone()
        wgrad_queue.submit(partial(accumulate, input_TI, grad_TO, main_grad_OI))

    wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32  # where reduced in the operands' dtype


@torch.no_grad()
def accumulate(input_TI: Tensor, grad_TO: Tensor, main_grad_OI: Tensor) -> None:
    """main_grad += grad^T @ input, in the dtype of main_grad: fp32, or that of the operands."""
    if main_grad_OI.dtype == torch.float32:
        torch.ops.aten.addmm.dtype_out(
            main_grad_OI, grad_TO.t(), input_TI, torch.float32, out=main_grad_OI
        )
    else:
        main_grad_OI.addmm_(grad_TO.t(), input_TI)


def _is_shared(input_TI: Tensor) -> bool:
    """True of inputs gathered over tensor parallel ranks, in a buffer that other layers take too.

    They are copied: used at once, an output layer that shares its weight with the embedding would
    add to its gradient in another order.
    """
    address = input_TI.untyped_storage().data_ptr()
    buffers = get_global_memory_buffer().buffer.values()
    return any(buffer.untyped_storage().data_ptr() == address for buffer in buffers)


def install() -> None:
    """Give Megatron-Core this accumulation where Apex is absent."""
    import megatron.core.tensor_parallel.layers as layers

    if not layers._grad_accum_fusion_available:
        layers.fused_weight_gradient_mlp_cuda = Accumulate
        layers._grad_accum_fusion_available = True
