"""Which layers of a model have linear attention, and its sizes that no knob changes."""

from phalanx.configs.schema import LinearAttentionConfig, ModelConfig

HEAD_DIM = 128
"""Channels of a query, key or value head of every published model."""
TAPS = 4
"""Width of the convolution: a token and the three before it."""


def is_linear(m: ModelConfig, layer: int) -> bool:
    """Return whether a layer has linear attention.

    Args:
        m: the model.
        layer: from 0; layers of multi-token prediction come after the last decoder layer, and have
            `model.attention`.
    """
    every = m.linear_attention.full_attention_interval
    return layer < m.layers and (layer + 1) % every != 0


def linear_layers(m: ModelConfig) -> int:
    """How many layers of a model have linear attention."""
    return sum(is_linear(m, layer) for layer in range(m.layers))


def qkv_dim(a: LinearAttentionConfig) -> int:
    """Channels of queries, keys and values together, which the convolution goes over."""
    return (2 * a.key_heads + a.value_heads) * HEAD_DIM


def input_dim(a: LinearAttentionConfig) -> int:
    """Outputs of the input projection.

    Queries, keys, values, gates of the output, and two numbers per value head: how much it writes
    and forgets.
    """
    return qkv_dim(a) + a.value_heads * (HEAD_DIM + 2)
