"""The optimizers: one entry each, with the class that sets it up.

No other file compares the name of an optimizer. An entry names its class by import path, so that
reading it does not import torch.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class OptimizerFacts:
    """Facts of an optimizer for configurations, estimates and checkpoints."""

    implementation: str  # `module:class`, a subclass of `parallel.megatron.adam.Setup`
    meaning: str  # short description, in Markdown, for the documentation
    moments: int = 2  # of a parameter; 1 of one whose matrix is updated as a whole
    decay_rates: tuple[str, ...] = ("beta1", "beta2")  # knobs of moments
    whole_matrices: bool = False  # a rank of the sharded optimizer owns whole parameters
    estimate: str = ""
    """Path of `(cfg: Config, world: int, chunks: Sequence[moe.plan.cost.weights.Chunk]) ->
    moe.plan.cost.weights.WholeUpdates`, of one pipeline stage. Empty: it updates elements."""
    own_state: str = ""
    """State of this optimizer alone, which tells its checkpoints; empty: that of AdamW or less."""
    package: str = ""  # package that it needs; empty: none but torch


OPTIMIZERS: dict[str, OptimizerFacts] = {
    "adamw": OptimizerFacts(
        "phalanx.parallel.megatron.adam:Setup",
        "Adam with decoupled weight decay (arXiv 1711.05101)",
    ),
    "muon": OptimizerFacts(
        "phalanx.extras.muon.optimizer:MuonSetup",
        "the matrices of attention, MLPs and experts are moved by their momentum made orthogonal "
        "(Moonlight, arXiv 2502.16982); embedding, output layer, router, norms and biases stay "
        "with AdamW, at the same learning rate",
        decay_rates=("beta1", "beta2", "momentum"),
        whole_matrices=True,
        estimate="phalanx.extras.muon.estimate:whole_updates",
        own_state="momentum_buffer",
        package="emerging-optimizers",
    ),
}
"""Optimizers keyed by `optim.kind`; checkpoints that name none have the first."""


@dataclass(frozen=True)
class MomentFacts:
    """Dtype and place of moments."""

    bf16: bool  # otherwise fp32
    meaning: str
    hosted: bool = False  # in host memory, as are master weights


# Moments keyed by `optim.moments`.
MOMENTS: dict[str, MomentFacts] = {
    "fp32": MomentFacts(False, "12 bytes per parameter with the master weight (of Muon's, 8)"),
    "bf16": MomentFacts(True, "6 bytes (4)"),
    "fp32_host": MomentFacts(False, "all of them in host memory", hosted=True),
    "bf16_host": MomentFacts(True, "all of them in host memory", hosted=True),
}
HOST_STATES = "phalanx.extras.host_states.entry"  # module of states in host memory

AFTER_UPDATES = {"qk_clip": "phalanx.extras.muon.qk_clip:QKClip"}
"""Rescaling of parameters after an update, by the knob of `optim` that switches it on.

A `module:class`, built from model chunks, their TransformerConfig, process groups, a
`moe.model.max_logits.MaxLogits` and the knob's value, has `parameters` and `factors()`.
"""
