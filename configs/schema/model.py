"""Architecture: attention, experts and their router."""

from dataclasses import dataclass, field
from typing import Any

from phalanx.configs.fields import knob
from phalanx.configs.tables.activations import ACTIVATIONS


@dataclass
class YarnConfig:
    """YaRN context extension of the rotary embedding (arXiv 2309.00071)."""

    factor: float = knob(1.0, at_least=1)
    """Context extension factor, at least 1; the default of 1 turns YaRN off."""
    original_context: int = knob(4096, at_least=1)
    """Context length, in tokens, that the rotary base was chosen for."""
    beta_fast: float = knob(32.0, above_zero=True)
    """Frequencies with more rotations than this over the original context stay unchanged."""
    beta_slow: float = knob(1.0, above_zero=True)
    """Frequencies with fewer rotations than this over the original context are divided by `factor`.

    Frequencies between `beta_slow` and `beta_fast` are interpolated.
    """
    mscale: float = 1.0
    """Coefficient m in the numerator of the attention temperature, 0.1 * m * ln(factor) + 1."""
    mscale_all_dim: float = 0.0
    """Coefficient in the denominator of the attention temperature (DeepSeek).

    The default of 0 makes the denominator 1.
    """
    truncate: bool = True
    """Round the range of interpolated dimensions to whole dimensions (false for GPT-OSS)."""


@dataclass
class AttentionConfig:
    """Attention of every layer: grouped-query or multi-head latent (arXiv 2412.19437)."""

    kind: str = knob("gqa", choices=("gqa", "mla"))
    """`gqa` is grouped-query attention, `mla` is multi-head latent attention."""
    heads: int = knob(8, at_least=1, largest_published=128)  # MT-NLG, DeepSeek-V3
    """Number of query heads."""
    kv_heads: int = knob(8, at_least=1)
    """Number of key and value heads of `gqa`; it must divide `heads`. `mla` ignores it."""
    head_dim: int = knob(64, at_least=1)
    """Channels of one head of `gqa`; it must be even."""
    q_lora_rank: int = 0
    """Rank of the compressed query of `mla`; 0 projects the queries directly."""
    kv_lora_rank: int = knob(512, at_least=1)
    """Rank of the compressed keys and values of `mla`."""
    qk_nope_dim: int = knob(128, at_least=1)
    """Channels of an `mla` query or key head that carry no position."""
    qk_rope_dim: int = knob(64, at_least=1)
    """Channels of an `mla` query or key head with rotary embedding; the number must be even."""
    v_dim: int = knob(128, at_least=1)
    """Channels of an `mla` value head."""
    qk_norm: bool = False
    """Apply RMSNorm to queries and keys of `gqa`, each head by itself (Qwen3) by default.

    `mla` always normalises its compressed vectors.
    """
    qk_norm_over: str = knob("head", choices=("head", "projection"))
    """Channels that `qk_norm` normalises together: of a `head`, or of the whole `projection`.

    `projection` is the norm of OLMoE and MiniMax-M2, over all heads. Tensor parallelism would split
    it.
    """
    qkv_bias: bool = False
    """Use biases in the projections to queries, keys and values of `gqa` alone (GLM-4.5)."""
    window: int = 0
    """Sliding window, in tokens: a query attends to itself and the `window - 1` tokens before it.

    The default of 0 attends to all earlier tokens.
    """
    window_every: int = knob(1, at_least=1)
    """With a window, every `window_every`-th layer attends to all earlier tokens instead.

    1 gives every layer the window; 2 alternates (GPT-OSS).
    """
    sinks: bool = False
    """Add one learnable logit per head to the softmax denominator (attention sinks, GPT-OSS)."""
    rope_theta: float = knob(10000.0, above_zero=True)
    """Base of the rotary embedding."""
    rotary_dim: int = 0
    """Leading channels of a `gqa` head with rotary embedding; the number must be even.

    The default of 0 rotates all channels, as YaRN does.
    """
    output_gate: bool = False
    """Multiply the output of each `gqa` head by the sigmoid of a gate of its own (Qwen3-Next).

    The gate is projected from the input of the layer, beside queries, keys and values.
    """
    yarn: YarnConfig = field(default_factory=YarnConfig)
    """YaRN context extension."""
    sparse: dict[str, Any] = field(default_factory=dict)
    """Sparse attention of DeepSeek-V3.2 and GLM-5: an indexer chooses the keys of each query.

    As in {heads: 64, dim: 128, top_k: 2048, interleaved: false, phase: sparse, loss: 1.0}, the
    defaults of its fields (extras/sparse_attention); {} attends to all keys.
    """


