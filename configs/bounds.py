"""Valid values of each knob by itself: choices of strings, bounds of numbers.

A number may be 0 or more unless listed here. `validate` reads these first, and the rules between
knobs after.
"""

import difflib
import math
from collections.abc import Iterator
from typing import Any

from phalanx.configs.activations import ACTIVATIONS
from phalanx.configs.formats import RECIPES
from phalanx.configs.knobs import get, knobs, repair, visible
from phalanx.configs.machines import MACHINES
from phalanx.configs.memory import OFFLOAD, RECOMPUTE
from phalanx.configs.schema import Config
from phalanx.configs.transports import TRANSPORTS

_CHOICES: dict[str, tuple[str, ...]] = {
    "model.attention.kind": ("gqa", "mla"),
    "model.attention.qk_norm_over": ("head", "projection"),
    "model.moe.router.score": ("softmax", "sigmoid"),
    "model.moe.router.softmax_over": ("all", "topk"),
    "model.moe.router.rounding": ("none", "nearest", "up", "down"),
    "kernels.backend": ("auto", "reference", "torch", "te", "fused", "cudnn", "megatron"),
    "kernels.attention": ("auto", "reference", "sdpa", "flex", "fa4", "te"),
    "kernels.norm": ("auto", "torch", "te", "quack"),
    "precision.recipe": RECIPES,
    "precision.grad_format": ("e4m3", "e5m2"),
    "precision.wgrad": ("fp8", "bf16"),
    "precision.wgrad_blocks": ("square", "vector"),
    "precision.hidden": ("bf16", "fp8"),
    "precision.dispatch": ("bf16", "fp8"),
    "precision.dense": ("fp8", "bf16"),
    "precision.weights": ("auto", "scratch", "resident"),
    "parallel.save_x": ("redispatch", "keep"),
    "parallel.comm_sms": ("auto",),
    "parallel.expert_replication": ("auto",),
    "parallel.grad_dtype": ("fp32", "bf16"),
    "data.source": ("embedded", "indexed", "synthetic"),
    "optim.kind": ("adamw", "muon"),
    "optim.moments": ("fp32", "bf16"),
    "optim.schedule": ("cosine", "linear", "constant", "inverse-square-root", "WSD"),
    "run.device": ("auto", "cuda", "cpu"),
    "run.graph": ("auto", "off", "full_iteration"),
    "run.recompute": tuple(RECOMPUTE),
    "run.offload": tuple(OFFLOAD),
    "run.bad_steps": ("stop", "skip", "rollback"),
    "run.async_save": ("auto", "on", "off"),
    "run.machine": tuple(MACHINES),
    "run.wandb": ("off", "offline", "online"),
}


def choices() -> dict[str, tuple[str, ...]]:
    """Values of every knob that has a list of them; those of the tables as they are now."""
    tables = {
        "model.moe.activation": tuple(ACTIVATIONS),
        "parallel.dispatch": ("auto", *TRANSPORTS),
    }
    return _CHOICES | tables


AT_LEAST: dict[str, int] = {
    "model.attention.heads": 1,
    "model.attention.kv_heads": 1,
    "model.attention.head_dim": 1,
    "model.attention.kv_lora_rank": 1,
    "model.attention.qk_nope_dim": 1,
    "model.attention.qk_rope_dim": 1,
    "model.attention.v_dim": 1,
    "model.attention.window_every": 1,
    "model.attention.yarn.factor": 1,
    "model.attention.yarn.original_context": 1,
    "model.linear_attention.full_attention_interval": 1,
    "model.linear_attention.key_heads": 1,
    "model.linear_attention.value_heads": 1,
    "model.moe.experts": 1,
    "model.moe.top_k": 1,
    "model.moe.ffn": 1,
    "model.moe.router.groups": 1,
    "model.moe.router.group_topk": 1,
    "model.moe.router.rounding_tile": 1,
    "model.layers": 1,
    "model.hidden": 1,
    "model.dense_ffn": 1,
    "parallel.tensor": 1,
    "parallel.pipeline": 1,
    "parallel.virtual_pipeline": 1,
    "parallel.context": 1,
    "parallel.timeout": 1,
    "data.sequence_length": 1,
    "data.micro_batch": 1,
    "data.global_batch": 1,
    "optim.ns_steps": 1,
    "run.steps": 1,
    "run.max_bad_steps": 1,
    "run.save_interval": -1,
    "run.keep_last": 1,
    "run.log_interval": 1,
    "run.eval_batches": 1,
}

