"""Which implementation of each op runs here, and why the better ones do not.

A run resolves `kernels.*` of its config against the facts of this machine and model when it starts,
and prints `table`. A forced choice that cannot run is an error with its reason; `auto` takes the
first that can run, unless a later one is faster here, and reports what it passed over. Predicates
depend on `Facts` alone and import nothing.
"""

import importlib.util
import os
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from phalanx.configs import programs
from phalanx.configs.activations import ACTIVATIONS
from phalanx.configs.formats import MICROSCALING
from phalanx.kernels.core_attention.limits import unsupported_heads
from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.refusal import Refusal
from phalanx.kernels.rms_norm.limits import unsupported_width
from phalanx.kernels.sm90.limits import COMBINE_SLOTS, PLAN_EXPERTS
from phalanx.kernels.sm100 import glu
from phalanx.kernels.sm100.limits import PACKAGE as CUDNN_FRONTEND
from phalanx.kernels.sm100.limits import unsupported_sizes


def _installed() -> frozenset[str]:
    names = ("transformer_engine", "triton", "nvidia_cutlass_dsl")
    installed = {name for name in names if importlib.util.find_spec(name)}
    # Older flash-attn packages have the same top-level name, which find_spec would import.
    flash = importlib.util.find_spec("flash_attn")
    folders = (flash and flash.submodule_search_locations) or ()
    if any(os.path.exists(os.path.join(f, "cute", "interface.py")) for f in folders):
        installed.add("flash_attn_4")
    if importlib.util.find_spec("quack"):
        installed.add("quack")
    if importlib.util.find_spec("fla"):
        installed.add("flash_linear_attention")
    cudnn = importlib.util.find_spec("cudnn")  # another package may have the name
    folders = (cudnn and cudnn.submodule_search_locations) or ()
    if any(os.path.exists(os.path.join(f, "gemm", "cutedsl", "grouped")) for f in folders):
        installed.add("nvidia_cudnn_frontend")
    return frozenset(installed)


def _compiles() -> bool:
    switches = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")
    return not any(os.environ.get(name) == "1" for name in switches)


@dataclass(frozen=True)
class Facts:
    """Machine and model, as far as predicates depend on them. Sizes of 0 are unknown and fit."""

    device: str
    """`cpu` or `cuda`."""
    capability: tuple[int, int] | None
    """CUDA compute capability; None on `cpu`."""
    dtype: torch.dtype
    """Dtype of activations and weights."""
    fp8: bool = False
    """Linear layers multiply FP8 (`precision=fp8_block`)."""
    wgrad: str = "fp8"
    """Operands of weight gradients under a recipe (`precision.wgrad`)."""
    recipe: str = "bf16"
    """Option of `precision=`."""
    hidden: int = 0
    """D, channels of the residual stream."""
    ffn: int = 0
    """F, width of one expert."""
    experts: int = 0
    """L, experts of a rank."""
    slots: int = 0
    """Expert ids of a token: K, or with token rounding more."""
    activation: str = ""
    """Kind of the experts' activation (`configs.activations`); empty is unknown and fits."""
    activation_alpha: float = 1.702
    activation_limit: float = 0.0
    activation_offset: float = 0.0
    """Constants of the activation."""
    sinks: bool = False
    """Attention has learnable sinks."""
    window: int = 0
    """Sliding window of attention; 0 has none."""
    head_dim: int = 0
    """Channels of a query or key head."""
    v_dim: int = 0
    """Channels of a value head."""
    norms: tuple[int, ...] = ()
    """Channels that are normalised together, of each kind of norm."""
    documents: bool = False
    """Attention stops at the ends of documents inside a sequence (`data.document_mask`)."""
    context: int = 1
    """Context parallel size: above 1, attention sees fewer queries than keys."""
    max_logits: bool = False
    """The largest attention logits are measured (`optim.qk_clip`, `optim.max_logit_every`)."""
    packages: frozenset[str] = field(default_factory=_installed)
    """Optional packages that are installed here."""
    compiles: bool = field(default_factory=_compiles)
    """torch.compile is switched on."""


@dataclass(frozen=True)
class Choice:
    """One line of the table."""

    op: str
    backend: str
    reason: str


