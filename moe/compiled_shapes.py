"""Kernels of flash-attn-4 and QuACK that the model of a run launches on Hopper GPUs.

Our own kernels serve any shape. These libraries compile for head sizes, groups of heads and widths
of norms, so that `scripts/build_kernels.py --run` must know them before the model exists. What is
listed follows from the code that launches: `moe.model.attention`, `moe.model.grouped_attention`,
`moe.model.transformer_layer` and `moe.model.norm`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from phalanx.configs.arithmetic.attention import qk_norms
from phalanx.configs.arithmetic.batch_sizes import model_input
from phalanx.configs.arithmetic.layers import has_window, mixer
from phalanx.configs.arithmetic.mixers import mixer_of
from phalanx.configs.schema import Config, ModelConfig
from phalanx.configs.tables.backends import ATTENTION_BACKENDS, NORM_BACKENDS, Implementation
from phalanx.kernels.core_attention.fa4_shipped import AttentionLayer
from phalanx.kernels.registry import Facts, resolve
from phalanx.kernels.rms_norm.quack_library import Rows
from phalanx.moe.model.kernel_facts import hopper_facts

_STEPS: tuple[Literal["forward", "backward"], ...] = ("forward", "backward")


def attention_layers(cfg: Config) -> tuple[AttentionLayer, ...]:
    """Keys of the kernels of flash-attn-4 that a run launches; none if it has another attention.

    Args:
        cfg: valid config.

    Raises:
        KernelUnavailable: the config names flash-attn-4, which cannot run its model.
    """
    a, facts = cfg.model.attention, _facts(cfg)
    if not _chosen("attention", cfg.kernels.attention, ATTENTION_BACKENDS, facts):
        return ()
    return tuple(
        AttentionLayer(
            _group(cfg),
            facts.head_dim,
            facts.v_dim,
            window=window,
            sinks=a.sinks,
            deterministic=cfg.run.deterministic,
            documents=cfg.data.document_mask,
        )
        for window in sorted(_windows(cfg))
    )


def norm_rows(cfg: Config) -> tuple[Rows, ...]:
    """Keys of the kernels of QuACK that a run launches; none if it has other norms.

    Args:
        cfg: valid config.

    Raises:
        KernelUnavailable: the config names QuACK, which cannot run its model.
    """
    if not _chosen("norm", cfg.kernels.norm, NORM_BACKENDS, _facts(cfg)):
        return ()
    m = cfg.model
    # The norm before attention adds nothing forward and the gradient of the residual backward, that
    # before the MLP adds in both, the final norm and those of multi-token prediction in neither.
    keys = [(m.hidden, step, adds) for step in _STEPS for adds in (False, True)]
    keys += [(width, step, False) for width in _inner_norms(cfg) for step in _STEPS]
    return tuple(Rows(*key, fp32_weight=m.norm_zero_centered) for key in dict.fromkeys(keys))


def _facts(cfg: Config) -> Facts:
    # Without Transformer Engine, which `auto` prefers where context ranks share sequences: the
    # machine of the run may lack it.
    on_hopper = hopper_facts(cfg, cfg.parallel.world_size or 1)
    on_cpu = cfg.run.device == "cpu"
    return replace(on_hopper, device="cpu", capability=None) if on_cpu else on_hopper


def _chosen(op: str, wanted: str, backends: Mapping[str, Implementation], facts: Facts) -> bool:
    """Whether an operation runs by kernels that are compiled for a model's sizes."""
    if wanted in backends and not backends[wanted].per_model:
        return False  # whatever else that implementation needs
    return backends[resolve(op, wanted, facts).backend].per_model


def _group(cfg: Config) -> int:
    """Query heads of a key-value head on a tensor rank."""
    a, ranks = cfg.model.attention, cfg.parallel.tensor
    if a.kind == "mla":
        return 1
    # With more ranks than key-value heads, ranks that share one divide its query heads.
    return a.heads // ranks // max(1, a.kv_heads // ranks)


def _attention_layers(m: ModelConfig) -> list[int]:
    """Layers with softmax attention, from 0; those of multi-token prediction from 0 again."""
    decoder = [layer for layer in range(m.layers) if mixer_of(mixer(m, layer)).core]
    return decoder + list(range(m.mtp_layers))


def _windows(cfg: Config) -> set[bool]:
    """Does a window hide keys? Both answers where layers or chunks of a sequence differ."""
    a, ranks = cfg.model.attention, cfg.parallel.context
    tokens, _ = model_input(cfg.data)
    first_chunk = tokens if ranks == 1 else tokens // (2 * ranks)
    return {
        has_window(a, layer) and a.window < keys
        for layer in _attention_layers(cfg.model)
        for keys in (first_chunk, tokens)
    }


def _inner_norms(cfg: Config) -> tuple[int, ...]:
    """Widths of norms inside attention that are no part of another kernel."""
    m, a = cfg.model, cfg.model.attention
    if not _attention_layers(m):
        return ()
    if a.kind == "mla":
        return tuple(rank for rank in (a.q_lora_rank, a.kv_lora_rank) if rank)
    # Norms of heads are fused with the rotary embedding (kernels.core_attention.qkv), except for
    # those that `moe.model.grouped_attention` computes before it.
    shared_heads = cfg.parallel.tensor > a.kv_heads
    together = a.qk_norm_over == "projection"
    return qk_norms(a) if shared_heads or together or m.norm_zero_centered else ()
