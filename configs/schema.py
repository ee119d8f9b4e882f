"""Every knob of Phalanx: typed, with its documentation directly under the field.

The YAML groups (model/, kernels/, precision/, parallel/, data/, optim/, run/, experiment/) only set
values of these dataclasses. `configs.validate` checks a composed configuration as a whole. The
tables of docs/configuration.md are generated from this file, so a field without a docstring fails
the tests.
"""

from dataclasses import dataclass, field

from phalanx.configs.fields import knob
from phalanx.configs.tables.activation_memory import OFFLOAD, RECOMPUTE
from phalanx.configs.tables.activations import ACTIVATIONS
from phalanx.configs.tables.backends import ATTENTION_BACKENDS, EXPERT_BACKENDS, NORM_BACKENDS
from phalanx.configs.tables.machines import MACHINES
from phalanx.configs.tables.optimizers import OPTIMIZERS
from phalanx.configs.tables.recipes import RECIPES
from phalanx.configs.tables.transports import TRANSPORTS


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

    It needs `score=sigmoid`. The default of 0 uses no bias.
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
    grouped GEMMs of the experts then have no padded tiles.
    """
    rounding_tile: int = knob(128, at_least=1)
    """Tile size, in tokens, for `rounding`."""
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
    init_std: float = knob(0.02, above_zero=True)
    """Standard deviation of initial weights; output projections divide it by sqrt(2 * layers)."""
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    """Attention."""
    linear_attention: LinearAttentionConfig = field(default_factory=LinearAttentionConfig)
    """Linear attention of the other layers, if there are any."""
    moe: MoEConfig = field(default_factory=MoEConfig)
    """Experts and router."""


@dataclass
class SmMarginConfig:
    """Number of SMs that `fused` and `cudnn` expert kernels leave free, of `cudnn` in pairs."""

    forward: int = 0
    """SMs that the fused expert kernels leave free in the forward pass, for example for NCCL."""
    dgrad: int = 0
    """SMs that the fused kernels of the data gradients leave free in the backward pass."""
    wgrad: int = 0
    """SMs that the fused kernels of the weight gradients leave free in the backward pass; with
    `cudnn` these leave none."""


@dataclass
class KernelsConfig:
    """Which implementation runs each operation. A forced choice that cannot run is an error."""

    backend: str = knob("auto", choices=("auto", EXPERT_BACKENDS))
    """Experts: an entry of configs/tables/backends.py, or `auto` for the best that can run."""
    attention: str = knob("auto", choices=("auto", ATTENTION_BACKENDS))
    """Core attention: an entry of configs/tables/backends.py, or `auto` for the best that can run.

    Linear attention runs by flash-linear-attention where it can, with `reference` always by torch.
    """
    norm: str = knob("auto", choices=("auto", NORM_BACKENDS))
    """RMSNorm: an entry of configs/tables/backends.py, or `auto` for the best that can run."""
    gradient_accumulation_fusion: bool = True
    """On a GPU, the weight-gradient kernels add directly into Megatron-Core's gradient buffers."""
    sm_margin: SmMarginConfig = field(default_factory=SmMarginConfig)
    """SMs that the fused expert kernels leave free."""