class KernelUnavailable(ValueError):
    """A forced backend cannot run here; the message has the reason and an override that works."""


def _never_unavailable(facts: Facts) -> Refusal:
    return None


@dataclass(frozen=True)
class _Backend:
    name: str
    unavailable: Callable[[Facts], Refusal]
    """Reason why it cannot run, or None."""
    auto: bool = True
    """`auto` considers it."""
    slower: Callable[[Facts], Refusal] = _never_unavailable
    """Reason why `auto` prefers a later one although this one can run, or None."""


@dataclass(frozen=True)
class _Op:
    knob: str
    backends: tuple[_Backend, ...]
    """Best first."""


def resolve(op: str, wanted: str, facts: Facts) -> Choice:
    """Pick the implementation of `op`.

    Args:
        op: `grouped_mlp`, `attention`, `norm` or `linear_attention`.
        wanted: a backend of the op, or `auto`.
        facts: this machine and model.

    Raises:
        KernelUnavailable: `wanted` cannot run here.
        ValueError: unknown op or backend.
    """
    if op not in _OPS:
        raise ValueError(f"unknown op {op!r}: use one of {', '.join(_OPS)}")
    spec = _OPS[op]
    if wanted == "auto":
        return _best(op, facts)
    for backend in spec.backends:
        if backend.name == wanted:
            break
    else:
        names = ", ".join(b.name for b in spec.backends)
        raise ValueError(f"{spec.knob}={wanted} is unknown: use one of {names} or auto")
    reason = backend.unavailable(facts)
    if reason is not None:
        hint = f"use {spec.knob}={_best(op, facts).backend} or {spec.knob}=auto"
        raise KernelUnavailable(f"{spec.knob}={wanted} cannot run here: {reason}; {hint}")
    return Choice(op, wanted, f"{spec.knob}={wanted}")


def table(choices: Sequence[Choice], width: int = 96) -> str:
    """The choices as aligned text with a heading; each clause of a reason starts a line.

    Args:
        choices: of `resolve`.
        width: columns that no line exceeds.
    """
    heads = ("op", "backend", "reason")
    op, backend = (
        max([len(head), *(len(getattr(choice, head)) for choice in choices)]) for head in heads[:2]
    )
    indent = op + backend + 4
    lines = [f"{heads[0]:{op}}  {heads[1]:{backend}}  {heads[2]}"]
    for choice in choices:
        reason = [
            line
            for clause in choice.reason.split("; ")
            for line in textwrap.wrap(clause, width - indent, subsequent_indent="  ")
        ]
        lines.append(f"{choice.op:{op}}  {choice.backend:{backend}}  {reason[0]}")
        lines += [" " * indent + line for line in reason[1:]]
    return "\n".join(lines)


def _best(op: str, facts: Facts) -> Choice:
    passed_over: list[str] = []
    for backend in _OPS[op].backends:
        if not backend.auto:
            continue
        reason = backend.unavailable(facts)
        if reason is None:
            reason = backend.slower(facts)
        if reason is None:
            return Choice(op, backend.name, "; ".join(["auto", *passed_over]))
        passed_over.append(f"not {backend.name}: {reason}")
    raise AssertionError(f"op {op} has no backend that runs everywhere")


def _te(facts: Facts) -> Refusal:
    if facts.device != "cuda":
        return "needs CUDA"
    if "transformer_engine" not in facts.packages:
        return f"needs Transformer Engine: {programs.install('transformer-engine')}"
    return None


def _te_experts(facts: Facts) -> Refusal:
    return _te(facts) or (
        "Transformer Engine's grouped GEMM wants row counts on the host, where this MoE layer "
        "never has them (kernels=megatron runs it)"
    )


def _stock_experts(facts: Facts) -> Refusal:
    if facts.recipe in MICROSCALING:
        return f"has no {facts.recipe} here"
    why = _te(facts) if facts.fp8 else None
    return why and f"has fp8_block by Transformer Engine: {why}"


def _te_attention(facts: Facts) -> Refusal:
    if reason := _te(facts):
        return reason
    if facts.documents:
        return "has no documents that end inside a sequence here (data.document_mask)"
    if facts.max_logits and facts.context > 1:
        return "splits sequences where largest logits are not measured (optim.max_logit_every)"
    return None if facts.dtype == torch.bfloat16 else f"needs bf16, not {_short(facts.dtype)}"


