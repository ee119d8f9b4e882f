"""Every knob of Phalanx: typed, with its documentation directly under the field.

The YAML groups (model/, kernels/, parallel/, data/, optim/, run/, experiment/) only set values of
these dataclasses. `configs.validate` checks a composed config as a whole. The README's knob table
is generated from this file, so a field without a docstring fails the tests.
"""

from dataclasses import dataclass, field


@dataclass
class YarnConfig:
    """YaRN context extension of the rotary embedding (arXiv 2309.00071)."""

    factor: float = 1.0
    """Context extension factor; 1 turns YaRN off."""
    original_context: int = 4096
    """Context length, in tokens, that the rotary base was chosen for."""
    beta_fast: float = 32.0
    """Rotations over the original context above which a frequency is left as it is."""
    beta_slow: float = 1.0
    """Rotations over the original context below which a frequency is divided by `factor`."""
    mscale: float = 1.0
    """Numerator coefficient of the attention temperature: 0.1 * mscale * ln(factor) + 1."""
    mscale_all_dim: float = 0.0
    """Denominator coefficient of the attention temperature (DeepSeek); 0 leaves it at 1."""
    truncate: bool = True
    """Round the correction range to whole dimensions (false for GPT-OSS)."""


@dataclass
class AttentionConfig:
    """Attention of every layer: grouped-query or multi-head latent (arXiv 2412.19437)."""

    kind: str = "gqa"
    """`gqa` (grouped queries) or `mla` (multi-head latent attention)."""
    heads: int = 8
    """Query heads."""
    kv_heads: int = 8
    """Key and value heads of `gqa`; must divide `heads`. `mla` ignores it."""
    head_dim: int = 64
    """Channels of a `gqa` head."""
    q_lora_rank: int = 0
    """Rank of the compressed query of `mla`; 0 projects queries directly."""
    kv_lora_rank: int = 512
    """Rank of the compressed key-value of `mla`."""
    qk_nope_dim: int = 128
    """Channels of an `mla` query or key head without position."""
    qk_rope_dim: int = 64
    """Channels of an `mla` query or key head that are rotated."""
    v_dim: int = 128
    """Channels of an `mla` value head."""
    qk_norm: bool = False
    """RMSNorm on query and key heads (Qwen3); `mla` always normalises its compressed vectors."""
    window: int = 0
    """Sliding window: a query sees itself and `window - 1` tokens before it; 0 is full causal."""
    window_every: int = 1
    """With a window, each `window_every`-th layer is full causal; 1 gives all layers the window."""
    sinks: bool = False
    """Add a learnable logit per head to the softmax denominator (GPT-OSS)."""
    rope_theta: float = 10000.0
    """Base of the rotary embedding."""
    yarn: YarnConfig = field(default_factory=YarnConfig)
    """YaRN context extension."""


@dataclass
class RouterConfig:
    """From token to top-k experts, and what keeps the experts balanced."""

    score: str = "softmax"
    """`softmax` or `sigmoid` (DeepSeek-V3)."""
    softmax_over: str = "all"
    """Softmax over `all` experts before the top-k, or over the `topk` logits after it (GPT-OSS)."""
    normalize: bool = True
    """Divide the top-k probabilities by their sum; no effect with `softmax_over=topk` or `top_k=1`.

    One normalised expert would have weight 1, and the router nothing to learn from.
    """
    groups: int = 1
    """Expert groups of group-limited routing; 1 turns it off."""
    group_topk: int = 1
    """Groups a token may use; a group's score sums its `top_k / group_topk` best experts."""
    scale: float = 1.0
    """Factor on the top-k probabilities (`routed_scaling_factor`)."""
    bias_rate: float = 0.0
    """Change of the aux-loss-free expert bias (arXiv 2408.15664) per step; 0 has no bias."""
    aux_loss: float = 0.0
    """Coefficient of the load-balancing loss over a micro-batch (Switch, arXiv 2101.03961)."""
    seq_aux_loss: float = 0.0
    """Coefficient of the load-balancing loss over each sequence (DeepSeek-V3)."""
    global_aux_loss: float = 0.0
    """Coefficient of the load-balancing loss over the global batch so far (arXiv 2501.11873).

    Megatron-Core divides this loss by the number of data parallel replicas once too often: divide a
    coefficient from there by that number. That holds for `kernels.backend=megatron` too.
    """
    z_loss: float = 0.0
    """Coefficient of the router z-loss (ST-MoE, arXiv 2202.08906)."""
    rounding: str = "none"
    """Round each expert's tokens to whole tiles: `none`, `nearest`, `up`, `down` (in training).

    Token rounding of arXiv 2512.14080, over a rank's micro-batch: no padded tiles in expert GEMMs.
    """
    rounding_tile: int = 128
    """Tokens that `rounding` makes the counts multiples of."""
    force_balance: bool = False
    """Benchmarks only: replace the choice of experts by a perfectly balanced one."""


