"""Which layers of a model have a dense MLP, which experts, which mixer and which a window."""

from collections import Counter

from phalanx.configs.schema import AttentionConfig, ModelConfig


def has_experts(m: ModelConfig) -> bool:
    """Return whether a model has routed experts; one without is a dense model."""
    return m.moe.experts > 0


def is_dense(m: ModelConfig, layer: int) -> bool:
    """Return whether a layer has a dense MLP instead of experts.

    Args:
        m: the model.
        layer: from 0; layers of multi-token prediction come after the last decoder layer, and have
            what the last decoder layer would have: experts, unless the model has none.
    """
    return not has_experts(m) or layer < m.moe.dense_layers


ATTENTION = "attention"  # the mixer of a layer that has no other: `model.attention`


def mixer(m: ModelConfig, layer: int) -> str:
    """Name of the mixer of a layer, a key of `configs.tables.layers.MIXERS`.

    Args:
        m: the model.
        layer: from 0; layers of multi-token prediction come after the last decoder layer, and have
            `model.attention`.
    """
    every = m.linear_attention.full_attention_interval
    return "linear_attention" if layer < m.layers and (layer + 1) % every else ATTENTION


def mixer_layers(m: ModelConfig, *, mtp: bool = True) -> Counter[str]:
    """Number of layers with each mixer; `mtp=False` leaves out those of multi-token prediction."""
    return Counter(mixer(m, layer) for layer in range(m.layers + (m.mtp_layers if mtp else 0)))


def has_window(a: AttentionConfig, layer: int) -> bool:
    """Return whether the attention of a layer (from 0) has a sliding window.

    Megatron-Core counts layers of multi-token prediction from 0 again.
    """
    return a.window > 0 and (a.window_every == 1 or (layer + 1) % a.window_every > 0)


def mlp_layers(m: ModelConfig, *, mtp: bool = True) -> tuple[int, int]:
    """(dense, MoE) layers of a model; `mtp=False` leaves out those of multi-token prediction."""
    layers = m.layers + (m.mtp_layers if mtp else 0)
    dense = m.moe.dense_layers if has_experts(m) else layers
    return dense, layers - dense