@dataclass
class PrecisionConfig:
    """Number formats. All knobs but `recipe` are switches of recipes (docs/precision.md)."""

    recipe: str = knob(
        "bf16",
        choices=(RECIPES,),
        formerly="run.precision",
        group="precision",
    )
    """Recipe, an entry of configs/tables/recipes.py; set it as a group: `precision=fp8_block`.

    Recipes other than `bf16` and `fp32` are `bf16` whose linear layers multiply quantized operands
    with fp32 sums.
    """
    grad_format: str = knob("e4m3", choices=("e4m3", "e5m2"))
    """FP8 format of gradients: `e4m3`, or `e5m2`, which has one bit less.

    It reaches 14 powers of two further down, for gradients that become zero within their blocks.
    """
    wgrad: str = knob("fp8", choices=("fp8", "bf16"))
    """Operands of weight gradients: `fp8`, which is the recipe's format, or `bf16`.

    These sums run over tokens and enter the weights directly; `bf16` rules FP8 out as a cause.
    """
    wgrad_blocks: str = knob("square", choices=("square", "vector"))
    """Blocks of the operands of weight gradients: `square`, 128 tokens x 128 channels, or `vector`.

    `vector` is a channel of 128 tokens, as in Transformer Engine, which `kernels=megatron` always
    has. As scales are powers of two both err alike, and one scale for a tile is cheaper.
    """
    hidden: str = knob("bf16", choices=("bf16", "fp8"))
    """Format in which the input of the experts' activation is saved for backward: `bf16` or `fp8`.

    It is most of what a layer saves. `fp8` rounds the input of gradients, not the output.
    """
    dispatch: str = knob("auto", choices=("auto", "bf16", "fp8"))
    """Format of tokens and gradients on their way to the experts: `bf16`, or `fp8` with its scales.

    `auto` is `fp8` with `fp8_block`, whose experts would round them anyway, so that no bit changes;
    with `precision.wgrad=bf16` some do, and it is `bf16`. Sums travel back in bf16.
    """
    dense: str = knob("fp8", choices=("fp8", "bf16"))
    """Attention projections, dense MLPs, shared experts: `fp8`, as the routed experts, or `bf16`.

    With `kernels=megatron` they are bf16 in any case, as those of linear attention always are.
    """
    bf16_first_layers: int = 0
    """Number of first decoder layers in bf16, as Nemotron-H has some (arXiv 2504.03624)."""
    bf16_last_layers: int = 0
    """Number of last decoder layers in bf16; layers of multi-token prediction do not count."""
    stochastic_rounding: bool = True
    """Round gradients of `nvfp4` up or down at random, so that they are right in the mean."""
    weights: int | str = knob("auto", choices=("auto", "scratch", "resident"))
    """Number of layers that keep FP8 copies of weights, `resident` for all, `scratch` for none.

    They are spread evenly over the model, make the copies once a step and need 2 bytes a parameter,
    as GEMMs read them in two layouts; other layers make them for each use, in memory that they
    share. `auto` has as many as fit.
    """