def _hopper_bf16(facts: Facts) -> Refusal:
    if facts.device != "cuda":
        return "needs CUDA"
    if facts.capability != (9, 0):
        return f"needs CUDA capability 9.0, not {_dotted(facts.capability)}"
    if facts.dtype != torch.bfloat16:
        return f"needs bf16, not {_short(facts.dtype)}"
    return None


def _fa4(facts: Facts) -> Refusal:
    if why := _hopper_bf16(facts):
        return why
    if facts.head_dim and (why := unsupported_heads(facts.head_dim, facts.v_dim)):
        return why
    if facts.documents and facts.context > 1:
        return "has no documents in sequences that ranks share (parallel.context)"
    if "flash_attn_4" not in facts.packages:
        return f"needs flash-attn-4: pip install {FLASH_ATTN}"
    return None


FLASH_ATTN = "flash-attn-4==4.0.0b36 quack-kernels==0.6.5"
"""Requirement of `kernels.core_attention.fa4` and `kernels.rms_norm.quack`, as pip knows it."""


def _quack(facts: Facts) -> Refusal:
    if why := _hopper_bf16(facts):
        return why
    if why := next(filter(None, map(unsupported_width, facts.norms)), None):
        return why
    # One cache keeps the kernels of both packages, which are installed together.
    if not {"quack", "flash_attn_4"} <= facts.packages:
        return f"needs QuACK: pip install {FLASH_ATTN}"
    return None


def _fa4_context(facts: Facts) -> Refusal:
    # Transformer Engine's ring of context ranks has neither windows nor sinks.
    ring = facts.context > 1 and not facts.window and not facts.sinks
    if ring and _te_attention(facts) is None:
        return (
            "with context parallelism it would gather all keys and values on every rank, where te "
            "passes them around"
        )
    return None


def _fla(facts: Facts) -> Refusal:
    if facts.device != "cuda":
        return "needs CUDA"
    if facts.capability is None or facts.capability < (8, 0):
        return f"needs CUDA capability 8.0 or more, not {_dotted(facts.capability)}"
    if facts.dtype != torch.bfloat16:
        return f"needs bf16, not {_short(facts.dtype)}"
    if not {"flash_linear_attention", "triton"} <= facts.packages:
        return f"needs flash-linear-attention: pip install {FLASH_LINEAR_ATTENTION}"
    return None


FLASH_LINEAR_ATTENTION = "fla-core==0.6.0"
"""Requirement of `kernels.linear_attention.fla`, as pip knows it."""


def _fused_experts(facts: Facts) -> Refusal:
    if facts.device != "cuda":
        return "needs CUDA"
    if facts.capability is None or facts.capability[0] != 9:
        return f"needs CUDA capability 9.x, not {_dotted(facts.capability)}"
    if facts.dtype != torch.bfloat16:
        return f"needs bf16, not {_short(facts.dtype)}"
    if facts.recipe in MICROSCALING:
        return f"has no {facts.recipe}, which Hopper does not multiply"
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
    if "nvidia_cutlass_dsl" not in facts.packages:
        return f"needs the compiler of its kernels: pip install '{CUTLASS_DSL}'"
    return None


def _cudnn_experts(facts: Facts) -> Refusal:
    if facts.device != "cuda":
        return "needs CUDA"
    if facts.capability is None or facts.capability[0] != 10:
        return f"needs CUDA capability 10.x, not {_dotted(facts.capability)}"
    return _cudnn_runs(facts)


def _cudnn_runs(facts: Facts) -> Refusal:
    """Conditions that do not depend on the GPU."""
    if facts.dtype != torch.bfloat16:
        return f"needs bf16, not {_short(facts.dtype)}"
    if facts.fp8:
        return "has no blocks of 128 (precision=fp8_block)"
    if why := unsupported_sizes(facts.hidden, facts.ffn, facts.experts):
        return why
    block_scaled = facts.recipe in MICROSCALING
    if block_scaled and facts.wgrad == "bf16":
        return f"has no weight gradients in bf16 (precision.wgrad) under {facts.recipe}"
    if facts.activation:
        constants = facts.activation_alpha, facts.activation_limit, facts.activation_offset
        if why := glu.unsupported(
            Activation(facts.activation, *constants), block_scaled=block_scaled
        ):
            return why
    if "nvidia_cudnn_frontend" not in facts.packages:
        return f"needs cuDNN's frontend: pip install {CUDNN_FRONTEND}"
    return None


