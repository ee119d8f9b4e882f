"""Availability of Megatron-Core's MoE layer, the limits of its recipe, and fields that it needs."""

from collections.abc import Collection, Iterator
from typing import Any

from phalanx.configs.arithmetic.layers import mixer_layers
from phalanx.configs.arithmetic.mixers import mixer_of
from phalanx.configs.formats import is_fp8, is_microscaling
from phalanx.configs.knobs import pluralize, repair
from phalanx.configs.schema import Config, PrecisionConfig
from phalanx.kernels.availability import te
from phalanx.kernels.refusal import Refusal
from phalanx.kernels.registry import Facts


def stock_experts(facts: Facts) -> Refusal:
    """Reason why Megatron-Core's MoE layer cannot run, or None."""
    if is_microscaling(facts.recipe):
        return f"has no {facts.recipe} here"
    why = te(facts) if facts.fp8 else None
    return why and f"has fp8_block by Transformer Engine: {why}"


def problems(cfg: Config) -> Iterator[str]:
    """Limits of Megatron-Core's layer with Transformer Engine's recipe."""
    if cfg.run.device == "cpu":
        reason = "has fp8_block by Transformer Engine, which needs CUDA, and run.device is cpu"
        yield repair(cfg, "kernels.backend", reason, "auto")
        return
    for name in mixer_layers(cfg.model):
        if refused := mixer_of(name).not_in_fp8_of_megatron(cfg.model):
            yield repair(cfg, "kernels.backend", refused, "auto")
            return
    for name in ("wgrad", "hidden", "dispatch", "weights"):
        if getattr(cfg.precision, name) != (default := getattr(PrecisionConfig(), name)):
            reason = "is not possible with kernels.backend=megatron"
            yield repair(cfg, f"precision.{name}", reason, default)
    most = cfg.model.layers // cfg.parallel.pipeline
    for name in ("bf16_first_layers", "bf16_last_layers"):
        if getattr(cfg.precision, name) > most:
            reason = f"is more than the {pluralize(most, 'layer')} of a stage, which "
            reason += "kernels.backend=megatron takes at most"
            yield repair(cfg, f"precision.{name}", reason, most)


def config_fields(cfg: Config) -> dict[str, Any]:
    """Fields of Transformer Engine's blockwise recipe, for Megatron-Core's own experts."""
    p = cfg.precision
    if not is_fp8(cfg):
        return {}
    return dict(
        fp8="hybrid" if p.grad_format == "e5m2" else "e4m3",
        fp8_recipe="blockwise",
        first_last_layers_bf16=p.bf16_first_layers + p.bf16_last_layers > 0,
        num_layers_at_start_in_bf16=p.bf16_first_layers,
        num_layers_at_end_in_bf16=p.bf16_last_layers,
    )


def described(packages: Collection[str]) -> str:
    """Its implementation of experts, by the optional packages that all ranks have."""
    with_te = "transformer_engine" in packages
    return "Transformer Engine's grouped GEMM" if with_te else "a loop over experts"
