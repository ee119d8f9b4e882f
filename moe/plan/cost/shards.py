"""Traffic of tensor and context ranks, which share sequences, and the seconds it takes.

A mixer without core attention has some of the heads over full sequences between its projections:
an all-to-all from tokens to heads, and back (`parallel.context`). It saves and computes as much as
with all heads over its own tokens. Core attention gathers keys and values of all context ranks.
Tensor ranks gather the tokens in front of attention, dense MLPs and shared experts, and add up
their results. Nothing overlaps these exchanges.
"""

from collections import Counter
from typing import NamedTuple

from phalanx.configs.arithmetic.mixers import mixer_of
from phalanx.configs.formats import width
from phalanx.configs.schema import Config
from phalanx.configs.tables.machines import Machine
from phalanx.moe.plan.cost.work import Work
from phalanx.parallel.dispatcher.costs import Links


def heads_traffic(cfg: Config, machine: Machine, mixer: str) -> Links:
    """Bytes of one layer with a mixer and one token, forward and backward.

    Tensor ranks each have a part of a sequence's tokens.
    """
    p = cfg.parallel
    # Gradients take the same exchanges in reverse, and recomputation repeats the forward ones.
    passes = 3 if "full" in cfg.run.recompute else 2
    sent = passes * mixer_of(mixer).exchanged_channels(cfg.model) * width(cfg)
    # Neighbouring context ranks are `parallel.tensor` ranks apart.
    near = min(p.context, max(1, machine.node_gpus // p.tensor))
    return Links(sent * (near - 1) / p.context, sent * (p.context - near) / p.context)


def heads_seconds(cfg: Config, machine: Machine, mixer: str) -> float:
    """Seconds of that traffic, which nothing overlaps."""
    sent = heads_traffic(cfg, machine, mixer)
    return sent.near / (machine.node_gbs * 1e9) + sent.far / (machine.network_gbs * 1e9)


class ShardSeconds(NamedTuple):
    """Seconds of a token that tensor and context ranks share, for each layer."""

    shared: float  # collectives of tensor ranks around one module
    gathered: float  # keys and values of a layer

    def tensor(self, work: Work) -> float:
        """Seconds of a token on a stage: attention, and dense MLPs or shared experts."""
        return (work.layers + work.mlps) * self.shared

    def context(self, work: Work) -> float:
        """Seconds of a token on a stage: layers with core attention."""
        return core_layers(work.mixers) * self.gathered


def core_layers(mixers: Counter[str]) -> int:
    """Number of layers with core attention."""
    return sum(layers for name, layers in mixers.items() if mixer_of(name).core)


def shard_seconds(cfg: Config, machine: Machine) -> ShardSeconds:
    """Seconds per token of a rank.

    Sequence parallelism gathers the input of a module and scatters sums of its output, does both
    again for their gradients, and gathers the input once more for weight gradients. Keys and values
    are gathered in the forward pass, and the sums of their gradients are scattered.
    """
    p = cfg.parallel
    again = "full" in cfg.run.recompute
    element = width(cfg)
    rows = (5 + 2 * again) * (p.tensor - 1) * cfg.model.hidden * element
    keys = keys_traffic(cfg, machine)
    gathered = keys.near / (machine.node_gbs * 1e9) + keys.far / (machine.network_gbs * 1e9)
    return ShardSeconds(rows / (machine.node_gbs * 1e9), gathered)


def keys_traffic(cfg: Config, machine: Machine) -> Links:
    """Bytes of keys and values of one layer and one token of a rank, forward and backward.

    All of them are at the rate of the network if context ranks are on several nodes.
    """
    p, a = cfg.parallel, cfg.model.attention
    if a.kind == "gqa":
        channels = 2 * a.kv_heads * a.head_dim
    else:
        channels = a.heads * (a.qk_nope_dim + a.qk_rope_dim + a.v_dim)
    # A rank has the heads of all its tensor ranks' tokens.
    passes = 3 if "full" in cfg.run.recompute else 2
    sent = float(passes * (p.context - 1) * channels * width(cfg))
    inside = p.tensor * p.context <= machine.node_gpus
    return Links(sent, 0.0) if inside else Links(0.0, sent)