@dataclass
class LinearAttentionConfig:
    """Gated DeltaNet (arXiv 2412.06464) in place of `model.attention` in most layers.

    Heads have 128 channels, and the convolution reaches over four tokens.
    """

    full_attention_interval: int = knob(1, at_least=1)
    """Every so many layers one has `model.attention`; those between have linear attention.

    The default of 1 has no linear attention, 4 has three such layers and then another (Qwen3-Next).
    """
    key_heads: int = knob(16, at_least=1)
    """Number of query and key heads of linear attention."""
    value_heads: int = knob(32, at_least=1)
    """Number of value heads of linear attention, each with a state; a multiple of `key_heads`."""


@dataclass
class RouterConfig:
    """Choice of the top-k experts of a token, and balance of the load of the experts."""

    score: str = knob("softmax", choices=("softmax", "sigmoid"))
    """Function from router logits to scores: `softmax`, or `sigmoid` (DeepSeek-V3)."""
    softmax_over: str = knob("all", choices=("all", "topk"))
    """Softmax over `all` experts before the top-k, or over the `topk` logits after it (GPT-OSS)."""
    normalize: bool = True
    """Divide the top-k probabilities by their sum; no effect with `softmax_over=topk` or `top_k=1`.

    A single normalised expert would always have the weight 1, and the router no gradient.
    """
    groups: int = knob(1, at_least=1)
    """Number of expert groups of group-limited routing; must divide `experts`; 1 turns it off."""
    group_topk: int = knob(1, at_least=1)
    """Number of groups that a token may choose experts from.

    The score of a group is the sum of its `top_k / group_topk` best experts.
    """
    scale: float = knob(1.0, above_zero=True)
    """Factor on the top-k probabilities (`routed_scaling_factor` of DeepSeek-V3)."""
    bias_rate: float = 0.0
    """Step size of the per-expert bias that balances without a loss (arXiv 2408.15664).

    It needs `score=sigmoid`. The default of 0 uses no bias. At 1e-3, without `aux_loss`, a mixture
    of 738 M parameters needed 0.93 of the time for its loss (docs/proof/variants.md).
    """
    aux_loss: float = 0.0
    """Coefficient of the load-balancing loss over a micro-batch (Switch, arXiv 2101.03961)."""
    seq_aux_loss: float = 0.0
    """Coefficient of the load-balancing loss over each sequence (DeepSeek-V3)."""
    global_aux_loss: float = 0.0
    """Coefficient of the load-balancing loss over the global batch so far (arXiv 2501.11873).

    Megatron-Core divides this loss once too often by the number of data-parallel replicas, with
    `kernels.backend=megatron` here too. Divide a coefficient taken from there by that number.
    """
    z_loss: float = 0.0
    """Coefficient of the router z-loss, which keeps the logits small (ST-MoE, arXiv 2202.08906)."""
    rounding: str = knob("none", choices=("none", "nearest", "up", "down"))
    """Round the tokens of each expert to whole GEMM tiles: `none`, `nearest`, `up` or `down`.

    This is token rounding (arXiv 2512.14080) over the micro-batch of a rank, in training only. The
    grouped GEMMs of the experts then have no padded tiles. On two H200s `nearest` makes 1.036 times
    the tokens of `none` with GPT-OSS-20B's layers and 0.968 times with Moonlight-16B-A3B's.
    """
    rounding_tile: int = knob(128, at_least=1)
    """Tile size, in tokens, for `rounding`. At most as many tokens of a micro-batch as choose an
    expert on average; with `nearest` and `up` twice as many."""
    force_balance: bool = False
    """Replace the chosen experts by a perfectly balanced choice. For benchmarks only."""
    replay: str = ""
    """File of a recorded routing (`run.record_routing`) whose choices replace the router's own.

    For benchmarks with the load of a trained model, and for debugging; empty: the router chooses.
    """