ABOVE_ZERO: frozenset[str] = frozenset(
    {
        "model.attention.rope_theta",
        "model.attention.yarn.beta_fast",
        "model.attention.yarn.beta_slow",
        "model.moe.activation_alpha",
        "model.moe.router.scale",
        "model.norm_eps",
        "model.init_std",
        "parallel.capacity_factor",
        "optim.lr",
        "optim.eps",
    }
)

_MOST = 2**31 - 1
"""Upper bound of every integer: no size is near it, and seeds and shapes in libraries end there."""

BELOW_ONE: frozenset[str] = frozenset({"optim.beta1", "optim.beta2", "optim.momentum"})


LARGEST_PUBLISHED: dict[str, int] = {
    "model.vocab_size": 1_000_000,  # XLM-V
    "model.layers": 128,  # Llama 3.1 405B has 126
    "model.hidden": 20_480,  # MT-NLG
    "model.dense_ffn": 81_920,  # MT-NLG
    "model.moe.experts": 2_048,  # Switch-C
    "model.moe.ffn": 81_920,
    "model.moe.shared_ffn": 81_920,
    "model.attention.heads": 128,  # MT-NLG, DeepSeek-V3
    "data.sequence_length": 10_000_000,  # contexts, of Llama 4
}


def oversized(cfg: Config) -> list[str]:
    """Sizes beyond those of every published model: what to lower, a line each."""
    return [
        f"{path}={get(cfg, path)}: lower it, published models have at most {most:,}"
        for path, most in LARGEST_PUBLISHED.items()
        if get(cfg, path) > most
    ]


def bound_problems(cfg: Config) -> Iterator[str]:
    """Knobs that are wrong by themselves."""
    allowed = choices()
    for path, knob in knobs().items():
        value = get(cfg, path)
        if isinstance(value, list) and path in allowed:
            if wrong := [item for item in value if item not in allowed[path]]:
                left = [item for item in value if item in allowed[path]]
                near = difflib.get_close_matches(str(wrong[0]), allowed[path], n=1)
                reason = f"has {visible(str(wrong[0]))!r}, none of {', '.join(allowed[path])}"
                yield repair(cfg, path, reason, list(dict.fromkeys(left + near)))
        elif isinstance(value, str):
            if path in allowed and value not in allowed[path]:
                near = difflib.get_close_matches(value, allowed[path], n=1, cutoff=0.3)
                numbers = ", and no number" if knob.type == int | str else ""
                reason = f"is not one of {', '.join(allowed[path])}{numbers}"
                yield repair(cfg, path, reason, (near or allowed[path])[0])
        elif knob.type in (int, float, int | str) and (bound := _bound(path, value)):
            yield repair(cfg, path, *bound)


def _bound(path: str, value: float) -> tuple[str, Any] | None:
    """Return the bound that a number violates, and a value within it."""
    default = knobs()[path].default
    if knobs()[path].type is not float:
        if value > _MOST:
            return f"must be at most {_MOST}", default
        value = max(value, -_MOST)  # no float holds some whole numbers
    if not math.isfinite(value):
        return "must be finite", default
    if path in ABOVE_ZERO:
        return None if value > 0 else ("must be above 0", default)
    if path in BELOW_ONE and value >= 1:
        return "must be below 1", default
    least = AT_LEAST.get(path, 0)
    if value >= least:
        return None
    return f"must be at least {least}", least if default == "auto" else max(least, default)