@dataclass
class MoEConfig:
    """Experts of every MoE layer."""

    experts: int = 8
    """Routed experts."""
    top_k: int = 2
    """Experts per token."""
    ffn: int = 512
    """Width of one routed expert."""
    shared_ffn: int = 0
    """Total width of the shared experts, which see every token; 0 has none."""
    dense_layers: int = 0
    """Leading layers with a dense MLP instead of experts."""
    activation: str = "swiglu"
    """Activation of all MLPs, an entry of configs/activations.py."""
    activation_alpha: float = 1.702
    """Slope inside the sigmoid of `quick_geglu`."""
    activation_limit: float = 0.0
    """Clamp of the gate from above and of the linear half on both sides; 0 does not clamp."""
    activation_offset: float = 0.0
    """Added to the linear half after the clamp (1 for GPT-OSS)."""
    router: RouterConfig = field(default_factory=RouterConfig)
    """Routing and balancing."""


@dataclass
class ModelConfig:
    """Architecture. A reference model's file equals its published configuration."""

    name: str = "tiny"
    """Name shown in logs."""
    vocab_size: int = 256
    """Vocabulary; must be a multiple of `parallel.tensor`."""
    layers: int = 2
    """Transformer layers, without multi-token-prediction layers."""
    hidden: int = 128
    """Width of the residual stream."""
    dense_ffn: int = 512
    """Width of the MLP of dense layers."""
    bias: bool = False
    """Biases in attention, router and MLPs (GPT-OSS)."""
    norm_eps: float = 1e-5
    """Epsilon of every RMSNorm."""
    tie_embeddings: bool = False
    """Share input embedding and output projection."""
    mtp_layers: int = 0
    """Multi-token-prediction layers (DeepSeek-V3)."""
    mtp_loss: float = 0.1
    """Weight of the multi-token-prediction loss."""
    init_std: float = 0.02
    """Standard deviation of new weights; output projections use it over sqrt(2 * layers)."""
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    """Attention."""
    moe: MoEConfig = field(default_factory=MoEConfig)
    """Experts and router."""


@dataclass
class SmMarginConfig:
    """SMs of a GPU that the fused expert kernels leave free, by pass."""

    forward: int = 0
    """SMs that fused expert kernels leave free in the forward pass, as for communication."""
    dgrad: int = 0
    """The same of the data gradients in the backward pass."""
    wgrad: int = 0
    """The same of the weight gradients in the backward pass."""


@dataclass
class KernelsConfig:
    """Which implementation runs each op. A forced choice that cannot run is an error."""

    backend: str = "auto"
    """Experts: `reference`, `torch`, `te`, `fused`, `megatron` (its stock MoELayer) or `auto`."""
    attention: str = "auto"
    """Core attention: `reference` (explicit softmax), `sdpa`, `flex`, `te` or `auto`."""
    norm: str = "auto"
    """RMSNorm: `torch`, `te` or `auto`."""
    gradient_accumulation_fusion: bool = True
    """On a GPU, add weight gradients straight to Megatron-Core's buffers."""
    dynamic: bool = True
    """Fused expert kernels claim tiles on the device rather than deal them out in turn."""
    sm_margin: SmMarginConfig = field(default_factory=SmMarginConfig)
    """SMs that fused expert kernels leave free."""


