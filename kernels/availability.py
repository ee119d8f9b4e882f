"""Predicates of `configs.tables.backends`: why an implementation cannot run here, or None.

They depend on `Facts` alone and import no implementation.
"""

import torch

from phalanx.configs import programs
from phalanx.configs.formats import is_microscaling
from phalanx.configs.tables.activations import ACTIVATIONS
from phalanx.kernels.limits import (
    COMBINE_SLOTS,
    PLAN_EXPERTS,
    Refusal,
    unsupported_heads,
    unsupported_width,
)
from phalanx.kernels.registry import Facts


def always(facts: Facts) -> Refusal:
    """None: it runs everywhere."""
    return None


def te(facts: Facts) -> Refusal:
    """Reason why Transformer Engine cannot run, or None."""
    if facts.device != "cuda":
        return "needs CUDA"
    if "transformer_engine" not in facts.packages:
        return f"needs Transformer Engine: {programs.install('transformer-engine')}"
    return None


def te_experts(facts: Facts) -> Refusal:
    """Reason why Transformer Engine's experts cannot run: always one."""
    return te(facts) or (
        "Transformer Engine's grouped GEMM wants row counts on the host, where this MoE layer "
        "never has them (kernels=megatron runs it)"
    )


def te_attention(facts: Facts) -> Refusal:
    """Reason why Transformer Engine's attention cannot run, or None."""
    if reason := te(facts):
        return reason
    if facts.documents:
        return "has no documents that end inside a sequence here (data.document_mask)"
    if facts.shares_heads:
        return "shares out no heads, as ranks do here that share a sequence (parallel.context)"
    if facts.max_logits and facts.context > 1:
        return "splits sequences where largest logits are not measured (optim.max_logit_every)"
    return None if facts.dtype == torch.bfloat16 else f"needs bf16, not {short(facts.dtype)}"


def _hopper_bf16(facts: Facts) -> Refusal:
    if facts.device != "cuda":
        return "needs CUDA"
    if facts.capability != (9, 0):
        return f"needs CUDA capability 9.0, not {dotted(facts.capability)}"
    if facts.dtype != torch.bfloat16:
        return f"needs bf16, not {short(facts.dtype)}"
    return None


def fa4(facts: Facts) -> Refusal:
    """Reason why flash-attn-4 cannot run, or None."""
    if why := _hopper_bf16(facts):
        return why
    if facts.head_dim and (why := unsupported_heads(facts.head_dim, facts.v_dim)):
        return why
    if facts.documents and facts.context > 1:
        return "has no documents in sequences whose keys ranks gather (parallel.context)"
    if "flash_attn_4" not in facts.packages:
        return f"needs flash-attn-4: pip install {FLASH_ATTN}"
    return None


FLASH_ATTN = "flash-attn-4==4.0.0b36 quack-kernels==0.6.5"
"""Requirement of `kernels.core_attention.fa4` and `kernels.rms_norm.quack` for pip."""


def quack(facts: Facts) -> Refusal:
    """Reason why QuACK cannot run, or None."""
    if why := _hopper_bf16(facts):
        return why
    if why := next(filter(None, map(unsupported_width, facts.norms)), None):
        return why
    # One cache keeps the kernels of both packages, which are installed together.
    if not {"quack", "flash_attn_4"} <= facts.packages:
        return f"needs QuACK: pip install {FLASH_ATTN}"
    return None


def _hopper(facts: Facts) -> Refusal:
    if facts.device != "cuda":
        return "needs CUDA"
    if facts.capability is None or facts.capability[0] != 9:
        return f"needs CUDA capability 9.x, not {dotted(facts.capability)}"
    return None


def blackwell(facts: Facts) -> Refusal:
    """Reason why this is no Blackwell GPU, or None."""
    if facts.device != "cuda":
        return "needs CUDA"
    if facts.capability is None or facts.capability[0] != 10:
        return f"needs CUDA capability 10.x, not {dotted(facts.capability)}"
    return None


def _compiled(facts: Facts) -> Refusal:
    if not facts.packages & {"nvidia_cutlass_dsl", "compiled_kernels"}:
        return f"needs the compiler of its kernels: pip install '{CUTLASS_DSL}'"
    return None


def hopper_kernels(facts: Facts) -> Refusal:
    """Reason why kernels for Hopper cannot run, whatever they compute, or None."""
    return _hopper(facts) or _compiled(facts)