@dataclass
class MoEConfig:
    """Experts of every MoE layer."""

    experts: int = knob(8, largest_published=2_048)  # Switch-C
    """Number of routed experts of a layer; 0 makes a dense model (docs/models.md)."""
    top_k: int = knob(2, at_least=1)
    """Number of routed experts that a token uses."""
    ffn: int = knob(512, at_least=1, largest_published=81_920)
    """Intermediate width of one routed expert."""
    shared_ffn: int = knob(0, largest_published=81_920)
    """Total intermediate width of the shared experts, which process every token; 0 has none."""
    shared_gate: bool = False
    """Multiply the output of the shared experts by the sigmoid of a gate of each token."""
    dense_layers: int = 0
    """Number of leading layers that have a dense MLP instead of experts."""
    activation: str = knob("swiglu", choices=(ACTIVATIONS,))
    """Activation of every MLP, an entry of configs/tables/activations.py."""
    activation_alpha: float = knob(1.702, above_zero=True)
    """Slope inside the sigmoid of `quick_geglu`; the other activations ignore it."""
    activation_limit: float = 0.0
    """Upper limit of the gate, and limit of the linear half on both sides; 0 does not clamp."""
    activation_offset: float = 0.0
    """Constant added to the linear half after the clamp (1 for GPT-OSS)."""
    router: RouterConfig = field(default_factory=RouterConfig)
    """Routing and load balancing."""


@dataclass
class ModelConfig:
    """Architecture. The file of a published model equals its published configuration."""

    name: str = "tiny"
    """Name of the model in logs and records."""
    vocab_size: int = knob(0, largest_published=1_000_000)  # XLM-V
    """Number of tokens in the vocabulary; it must be a multiple of `parallel.tensor`.

    0, as the small models have it, takes that of the data: 256 for bytes and random tokens, else
    the number of ids of the tokenizer of `data.blend`, rounded up to a multiple of 128.
    """
    layers: int = knob(2, at_least=1, largest_published=128)  # Llama 3.1 405B has 126
    """Number of transformer layers, without multi-token-prediction layers."""
    hidden: int = knob(128, at_least=1, largest_published=20_480)  # MT-NLG
    """Width of the residual stream."""
    dense_ffn: int = knob(512, at_least=1, largest_published=81_920)  # MT-NLG
    """Intermediate width of the MLP of a dense layer."""
    bias: bool = False
    """Use biases in attention, router and MLPs (GPT-OSS)."""
    norm_eps: float = knob(1e-5, above_zero=True)
    """Epsilon of every RMSNorm."""
    norm_zero_centered: bool = False
    """Store the weights of norms less 1, so that they begin at 0 (Qwen3-Next).

    The norm behind linear attention keeps its weights as they are.
    """
    tie_embeddings: bool = False
    """Share the weights of the input embedding and the output projection."""
    mtp_layers: int = 0
    """Number of multi-token-prediction layers (DeepSeek-V3)."""
    mtp_loss: float = 0.1
    """Weight of the multi-token-prediction loss."""
    variants: list[str] = field(default_factory=list)
    """For experiments: `[latent:256]`; `[mup:256]`: rates of that width."""
    init_std: float = knob(0.02, above_zero=True)
    """Standard deviation of initial weights; output projections divide it by sqrt(2 * layers)."""
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    """Attention."""
    linear_attention: LinearAttentionConfig = field(default_factory=LinearAttentionConfig)
    """Linear attention of the other layers, if there are any."""
    moe: MoEConfig = field(default_factory=MoEConfig)
    """Experts and router."""