@dataclass
class ParallelConfig:
    """Layout of ranks. Data parallelism takes the ranks that the other sizes leave."""

    world_size: int = 0
    """Number of ranks to lay out; 0 takes the number that the launcher started.

    Set it to check a layout, or to estimate it with `run.dry_run`, without its machines. There, and
    without a launcher, 0 takes the number that `experiment` is laid out for, by its name.
    """
    tensor: int = knob(1, at_least=1)
    """Tensor-parallel size of attention and dense MLPs; above 1 with sequence parallelism."""
    pipeline: int = knob(1, at_least=1)
    """Number of pipeline stages."""
    virtual_pipeline: int = knob(1, at_least=1)
    """Number of model chunks per pipeline stage (interleaved schedule)."""
    pipeline_layout: str = ""
    """Pipeline layout of Megatron-Core, as in `Et|(tt|)*30mL`; empty balances the work of stages.

    The letters are E embedding, t transformer layer, m multi-token prediction and L loss; | ends a
    stage.
    """
    context: int = knob(1, at_least=1)
    """Context-parallel size: the number of ranks that share a sequence; in linear attention they
    share out key and value heads."""
    expert: int = 0
    """Expert-parallel size: the number of ranks that the experts of a layer are spread over.

    The default of 0 takes the largest size up to 8 that divides the number of experts and the ranks
    of a pipeline stage.
    """
    dispatch: str = knob("auto", choices=("auto", TRANSPORTS))
    """Transport between tokens and experts, an entry of configs/tables/transports.py.

    `auto` takes the best that can run. All ranks of a group use the same transport, and the start
    page says which and why.
    """
    rail: str = knob("collective", choices=("collective", "gin"))
    """Engine by which `hier` exchanges rows between nodes.

    `collective` is an all-to-all of blocks, by NCCL or gloo. `gin` sends the rows that hold tokens
    by NCCL's device API, from a kernel, in waves; it needs further packages, and has not run on
    GPUs yet (docs/dispatch.md).
    """
    save_x: str = knob("redispatch", choices=("redispatch", "keep"))
    """How `symm` provides received tokens to the backward pass: `redispatch` resends them.

    `keep` holds them in memory instead. `hier` resends them inside a node, not over the network.
    """
    comm_sms: int | str = knob("auto", choices=("auto",))
    """Number of SMs that `symm` uses to exchange tokens while the fused experts run on the others.

    `auto` is 16 where `symm` meets fused experts, and 0 elsewhere; 0 exchanges on all SMs, without
    overlap. With `deepep` it is the number of SMs of its kernels, 0 for its default. `local` and
    `alltoall` refuse a number. If `parallel.dispatch=auto` chooses one of them, or the experts are
    not fused, the start page says that it has no effect.
    """
    overlap_microbatches: str = knob("auto", choices=("auto", "on", "off"))
    """Run the forward pass of a micro-batch beside the backward pass of another one.

    Tokens of one are exchanged while the GPU computes the other (docs/dispatch.md). Results are the
    same bit for bit; activations of two micro-batches are in memory, with pipeline stages those of
    up to twice as many as otherwise. `auto` is `on` with `alltoall` and `hier` where the estimate
    of `run.dry_run` expects a shorter step and has memory for it.
    """
    capacity_factor: float = knob(1.5, at_least=1)
    """Rows of the expert buffers, as a multiple of the rows under perfectly balanced routing.

    Blocks of rows that `hier` sends between nodes have 0.48 of the excess: 1.24 x at 1.5. A step
    that needs more rows is rerun with larger buffers; no token is dropped.
    """
    expert_replication: int | str = knob(0, choices=("auto",), formerly="parallel.clones")
    """Replica slots of a rank for copies of other ranks' hot experts, micro-batch by micro-batch.

    With uneven routing ranks then share their rows, and results are the same bit for bit
    (docs/dispatch.md). 0 makes no copies, and neither does `auto`: they cost a step more than they
    save where ranks are nearly even. A number of slots works with `symm` and `alltoall`, and with
    `hier` in each node by itself. `save_x=keep` keeps the replicas' weights.
    """
    distributed_optimizer: bool = True
    """Shard the optimizer state over the data-parallel ranks."""
    overlap: bool = True
    """Overlap gradient reduction and parameter gathering with computation."""
    delay_wgrad: str = knob("auto", choices=("auto", "on", "off", "pairs"))
    """Weight gradients while a pipeline stage would wait: `on`, `off`, `pairs` or `auto`.

    A stage then sends the gradient of its input before it computes those of its weights, and keeps
    their operands until then (docs/design.md); results are the same bit for bit. Without stages
    they run beside exchanges of `alltoall` and `hier`, unless it is `off`. `pairs` also
    computes those of the experts for two micro-batches in one pass over their fp32 sums, which pays
    if experts have few rows, and without stages too. A sum is then rounded once for both, so that
    results differ in the last bits. `auto` takes with pipeline stages what pays and fits into
    memory.
    """
    grad_dtype: str = knob("fp32", choices=("fp32", "bf16"))
    """Dtype in which gradients are accumulated and reduced: `fp32` or `bf16`."""
    timeout: int = knob(600, at_least=1)
    """Seconds after which a collective that has not finished ends the run."""