def fused_experts(facts: Facts) -> Refusal:
    """Reason why the fused kernels for Hopper cannot run, or None."""
    if why := _hopper(facts):
        return why
    if facts.dtype != torch.bfloat16:
        return f"needs bf16, not {short(facts.dtype)}"
    if is_microscaling(facts.recipe):
        return f"has no {facts.recipe}, which Hopper does not multiply"
    if facts.fp8 and facts.wgrad == "bf16":
        return "has no weight gradients in bf16 (precision.wgrad) under fp8_block"
    if facts.hidden % 64 or facts.ffn % 64:
        return (
            f"needs whole boxes of 64 channels: model.hidden={facts.hidden} and "
            f"model.moe.ffn={facts.ffn} must be multiples of 64"
        )
    if facts.experts > PLAN_EXPERTS:
        return (
            f"needs at most {PLAN_EXPERTS} experts on a rank, not {facts.experts}: "
            "raise parallel.expert"
        )
    if facts.slots > COMBINE_SLOTS:
        return (
            f"needs at most {COMBINE_SLOTS} experts a token to choose from, not {facts.slots}: "
            "lower model.moe.top_k, of which model.moe.router.rounding takes twice as many"
        )
    if facts.activation and not ACTIVATIONS[facts.activation].cute:
        return f"has no epilogue of {facts.activation}"
    return _compiled(facts)


CUTLASS_DSL = "nvidia-cutlass-dsl[cu13]==4.8.1"
"""Requirement of `kernels.sm90`: its compiler, for pip."""


def torch_experts(facts: Facts) -> Refusal:
    """Reason why torch's grouped GEMM cannot run, or None."""
    if not hasattr(torch, "_grouped_mm"):
        return f"needs torch._grouped_mm, which torch {torch.__version__} does not have"
    if facts.dtype not in (torch.bfloat16, torch.float32):
        return f"needs bf16 or fp32, not {short(facts.dtype)}"
    if facts.device == "cuda":
        if facts.dtype != torch.bfloat16:
            return f"needs bf16 on CUDA, not {short(facts.dtype)}"
        # Elsewhere torch._grouped_mm copies the offsets to the host and loops over experts.
        if facts.capability is None or facts.capability[0] not in (9, 10):
            return f"needs CUDA capability 9.x or 10.x, not {dotted(facts.capability)}"
    multiple = 16 // facts.dtype.itemsize
    if facts.hidden % multiple or facts.ffn % multiple:
        return (
            f"needs rows of whole 16 bytes: model.hidden={facts.hidden} and "
            f"model.moe.ffn={facts.ffn} must be multiples of {multiple}"
        )
    return None


def torch_experts_on_cpu(facts: Facts) -> Refusal:
    """Reason why the loop of `reference` is faster on a CPU, or None."""
    if facts.device != "cpu" or facts.experts > _LOOPED_EXPERTS:
        return None
    return "on a CPU slower than reference, which skips padding"


_LOOPED_EXPERTS = 32  # on a CPU, a loop over no more experts costs less than padding


def sdpa(facts: Facts) -> Refusal:
    """Reason why PyTorch's fused attention cannot run, or None."""
    if facts.device != "cuda":
        return None
    if facts.sinks:
        return "has no sinks on CUDA"
    if facts.window or facts.context > 1 or facts.documents:
        return "has no sliding window, no context parallelism and no documents on CUDA"
    if facts.dtype == torch.float32:
        return "its kernels for grouped queries need bf16 on CUDA, not fp32"
    return None


def flex(facts: Facts) -> Refusal:
    """Reason why FlexAttention cannot run, or None."""
    if facts.device != "cuda":
        return "needs CUDA"
    if "triton" not in facts.packages:
        return "needs triton: pip install triton"
    if not facts.compiles:
        return "needs torch.compile: unset TORCHDYNAMO_DISABLE and TORCH_COMPILE_DISABLE"
    if 0 < min(facts.head_dim, facts.v_dim) < 16:
        return f"needs heads of at least 16 channels, not {min(facts.head_dim, facts.v_dim)}"
    return None


def short(dtype: torch.dtype) -> str:
    """Name of a dtype, such as `bf16`."""
    return next((name for known, name in _SHORT.items() if known == dtype), str(dtype))


_SHORT = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
}


def dotted(capability: tuple[int, int] | None) -> str:
    """CUDA capability as text."""
    return "unknown" if capability is None else f"{capability[0]}.{capability[1]}"
