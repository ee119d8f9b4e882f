"""The mixers of a layer, which let its tokens see each other: one entry each.

An entry names what it needs by import path, so that reading it imports neither torch nor code of
other mixers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from phalanx.configs.tables.backends import Implementation, Package


@dataclass(frozen=True)
class MixerFacts:
    """Facts of a mixer."""

    meaning: str  # its name in messages
    counts: str  # `module:class`, a subclass of `configs.arithmetic.layers.Mixer`
    saved_tensors: str
    """Path of `(cfg: Config, counts: moe.saved_tensors.TokenCounts) -> SavedTensors`."""
    backward_bytes: str = ""
    """Path of `(cfg: Config, counts: TokenCounts) -> int`: peak of its backward pass beside the
    saved tensors. Empty: less than that of an MLP."""
    spec: str = ""
    """Path of `(backend: str, attention: ModuleSpec, m: ModelConfig) -> ModuleSpec`. Empty: the
    `attention` that is given, which is core attention between projections."""
    backends: Mapping[str, Implementation] = field(default_factory=dict)  # of its spec, best first
    regions: str = ""
    """Path of `(m: ModelConfig, key: str, name: str) -> Iterator[moe.hf.weights.TensorRegion]`:
    its tensors of a checkpoint and of a folder of Hugging Face. Empty: those of core attention."""
    cached: str = ""
    """Path of `(layer: Module, reading: moe.inference.cache.Reading) -> None`: gives a layer of
    `spec` a cache for new tokens. Empty: that of keys and values."""
    trains: str = ""  # path of `(cfg: Config, engine: Engine) -> None`: what else a run needs
    quantized: bool = True  # its projections follow `precision.dense`; else they stay in bf16
    tiny: str = ""  # `model=` of one that a CPU can train; empty: any


@dataclass(frozen=True)
class LinearAttentionBackend(Implementation):
    """An implementation of linear attention."""

    implementation: str = ""  # module with the functions of `extras.linear_attention.gated_delta`
    documents: bool = True  # its convolution stops at the starts of documents


MIXERS: dict[str, MixerFacts] = {
    "attention": MixerFacts(
        "attention",
        counts="phalanx.configs.arithmetic.attention:Attention",
        saved_tensors="phalanx.moe.saved_tensors:attention_saved",
        backward_bytes="phalanx.moe.saved_tensors:attention_backward",
    ),
    "linear_attention": MixerFacts(
        "linear attention",
        counts="phalanx.extras.linear_attention.facts:LinearAttention",
        saved_tensors="phalanx.extras.linear_attention.facts:saved_tensors",
        backward_bytes="phalanx.extras.linear_attention.facts:backward_bytes",
        spec="phalanx.extras.linear_attention.gated_delta_net:spec",
        backends={
            "fla": LinearAttentionBackend(
                "phalanx.extras.linear_attention.fla:fla",
                "flash-linear-attention",
                package=Package("flash_linear_attention", "fla"),
                implementation="phalanx.extras.linear_attention.fla",
                cuda=True,
                bf16=True,
                documents=False,
            ),
            "torch": LinearAttentionBackend(
                "phalanx.kernels.availability:always",
                "plain PyTorch",
                implementation="phalanx.extras.linear_attention.torch_delta",
            ),
        },
        regions="phalanx.extras.linear_attention.facts:regions",
        cached="phalanx.extras.linear_attention.cached:install",
        quantized=False,
        tiny="tiny_qwen3_next",
    ),
    "sparse_attention": MixerFacts(
        "sparse attention",
        counts="phalanx.extras.sparse_attention.facts:SparseAttention",
        saved_tensors="phalanx.extras.sparse_attention.facts:saved_tensors",
        backward_bytes="phalanx.extras.sparse_attention.facts:backward_bytes",
        spec="phalanx.extras.sparse_attention.latent:spec",
        regions="phalanx.extras.sparse_attention.facts:regions",
        cached="phalanx.extras.sparse_attention.cached:install",
        trains="phalanx.extras.sparse_attention.training:install",
        quantized=False,
        tiny="tiny_deepseek_v32",
    ),
}
"""Mixers by name: `configs.arithmetic.layers.mixer` names that of a layer."""