@dataclass
class DataConfig:
    """Source of tokens, and batching."""

    source: str = knob("embedded", choices=("embedded", "indexed", "synthetic"))
    """`embedded` (bytes of the Python library), `indexed` (Megatron .bin/.idx) or `synthetic`.

    `embedded` and `synthetic` are for tests and benchmarks; long runs with checkpoints need
    `indexed`.
    """
    blend: list[str] = field(default_factory=list)
    """Paths of `indexed` data without .bin, or weights and paths in turn: [0.7, a, 0.3, b].

    An address of an object store (s3://bucket/prefix) is read from there (docs/data.md). Without
    weights the sources are mixed in proportion to their tokens. The start page shows tokens
    and epochs of each.
    """
    stages: list[str] = field(default_factory=list)
    """Weights of `data.blend` that change on the way: `[80e9:0.5/0.5]` from 80 billion tokens on.

    Each stage has the weight of every source, 0 for one that it does not read; the weights of
    `data.blend`, which may have a 0 then too, hold before the first. A run that resumes may change
    stages that have not begun (docs/data.md). Validation keeps the weights of `data.blend`.
    """
    split: str = "98,2"
    """Relative sizes of the training and validation parts of each source."""
    validation: list[str] = field(default_factory=list)
    """Data that `run.eval_interval` validates on in place of the validation part, as `blend` is
    written; `split=1` then trains on all of `blend`.

    Each source has its own loss, and bits per byte where the bytes of its text are known.
    """
    cache: str = ""
    """Folder of built corpora and index files; empty uses .cache/phalanx in the home folder.

    Copies of the index of addresses in `data.blend` are there as well.
    """
    sequence_length: int = knob(256, at_least=1, largest_published=10_000_000)  # Llama 4
    """Number of tokens in a sequence."""
    micro_batch: int = knob(4, at_least=1)
    """Number of sequences that a rank processes in one forward pass."""
    global_batch: int = knob(32, at_least=1)
    """Number of sequences in one optimizer step, over all ranks and micro-batches."""
    batch_warmup: list[str] = field(default_factory=list)
    """Smaller global batches at the start: `[64:1e9,128:3e9]` has 64 sequences up to a billion
    tokens, and 128 up to three.

    `data.global_batch` comes after them. The number of micro-batches changes between two steps;
    captured steps are then captured anew, which takes some seconds.
    """
    seed: int = 1234
    """Seed of the order of documents and samples."""
    document_mask: bool = False
    """Attention stops at the ends of documents, positions restart, no token predicts another text.

    Off, a token attends to all before it in its sequence, whatever document they are of.
    """
    max_documents: int = 0
    """Most documents of a sequence that `fa4` tells apart; 0 is a 32nd of its tokens, at least 16.

    A sequence with more ends the run with the number to set. Each takes 128 rows of scratch memory
    in the backward pass of attention. Other backends tell any number apart and ignore this.
    """


@dataclass
class OptimConfig:
    """Optimizer and learning-rate schedule."""

    kind: str = knob("adamw", choices=(OPTIMIZERS,))
    """Optimizer, an entry of configs/tables/optimizers.py.

    Training cannot go on from a checkpoint of another kind.
    """
    lr: float = knob(3e-3, above_zero=True)
    """Peak learning rate."""
    min_lr: float = 3e-4
    """Learning rate at the end of the decay."""
    warmup_steps: int = 10
    """Number of steps of linear warm-up from zero; it always ends before the decay does.

    With `WSD` it may not reach into the decay.
    """
    decay_steps: int = 0
    """Step at which the learning rate reaches `min_lr`; 0 takes `run.steps`.

    Set it for a run that will be extended: otherwise a larger `run.steps` changes the curve.
    """
    warmup_tokens: float = 0.0
    """Tokens of the linear warm-up, in place of `warmup_steps`; 0 takes the steps.

    The warm-up ends with the step that reaches them, as the decay does with `decay_tokens`.
    """
    decay_tokens: float = 0.0
    """Tokens at which the learning rate reaches `min_lr`, in place of `decay_steps`."""
    schedule: str = knob(
        "cosine", choices=("cosine", "linear", "constant", "inverse-square-root", "WSD")
    )
    """Decay of the learning rate: `cosine`, `linear`, `constant`, `inverse-square-root` or `WSD`.

    All but `constant` fall to `min_lr` at `decay_steps`, `inverse-square-root` by its square root
    shifted and scaled. `WSD` (warm-up, stable, decay) decays over the last tenth of `decay_steps`.
    """
    weight_decay: float = 0.1
    """Decoupled weight decay, of AdamW and of Muon; biases and norms have none."""
    beta1: float = knob(0.9, below_one=True)
    """Decay rate of the first moment, below 1."""
    beta2: float = knob(0.95, below_one=True)
    """Decay rate of the second moment, below 1."""
    eps: float = knob(1e-8, above_zero=True)
    """Epsilon in the denominator of AdamW."""
    momentum: float = knob(0.95, below_one=True)
    """Decay rate of Muon's momentum, a running mean of gradients; below 1."""
    nesterov: bool = True
    """Nesterov's form of Muon's momentum."""
    ns_steps: int = knob(5, at_least=1)
    """Newton-Schulz iterations by which Muon makes an update orthogonal, in the run's own dtype."""
    moments: str = knob("fp32", choices=("fp32", "bf16"))
    """Dtype of the moments: `fp32`, or `bf16`, which saves 6 bytes per parameter (of Muon's, 4).

    With `bf16` the fp32 master weight is stored as the bf16 weight and its missing 16 bits, without
    loss (arXiv 2412.19437).
    """
    clip_grad: float = 1.0
    """Limit of the global gradient norm; 0 turns clipping off."""
    ema: float = knob(0.0, below_one=True)
    """Decay of an exponential moving average of the weights, as in 0.999; the default 0 keeps none.

    Each rank keeps fp32 averages of its shard on the device, 4 bytes a parameter, and checkpoints
    have them. `scripts/checkpoint.py average CHECKPOINT --ema --out FOLDER` makes weights of them.
    """
    qk_clip: float = 0.0
    """Largest attention logit of a head (QK-clip, arXiv 2507.20534, which has 100); 0 has no limit.

    A head that exceeds it has its query and key weights rescaled after the update. With any
    optimizer; not with `model.attention.qk_norm`, which bounds the logits itself.
    """
    max_logit_every: int = 0
    """Number of steps between measurements of the largest attention logits, which are logged.

    0 measures none, and with `qk_clip` those of every step. QK-clip clips in measured steps alone.
    """