CUTLASS_DSL = "nvidia-cutlass-dsl[cu13]==4.8.1"
"""Requirement of `kernels.sm90`: its compiler, as pip knows it."""


def _torch_experts(facts: Facts) -> Refusal:
    if not hasattr(torch, "_grouped_mm"):
        return f"needs torch._grouped_mm, which torch {torch.__version__} does not have"
    if facts.dtype not in (torch.bfloat16, torch.float32):
        return f"needs bf16 or fp32, not {_short(facts.dtype)}"
    if facts.device == "cuda":
        if facts.dtype != torch.bfloat16:
            return f"needs bf16 on CUDA, not {_short(facts.dtype)}"
        # Elsewhere torch._grouped_mm copies the offsets to the host and loops over experts.
        if facts.capability is None or facts.capability[0] not in (9, 10):
            return f"needs CUDA capability 9.x or 10.x, not {_dotted(facts.capability)}"
    multiple = 16 // facts.dtype.itemsize
    if facts.hidden % multiple or facts.ffn % multiple:
        return (
            f"needs rows of whole 16 bytes: model.hidden={facts.hidden} and "
            f"model.moe.ffn={facts.ffn} must be multiples of {multiple}"
        )
    return None


def _torch_experts_on_cpu(facts: Facts) -> Refusal:
    if facts.device != "cpu" or facts.experts > _LOOPED_EXPERTS:
        return None
    return "on a CPU slower than reference, which skips padding"


_LOOPED_EXPERTS = 32
"""Experts of a rank up to which, on a CPU, a loop over them costs less than rows of padding."""


def _sdpa(facts: Facts) -> Refusal:
    if facts.device != "cuda":
        return None
    if facts.sinks:
        return "has no sinks on CUDA"
    if facts.window or facts.context > 1 or facts.documents:
        return "has no sliding window, no context parallelism and no documents on CUDA"
    if facts.dtype == torch.float32:
        return "its kernels for grouped queries need bf16 on CUDA, not fp32"
    return None


def _flex(facts: Facts) -> Refusal:
    if facts.device != "cuda":
        return "needs CUDA"
    if "triton" not in facts.packages:
        return "needs triton: pip install triton"
    if not facts.compiles:
        return "needs torch.compile: unset TORCHDYNAMO_DISABLE and TORCH_COMPILE_DISABLE"
    if 0 < min(facts.head_dim, facts.v_dim) < 16:
        return f"needs heads of at least 16 channels, not {min(facts.head_dim, facts.v_dim)}"
    return None


def _short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}.get(dtype, str(dtype))


def _dotted(capability: tuple[int, int] | None) -> str:
    return "unknown" if capability is None else f"{capability[0]}.{capability[1]}"


_OPS = {
    "grouped_mlp": _Op(
        knob="kernels.backend",
        backends=(
            _Backend("fused", _fused_experts),
            _Backend("cudnn", _cudnn_experts),
            _Backend("te", _te_experts),
            _Backend("torch", _torch_experts, slower=_torch_experts_on_cpu),
            _Backend("reference", _never_unavailable),
            _Backend("megatron", _stock_experts, auto=False),
        ),
    ),
    "attention": _Op(
        knob="kernels.attention",
        backends=(
            _Backend("fa4", _fa4, slower=_fa4_context),
            _Backend("te", _te_attention),
            _Backend("sdpa", _sdpa),
            _Backend("flex", _flex),
            _Backend("reference", _never_unavailable),
        ),
    ),
    "linear_attention": _Op(
        knob="kernels.attention",
        backends=(_Backend("fla", _fla), _Backend("torch", _never_unavailable)),
    ),
    "norm": _Op(
        knob="kernels.norm",
        backends=(
            _Backend("quack", _quack),
            _Backend("te", _te),
            _Backend("torch", _never_unavailable),
        ),
    ),
}