@dataclass
class ParallelConfig:
    """How ranks share the work. Data parallelism takes what the other sizes leave."""

    world_size: int = 0
    """Ranks to lay out; 0 takes the launcher's. Set it to check a layout without its machines."""
    tensor: int = 1
    """Tensor parallel size of attention and dense MLPs, with sequence parallelism above 1."""
    pipeline: int = 1
    """Pipeline stages."""
    virtual_pipeline: int = 1
    """Model chunks per stage (interleaved schedule)."""
    pipeline_layout: str = ""
    """Megatron-Core layout, as in `Et|(tt|)*30mL`; empty splits evenly.

    A letter is a part (E embedding, t layer, m multi-token prediction, L loss), | ends a stage.
    """
    context: int = 1
    """Context parallel size."""
    expert: int = 0
    """Expert parallel size; 0 takes the largest up to 8 that divides experts and stage ranks."""
    dispatch: str = "auto"
    """Transport to experts, an entry of configs/transports.py, or the best that can run (`auto`).

    All ranks of a group take the same: what one cannot do, none does, and the start page says why.
    """
    save_x: str = "redispatch"
    """Received tokens for the backward pass of `symm`: sent again (`redispatch`), or `keep`.

    `hier` sends them again inside a node, not over the network.
    """
    comm_sms: int = 0
    """SMs that push tokens beside the fused experts (`symm`); 0 takes all, and nothing overlaps.

    With `deepep` SMs of its kernels; 0 leaves it to them. `local` and `alltoall` refuse it; where
    `auto` takes these, or experts cannot wait for tokens, the start page says so.
    """
    capacity_factor: float = 1.5
    """Rows kept for a rank's experts, over the balanced load.

    A step that needs more is run again with more; no token is dropped.
    """
    distributed_optimizer: bool = True
    """Shard optimizer state over data parallel ranks."""
    overlap: bool = True
    """Overlap gradient reduction and parameter gathering with computation."""
    grad_dtype: str = "fp32"
    """Gradient reduction dtype: `fp32` or `bf16`."""
    timeout: int = 600
    """Seconds before a collective that does not finish ends the run."""


@dataclass
class DataConfig:
    """Where tokens come from and how they are batched."""

    source: str = "embedded"
    """`embedded` (bytes of the Python library), `indexed` (Megatron .bin/.idx) or `synthetic`.

    Long runs that save on their way take `indexed`: the other two are for tests and benchmarks.
    """
    blend: list[str] = field(default_factory=list)
    """For `indexed`: prefixes of .bin/.idx, or weights and prefixes in turn: [0.7, a, 0.3, b].

    Without weights they are mixed by their tokens. The start page has tokens and epochs of each.
    """
    split: str = "98,2"
    """Weights of training and validation parts of each source."""
    cache: str = ""
    """Folder for built corpora and index caches; empty uses .cache/phalanx in the home folder."""
    sequence_length: int = 256
    """Tokens in one sequence."""
    micro_batch: int = 4
    """Sequences per rank in one forward pass."""
    global_batch: int = 32
    """Sequences in one optimizer step."""
    seed: int = 1234
    """Seed of the document and sample order."""


