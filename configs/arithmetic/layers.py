"""Layers with a dense MLP, experts, a mixer or a window; and the numbers of a mixer.

Layers are numbered from 0. Those of multi-token prediction come after the last decoder layer, with
`model.attention`, and with experts unless the model has none.
"""

import functools
from collections import Counter
from collections.abc import Iterator
from pkgutil import resolve_name
from typing import Any, cast

from phalanx.configs.schema import AttentionConfig, Config, ModelConfig
from phalanx.configs.tables.capabilities import VARIANTS
from phalanx.configs.tables.layers import MIXERS


def candidates(mode: str, top_k: int, reachable: int) -> int:
    """Number of candidate experts of a token, out of `reachable`, with token rounding."""
    return top_k if mode == "down" else min(2 * top_k, reachable)


def has_experts(m: ModelConfig) -> bool:
    """Return whether a model has routed experts; one without is a dense model."""
    return m.moe.experts > 0


def is_dense(m: ModelConfig, layer: int) -> bool:
    """Return whether a layer has a dense MLP instead of experts."""
    return not has_experts(m) or layer < m.moe.dense_layers


ATTENTION = "attention"  # the mixer of a layer that has no other: `model.attention`


def mixer(m: ModelConfig, layer: int) -> str:
    """Name of the mixer of a layer, a key of `configs.tables.layers.MIXERS`."""
    every = m.linear_attention.full_attention_interval
    return "linear_attention" if layer < m.layers and (layer + 1) % every else _other(m)


def _other(m: ModelConfig) -> str:
    """Mixer of the layers without linear attention."""
    return "sparse_attention" if m.attention.sparse else ATTENTION


def mixer_layers(m: ModelConfig, *, mtp: bool = True) -> Counter[str]:
    """Number of layers with each mixer; `mtp=False` leaves out those of multi-token prediction."""
    own = m.layers - m.layers // m.linear_attention.full_attention_interval
    found = {"linear_attention": own, _other(m): m.layers - own + (m.mtp_layers if mtp else 0)}
    return Counter({name: number for name, number in found.items() if number})


def has_window(a: AttentionConfig, layer: int) -> bool:
    """Return whether the attention of a layer has a sliding window.

    Megatron-Core counts layers of multi-token prediction from 0 again.
    """
    return a.window > 0 and (a.window_every == 1 or (layer + 1) % a.window_every > 0)


def mlp_layers(m: ModelConfig, *, mtp: bool = True) -> tuple[int, int]:
    """(dense, MoE) layers of a model; `mtp=False` leaves out those of multi-token prediction."""
    layers = m.layers + (m.mtp_layers if mtp else 0)
    dense = m.moe.dense_layers if has_experts(m) else layers
    return dense, layers - dense


def of_variants(m: ModelConfig) -> list[Any]:
    """Each change of `model.variants`, an `extras.variants.facts.Variant`."""
    texts = (text.partition(":") for text in m.variants)
    return [resolve_name(VARIANTS[name])(int(size)) for name, _, size in texts]


def expert_hidden(m: ModelConfig) -> int:
    """Channels of the tokens that routed experts read and write, and that are exchanged."""
    return min([m.hidden, *(v.expert_hidden(m) for v in of_variants(m))])


class Mixer:
    """Arithmetic of a mixer (`configs.tables.layers`), without torch.

    The defaults are those of a mixer without such a part or limit.
    """

    core = False  # it has core attention: its queries see the keys of all context ranks

    def matrices(self, m: ModelConfig) -> list[tuple[int, int]]:
        """(inputs, outputs) of its projections; that of the output comes last."""
        raise NotImplementedError

    def input_parts(self, m: ModelConfig) -> list[tuple[int, int]]:
        """(number, outputs) of matrices that the first projection joins; empty if it is one."""
        return []

    def vectors(self, m: ModelConfig) -> int:
        return 0

    def norms(self, m: ModelConfig) -> int:
        """Elements of its norms."""
        return 0

    def products(self, m: ModelConfig) -> int:
        """Multiply-adds of a token beside projections and core attention."""
        return 0

    def core_share(self, m: ModelConfig, length: int) -> float:
        """Its products of queries and keys, as a share of those of core attention."""
        return 1.0

    def heads(self, m: ModelConfig) -> dict[str, int]:
        """Heads that tensor and context ranks share out, by knob."""
        return {}

    def exchanged_channels(self, m: ModelConfig) -> int:
        """Channels of a token that context ranks exchange between tokens and heads, in and out."""
        return 0

    def problems(self, cfg: Config) -> Iterator[str]:
        """Problems of a configuration with it; repairs `cfg` on the way."""
        return iter(())

    def not_capturable(self, cfg: Config) -> str | None:
        """Reason why a CUDA graph cannot capture it, or None."""
        return None

    def not_in_fp8_of_megatron(self, m: ModelConfig) -> str | None:
        """Reason why Megatron-Core takes no FP8 recipe for a model with it, or None."""
        return None

    def megatron_fields(self, m: ModelConfig) -> dict[str, Any]:
        """Fields of Megatron-Core's TransformerConfig."""
        return {}

    def weights(self, m: ModelConfig) -> int:
        return sum(inputs * outputs for inputs, outputs in self.matrices(m))

    def parameters(self, m: ModelConfig) -> int:
        return self.weights(m) + self.vectors(m)


@functools.cache
def mixer_of(name: str) -> Mixer:
    """The arithmetic of a mixer by its name in `configs.tables.layers`."""
    return cast(Mixer, resolve_name(MIXERS[name].counts)())
