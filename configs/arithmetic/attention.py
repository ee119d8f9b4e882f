"""Projections, norms and heads of core attention, of grouped and of latent kind."""

from collections.abc import Iterator

from phalanx.configs.arithmetic.layers import Mixer
from phalanx.configs.schema import AttentionConfig, ModelConfig


class Attention(Mixer):
    """`model.attention`, whose rules are in `configs.validate` and `configs.layout`."""

    core = True

    def matrices(self, m: ModelConfig) -> list[tuple[int, int]]:
        return list(projections(m.hidden, m.attention))

    def input_parts(self, m: ModelConfig) -> list[tuple[int, int]]:
        """Queries with their gates, keys and values of grouped attention."""
        a = m.attention
        if a.kind != "gqa":
            return []
        return [(1 + a.output_gate, a.heads * a.head_dim), (2, a.kv_heads * a.head_dim)]

    def vectors(self, m: ModelConfig) -> int:
        """Biases and sinks. Latent attention has a bias on its output only."""
        a = m.attention
        inner = _query_key_value(a) if a.kind == "gqa" else 0
        return (m.bias or a.qkv_bias) * inner + m.bias * m.hidden + a.heads * a.sinks

    def norms(self, m: ModelConfig) -> int:
        """Elements of the norms of latents, or of queries and keys."""
        a = m.attention
        return a.q_lora_rank + a.kv_lora_rank if a.kind == "mla" else sum(qk_norms(a))


def head_dims(a: AttentionConfig) -> tuple[int, int]:
    """Channels of a key head, as of a query head, and of a value head."""
    return (a.head_dim,) * 2 if a.kind == "gqa" else (a.qk_nope_dim + a.qk_rope_dim, a.v_dim)


def projections(h: int, a: AttentionConfig) -> Iterator[tuple[int, int]]:
    """(inputs, outputs) of the matrices of one attention; that of the output comes last."""
    if a.kind == "gqa":
        yield h, _query_key_value(a)
        yield a.heads * a.head_dim, h
        return
    query = a.heads * (a.qk_nope_dim + a.qk_rope_dim)
    if a.q_lora_rank:
        yield h, a.q_lora_rank
        yield a.q_lora_rank, query
    else:
        yield h, query
    yield h, a.kv_lora_rank + a.qk_rope_dim
    yield a.kv_lora_rank, a.heads * (a.qk_nope_dim + a.v_dim)
    yield a.heads * a.v_dim, h


def _query_key_value(a: AttentionConfig) -> int:
    queries = 2 * a.heads if a.output_gate else a.heads
    return (queries + 2 * a.kv_heads) * a.head_dim


def qk_norms(a: AttentionConfig) -> tuple[int, ...]:
    """Channels of the norms of queries and of keys of grouped attention; none without them."""
    if a.kind != "gqa" or not a.qk_norm:
        return ()
    together = (a.heads, a.kv_heads) if a.qk_norm_over == "projection" else (1, 1)
    return tuple(heads * a.head_dim for heads in together)