@dataclass
class RunConfig:
    """One run: length, checkpoints, logging."""

    name: str = "default"
    """Name of the run and of its folder below `run.dir`.

    The same name continues the same run. Only one launch at a time can use a run folder.
    """
    dir: str = "runs"
    """Folder that holds the folders of all runs."""
    checkpoints: str = ""
    """Address that checkpoints go to, as in s3://bucket/runs; empty keeps them in the run folder.

    Those of a run are below `<run.checkpoints>/<run.name>`. Each rank writes its part to the run
    folder first, which then needs not be shared by hosts (docs/checkpoints.md).
    """
    steps: int = knob(100, at_least=1)
    """Number of optimizer steps of the whole run, including those before a resume."""
    seed: int = 1
    """Seed of the initial weights, which are the same for every layout."""
    device: str = knob("auto", choices=("auto", "cuda", "cpu"))
    """`cuda`, `cpu`, or `auto`: CUDA if the machine has a GPU."""
    recompute: list[str] = knob([], choices=(RECOMPUTE,))
    """Parts that the backward pass recomputes, as in `[norm,expert_h]`; one name needs no brackets.

    `norm`, `mla_up` (from compressed vectors to queries, keys, values), `attention`, `mlp` (dense
    and shared), `expert_h` (input of the experts' activation), `moe_act` (of `kernels=megatron`),
    `moe` or `full` layers; `none` is `[]` (docs/memory.md has what each saves and costs).
    """
    offload: list[str] = knob([], choices=(OFFLOAD,))
    """Tensors that wait in pinned host memory for the backward pass, written as `recompute` is.

    `residual` (inputs of norms), `attention` (queries, keys, values, result) and `expert_h`. Copies
    run beside other work, in captured steps too. On a CPU they are copies.
    """
    graph: str = knob("auto", choices=("auto", "off", "full_iteration"))
    """CUDA graphs: `off`, `full_iteration` for forward and backward of all micro-batches as one and
    the update as another, or `auto`.

    `auto` captures where it can; elsewhere the start page says why not. Two eager steps come first,
    and the capture takes some seconds, once and after each rerun of a step.
    """
    deterministic: bool = False
    """Use deterministic algorithms only; some operations become slower."""
    resume: str = "auto"
    """Start of a run: from scratch (`auto`, `never`), or the folder or address of a checkpoint.

    The first launch decides. A run that has checkpoints resumes from the newest one, whoever
    relaunches it; a launch that names another start is refused, unless `start_over` is set.
    """
    start_over: str = ""
    """Any word that is new to the run starts it over, once: its checkpoints are renamed to `.old`.

    It starts where `resume` says, with `auto` where it first started. Later launches with the same
    word go on from the newest checkpoint, as torchrun and Slurm repeat commands.
    """
    bad_steps: str = knob("stop", choices=("stop", "skip", "rollback"))
    """Answer to a loss or gradient that is not finite: `stop`, `skip` the step, or `rollback`.

    The update of such a step is never applied. `rollback` returns to the last checkpoint and goes
    on with the data after the bad step.
    """
    max_bad_steps: int = knob(10, at_least=1)
    """Number of steps skipped in a row, or rollbacks to one checkpoint, before the run ends."""
    skip_spikes: float = 0.0
    """Skip a step whose loss or gradient norm is this many standard deviations above the mean.

    Mean and deviation are those of the last 128 accepted steps. The default of 0 skips none.
    """
    save_interval: int = knob(0, at_least=-1)
    """Number of steps between checkpoints; 0 saves only at the end, -1 never saves."""
    keep_last: int = knob(2, at_least=1)
    """Number of newest checkpoints to keep; older ones are deleted."""
    keep_every: int = 0
    """Also keep every checkpoint whose step is a multiple of this; 0 keeps none."""
    async_save: str = knob("auto", choices=("auto", "on", "off"))
    """Write checkpoints in the background: `on`, `off`, or `auto`, which is on with CUDA."""
    requeue_code: int = 0
    """Exit code of a rank that a signal stopped before the last step; scripts/slurm.sbatch sets 85.

    With a code other than 0 torchrun reports a failure, and with --max-restarts starts again.
    """
    log_interval: int = knob(1, at_least=1)
    """Number of steps between progress lines."""
    eval_interval: int = 0
    """Number of steps between validations; 0 turns validation off."""
    eval_batches: int = knob(8, at_least=1)
    """Number of global batches in a validation; every validation reads the same ones."""
    sample_every: int = 0
    """Number of steps between samples, greedy texts that go on with the data; 0 makes none.

    Each of up to 64 tokens takes a forward pass of a micro-batch on all ranks (docs/looking.md).
    """
    dry_run: bool | str = knob(False, choices=("search", "search_precision"))
    """Print the estimated memory, traffic and step time, and exit. It needs no GPU.

    Set `parallel.world_size` to the number of ranks to estimate, if not that of `experiment`.
    `search` prints the five fastest layouts that fit, with their memory and commands: sizes of
    parallel groups, model chunks, micro-batch, recomputation, offloading and overlap, for a given
    model, batch, precision and optimizer. `search_precision` compares bf16 with FP8 too.
    """
    machine: str = knob("h200", choices=(MACHINES,))
    """GPU that `run.dry_run` assumes: `h200` or `h100`; rates are in configs/tables/machines.py."""
    wandb: str = knob("off", choices=("off", "offline", "online"))
    """Weights & Biases: `off`, `offline` or `online`; a failing service never stops training."""
    tensorboard: bool = False
    """Write TensorBoard events to the run folder."""
    trackers: list[str] = knob([], choices=("mlflow", "comet", "trackio"))
    """Other services that get the numbers, as in `[mlflow,trackio]` (docs/operations.md).

    They are called in a thread, so that a server that is away costs a warning and no time.
    """
    project: str = knob("phalanx", formerly="run.wandb_project")
    """Name of the project in Weights & Biases and in `run.trackers`."""
    record_routing: str = ""
    """File to which the experts that tokens choose after the last step are written; empty: none.

    `model.moe.router.replay` reads it. At most 65,536 tokens a layer are kept.
    """
    inject: list[str] = field(default_factory=list)
    """Faults to rehearse failures with, as in `nan@7,hang@9:rank1,kill@12:rank0`.

    A kind, a step and perhaps a rank: `nan` or `spike` of the gradients; `hang`, `stop`, `kill`,
    `exit`, `raise` or `term` of the process. Each happens once in a run (docs/operations.md).
    """
    allow_inject: bool = True
    """Allow `run.inject`. `run=pretrain` sets false."""
    profile: list[int] = field(default_factory=list)
    """[first, last] step that torch.profiler records on rank 0, into the run folder."""


@dataclass
class Config:
    """The whole configuration of a run, as composed by Hydra."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """Architecture."""
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    """Implementations."""
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    """Number formats."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Layout."""
    data: DataConfig = field(default_factory=DataConfig)
    """Tokens."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimizer."""
    run: RunConfig = field(default_factory=RunConfig)
    """Run."""