@dataclass
class OptimConfig:
    """AdamW and its schedule."""

    lr: float = 3e-3
    """Peak learning rate."""
    min_lr: float = 3e-4
    """Learning rate at the end of decay."""
    warmup_steps: int = 10
    """Steps of linear warm-up from zero, cut to end before the decay does."""
    decay_steps: int = 0
    """Steps until `min_lr`; 0 takes `run.steps`, and bends the curve of a run that is extended."""
    schedule: str = "cosine"
    """`cosine`, `linear`, `constant`, `inverse-square-root` or `WSD`."""
    weight_decay: float = 0.1
    """Decoupled weight decay; none on biases and norms."""
    beta1: float = 0.9
    """First moment decay."""
    beta2: float = 0.95
    """Second moment decay."""
    eps: float = 1e-8
    """Denominator epsilon."""
    moments: str = "fp32"
    """Dtype of both moments: `fp32`, or `bf16`, 6 bytes less a parameter (arXiv 2412.19437)."""
    clip_grad: float = 1.0
    """Global gradient norm limit; 0 turns clipping off."""


@dataclass
class RunConfig:
    """One run: length, precision, checkpoints, logging."""

    name: str = "default"
    """Run folder below `dir`; the same name resumes the same run. One run at a time has it."""
    dir: str = "runs"
    """Folder of all runs."""
    steps: int = 100
    """Optimizer steps."""
    seed: int = 1
    """Seed of weights; the same for every layout."""
    device: str = "auto"
    """`cuda`, `cpu`, or `auto` (CUDA where there is one)."""
    precision: str = "bf16"
    """`bf16` (fp32 master weights and router) or `fp32`."""
    recompute: str = "none"
    """Activation recompute: `none`, `attention`, `moe` or `full`."""
    graph: str = "off"
    """CUDA graph: `off`, or `full_iteration`, forward and backward of all micro-batches in one."""
    deterministic: bool = False
    """Use deterministic algorithms only, at some cost."""
    resume: str = "auto"
    """`auto` (newest checkpoint of the run, if any), `never`, or a checkpoint folder."""
    bad_steps: str = "stop"
    """Loss or gradient not finite: `stop`, `skip` the step, or `rollback` to the last checkpoint.

    The parameters never see it. After a rollback the data goes on behind the bad step.
    """
    max_bad_steps: int = 10
    """Steps skipped in a row, or rollbacks to one checkpoint, after which the next ends the run."""
    skip_spikes: float = 0.0
    """Skip steps with a loss or gradient norm this many sigma above the last 128; 0 skips none."""
    save_interval: int = 0
    """Steps between checkpoints; 0 saves at the end only, -1 never."""
    keep_last: int = 2
    """Newest checkpoints kept; older ones are deleted."""
    keep_every: int = 0
    """Checkpoints of steps that are multiples of it are kept for good; 0 for none."""
    async_save: str = "auto"
    """Write checkpoints in the background: `on`, `off`, or `auto` (on with CUDA)."""
    requeue_code: int = 0
    """Exit code of a rank that a signal stopped before the last step; scripts/slurm.sbatch sets 85.

    Other than 0 it makes torchrun report a failure, and start again with --max-restarts.
    """
    log_interval: int = 1
    """Steps between progress lines."""
    eval_interval: int = 0
    """Steps between validations; 0 turns validation off."""
    eval_batches: int = 8
    """Global batches per validation, the same ones each time."""
    dry_run: bool = False
    """Print memory, traffic and expected time on `parallel.world_size` ranks, and exit; no GPU."""
    machine: str = "h200"
    """GPU that `dry_run` reckons with: `h200` or `h100`; rates are in configs/machines.py."""
    wandb: str = "off"
    """Weights & Biases: `off`, `offline` or `online`; a failing service never stops training."""
    wandb_project: str = "phalanx"
    """Weights & Biases project."""
    tensorboard: bool = False
    """Write TensorBoard events to the run folder."""
    profile: list[int] = field(default_factory=list)
    """[first, last] step recorded by torch.profiler on rank 0; the trace goes to the run folder."""


@dataclass
class Config:
    """The whole of a run, as composed by Hydra."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """Architecture."""
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    """Implementations."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Layout."""
    data: DataConfig = field(default_factory=DataConfig)
    """Tokens."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimizer."""
    run: RunConfig = field(default_factory=RunConfig)
    """Run."""
