"""torchtitan's trainer on a CPU: `torchrun torchtitan_cpu.py` with its arguments.

torchtitan 0.3.0 trains on GPUs alone. This gives it a CPU as its device, with memory statistics,
attention, since FlexAttention has no backward pass on a CPU, and plain sums of FSDP's gradients,
since gloo does not multiply them.

Legend: B batch, N heads, L positions, H head.
"""

import math
import types
from typing import Any

import torch
import torch._utils
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.flex_attention import AuxOutput, create_mask


def attention(
    q_BNLH: Tensor,
    k_BNLH: Tensor,
    v_BNLH: Tensor,
    *,
    block_mask: Any,
    scale: float | None,
    enable_gqa: bool,
    **_: Any,
) -> tuple[Tensor, AuxOutput]:
    """As `torch.nn.attention.flex_attention.flex_attention`, in fp32."""
    B, N, L, H = q_BNLH.shape
    if enable_gqa:
        k_BNLH, v_BNLH = (x.repeat_interleave(N // x.shape[1], 1) for x in (k_BNLH, v_BNLH))
    logits = q_BNLH.float() @ k_BNLH.float().mT * (scale or 1 / math.sqrt(H))
    visible = create_mask(block_mask.mask_mod, B, 1, L, L, device="cpu")
    logits = logits.masked_fill(~visible, -math.inf)
    out = logits.softmax(-1) @ v_BNLH.float()
    return out.type_as(q_BNLH), AuxOutput(lse=logits.logsumexp(-1))


def main() -> None:
    torch._utils._get_available_device_type = lambda: "cpu"
    cpu: Any = torch.cpu
    cpu.current_device = lambda: 0
    cpu.get_device_name = lambda device: "CPU"
    cpu.get_device_properties = lambda device: types.SimpleNamespace(total_memory=1 << 30)
    cpu.empty_cache = cpu.reset_peak_memory_stats = lambda: None
    cpu.memory_stats = lambda device: {}

    from torchtitan import train
    from torchtitan.models.common.attention import FlexAttention

    FlexAttention._compiled_flex_attn = attention
    divided = FSDPModule.set_gradient_divide_factor

    def summed(module: Any, factor: float) -> None:
        module.set_force_sum_reduction_for_comms(True)
        divided(module, factor)

    FSDPModule.set_gradient_divide_factor = summed
    train.main()


if __name__ == "__main__":
    main()
