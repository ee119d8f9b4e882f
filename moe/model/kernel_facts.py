"""Facts of a config and a machine that the choice of kernels depends on."""

from collections.abc import Iterable
from typing import Any

from phalanx.configs.arithmetic.attention import head_dims, qk_norms
from phalanx.configs.arithmetic.layers import has_experts
from phalanx.configs.formats import is_fp8
from phalanx.configs.layout import expert_parallel_size, logit_interval
from phalanx.configs.schema import Config
from phalanx.kernels.registry import Facts
from phalanx.moe.model.precision import compute_dtype
from phalanx.moe.router.router import slots

HOPPER_PACKAGES = frozenset({"flash_attn_4", "quack", "triton", "nvidia_cutlass_dsl"})
"""Optional packages of our kernels on Hopper."""


def hopper_facts(cfg: Config, world: int, *, also: Iterable[str] = ()) -> Facts:
    """Facts of `cfg` on Hopper GPUs with the packages of our kernels, and with others."""
    packages = HOPPER_PACKAGES.union(also)
    return facts(cfg, world, device="cuda", capability=(9, 0), packages=packages, compiles=True)


def facts(
    cfg: Config, world: int, *, device: str, capability: tuple[int, int] | None, **machine: Any
) -> Facts:
    """Facts of `cfg` on `world` ranks; `machine` has more facts of a machine that is not this."""
    a, e = cfg.model.attention, cfg.model.moe
    key, value = head_dims(a)
    routed = has_experts(cfg.model)  # else the kernels run one MLP, of all tokens
    return Facts(
        device=device,
        capability=capability,
        dtype=compute_dtype(cfg),
        fp8=is_fp8(cfg),
        recipe=cfg.precision.recipe,
        wgrad=cfg.precision.wgrad,
        hidden=cfg.model.hidden,
        ffn=e.ffn if routed else cfg.model.dense_ffn,
        experts=e.experts // expert_parallel_size(cfg, world) if routed else 1,
        slots=slots(e.router, experts=e.experts, top_k=e.top_k).width if routed else 1,
        activation=e.activation,
        activation_alpha=e.activation_alpha,
        activation_limit=e.activation_limit,
        activation_offset=e.activation_offset,
        sinks=a.sinks,
        window=a.window,
        head_dim=key,
        v_dim=value,
        norms=_norms(cfg),
        documents=cfg.data.document_mask,
        context=cfg.parallel.context,
        max_logits=logit_interval(cfg.optim) > 0,
        **machine,
    )


def _norms(cfg: Config) -> tuple[int, ...]:
    """Widths of the norms of layers, of queries and keys, and of latents."""
    a = cfg.model.attention
    latents = [a.q_lora_rank, a.kv_lora_rank] if a.kind == "mla" else []
    return tuple(width for width in (cfg.model.hidden, *qk_norms(a), *latents) if width)
