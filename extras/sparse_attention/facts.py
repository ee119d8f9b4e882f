"""Arithmetic of sparse attention: parameters, FLOPs, bytes, rules, tensors in checkpoints.

It imports neither torch nor Megatron-Core.
"""

from collections.abc import Iterator

from phalanx.configs.arithmetic.attention import Attention, head_dims
from phalanx.configs.arithmetic.layers import has_experts
from phalanx.configs.formats import width
from phalanx.configs.knobs import overrides, repair, shown
from phalanx.configs.schema import Config, ModelConfig
from phalanx.extras.sparse_attention.options import SparseOptions, problems, understood
from phalanx.moe.hf.weights import TensorRegion, latent_attention, rows_of
from phalanx.moe.saved_tensors import SavedTensors, TokenCounts, attention_saved

_AT = "model.attention.sparse"


def of(m: ModelConfig) -> SparseOptions:
    """Sparse attention of a model that has it."""
    return understood(m.attention.sparse)


class SparseAttention(Attention):
    """Latent attention with an indexer (`extras.sparse_attention.latent`)."""

    def matrices(self, m: ModelConfig) -> list[tuple[int, int]]:
        s, rank = of(m), m.attention.q_lora_rank
        indexer = [(rank, s.heads * s.dim), (m.hidden, s.dim), (m.hidden, s.heads)]
        return [*indexer, *super().matrices(m)]

    def vectors(self, m: ModelConfig) -> int:
        """Biases, and weight and bias of the norm of the indexer's keys."""
        return super().vectors(m) + 2 * of(m).dim

    def core_share(self, m: ModelConfig, length: int) -> float:
        """Share of chosen keys and scores; these have a backward pass in the warm-up alone."""
        a, s = m.attention, of(m)
        if not length:
            return 1.0
        most = length if s.warms_up else min(s.top_k, length)
        seen = most - most * (most - 1) / (2 * length) if most < length else length / 2
        scores = s.heads * s.dim / (a.heads * sum(head_dims(a)))
        return seen / (length / 2) + (scores if s.warms_up else scores / 3)

    def problems(self, cfg: Config) -> Iterator[str]:
        m, a, o = cfg.model, cfg.model.attention, cfg.optim
        if a.kind != "mla" or not a.q_lora_rank or not has_experts(m) or m.bias:
            reason = "needs attention.kind=mla, attention.q_lora_rank above 0, experts and no bias"
            yield repair(cfg, _AT, reason, {})
            return
        for name, (reason, value) in problems(a.sparse, a.qk_rope_dim).items():
            given = a.sparse.pop(name)
            a.sparse |= {} if value is None else {name: value}
            advice = {_AT: a.sparse} if value is None else {f"{_AT}.{name}": value}
            yield f"{_AT}.{name}={shown(given)} {reason}; set {overrides(advice)}"
        for size, split in (("tensor", "heads"), ("context", "keys")):
            if getattr(cfg.parallel, size) > 1:
                reason = f"splits the {split} of sparse attention ({_AT}), which needs all of them"
                yield repair(cfg, f"parallel.{size}", reason, 1)
        if of(m).warms_up:
            return
        for knob in ("qk_clip", "max_logit_every"):
            if getattr(o, knob):
                reason = f"is of the logits of all keys, and {_AT}.phase=sparse computes few"
                yield repair(cfg, f"optim.{knob}", reason, 0)
        for knob in ("recompute", "offload"):
            listed = getattr(cfg.run, knob)
            if wrong := [name for name in listed if name in ("mla_up", "attention")]:
                reason = f"names {wrong[0]}, which {_AT}.phase=sparse does not split off"
                yield repair(cfg, f"run.{knob}", reason, [n for n in listed if n not in wrong])

    def not_capturable(self, cfg: Config) -> str | None:
        return "sparse attention is that of torch, in pieces that no graph has captured"


def saved_tensors(cfg: Config, counts: TokenCounts) -> SavedTensors:
    """Saved bytes: those of latent attention, absorbed after the warm-up, and the indexer's."""
    a, s, element = cfg.model.attention, of(cfg.model), width(cfg)
    saved = dict(attention_saved(cfg, counts))
    # Queries before and behind their rotation, keys and weights; gradients of its loss.
    index = 3 * element * (s.heads + 1) * s.dim + 8 * s.heads
    saved["indexer"] = counts.tokens * index
    if not s.warms_up:
        absorbed = a.kv_lora_rank + a.qk_rope_dim
        heads = a.heads * (a.qk_nope_dim + a.qk_rope_dim + absorbed + a.kv_lora_rank)
        saved["queries_keys_values"] = counts.tokens * element * (heads + 2 * absorbed)
        chosen = min(s.top_k, cfg.data.sequence_length)
        saved["out"] = counts.tokens * (element * a.heads * a.v_dim + 4 * chosen)
    return saved


def backward_bytes(cfg: Config, counts: TokenCounts) -> int:
    """Peak beside the saved tensors: gradients of absorbed queries and sums, and some pieces."""
    a, s = cfg.model.attention, of(cfg.model)
    if s.warms_up:
        return 0
    channels = 2 * a.heads * (2 * a.kv_lora_rank + a.qk_rope_dim)
    return counts.tokens * width(cfg) * channels + (4 << 28)


def regions(m: ModelConfig, key: str, name: str) -> Iterator[TensorRegion]:
    """Regions by prefixes: those of latent attention, and the indexer's."""
    name, s = f"{name}self_attn.", of(m)
    yield from latent_attention(m, key, name)
    shapes = {
        ("query.weight", "wq_b.weight"): (s.heads * s.dim, m.attention.q_lora_rank),
        ("key.weight", "wk.weight"): (s.dim, m.hidden),
        ("key_norm.weight", "k_norm.weight"): (s.dim,),
        ("key_norm.bias", "k_norm.bias"): (s.dim,),
        ("weights.weight", "weights_proj.weight"): (s.heads, m.hidden),
    }
    for (ours, theirs), shape in shapes.items():
        yield from rows_of(f"{key}indexer.{ours}", shape, f"{name}indexer.{theirs}")
