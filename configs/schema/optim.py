"""Optimizer and schedule."""

from dataclasses import dataclass

from phalanx.configs.fields import knob
from phalanx.configs.tables.optimizers import MOMENTS, OPTIMIZERS


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
    ns_steps: int = knob(5, at_least=1)
    """Newton-Schulz iterations by which Muon makes an update orthogonal, in the run's own dtype."""
    moments: str = knob("fp32", choices=(MOMENTS,))
    """Dtype of the moments, and place of the optimizer's states (docs/memory.md).

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
