"""Seconds of exchanges: of expert tokens, and of tensor and context ranks, which share sequences.

A mixer without core attention has some of the heads over full sequences between its projections:
an all-to-all from tokens to heads, and back (`parallel.context`). Core attention exchanges what
`configs.layout.context_exchange` says. Tensor ranks gather the tokens in front of attention, dense
MLPs and shared experts, and add up their results. Computation hides exchanges of expert tokens
alone.
"""

import math
from collections import Counter
from dataclasses import dataclass
from pkgutil import resolve_name
from statistics import fmean
from typing import NamedTuple

from phalanx.configs.arithmetic.layers import mixer_of
from phalanx.configs.formats import width
from phalanx.configs.layout import context_exchange, expert_parallel_size
from phalanx.configs.schema import Config
from phalanx.configs.tables.backends import expert_backend
from phalanx.configs.tables.capabilities import CONTEXT_EXCHANGES
from phalanx.configs.tables.machines import Machine
from phalanx.configs.tables.transports import TRANSPORTS
from phalanx.moe.plan.cost.activations import sizes
from phalanx.moe.plan.cost.delayed_wgrad import beside_exchanges, pairs
from phalanx.moe.plan.cost.traffic import Traffic, costs, nodes, overlap_sms, traffic
from phalanx.moe.plan.cost.weights import all_kinds
from phalanx.moe.plan.cost.work import Work, layer_wgrads
from phalanx.parallel.dispatcher.costs import Links

WAITING_COST = 0.7
"""`Exchange.waiting_cost` of our steps, presumably since a GPU that waits is below its power limit
and computes faster for that. Fitted to five steps with and without a paced wire
(docs/measured/training/pipelines_two_h100s.md)."""
SKEW = 0.03
"""`Exchange.skew` of our steps: 0.01 to 0.05 of eight steps on four H200s and two
(docs/measured/training/four_h200s.md)."""


@dataclass(frozen=True)
class Exchange:
    """Dispatch and combine of one token in one MoE layer, in seconds."""

    forward: float
    backward: float  # without the part that weight gradients hide
    hidden: bool
    """The forward pass of a micro-batch runs beside the backward pass of the one before it."""
    taken: float = 0.0  # part of a GPU that hidden exchanges take from the computation beside them
    waiting_cost: float = 1.0  # seconds by which a step is longer for a second that the GPU waits
    skew: float = 0.0
    """Seconds that a GPU waits for the others for a second in which it computes: each has its own
    clock at the power limit, and every exchange waits for the slowest."""

    @property
    def total(self) -> float:
        """Seconds of both passes, hidden by another micro-batch or not."""
        return self.forward + self.backward

    def exposed(
        self, seconds: float, computing: float, micro_batches: int, stages: int, chunks: int
    ) -> float:
        """Seconds by which a step is longer because of this exchange, outside a pipeline's bubble.

        Without overlap that is all of it. With overlap those of the first forward and the last
        backward pass are exposed; with pipeline stages those of the passes in as many slots as
        there are `chunks` of the model on a stage. Between them the exchanges of a backward pass
        are hidden by a forward pass, a third of the work, and the other way round; the computation
        beside them is slower by what they take of the GPU. `seconds` are all exchanges of a
        micro-batch on a stage, `computing` all its other work.
        """
        if not self.hidden:
            return self.waiting_cost * micro_batches * seconds
        forward, backward = (
            seconds * t / (self.total or 1.0) for t in (self.forward, self.backward)
        )
        exposed = max(0.0, backward - computing / 3, forward - computing * 2 / 3)
        exposed += self.taken * (seconds - exposed)
        # A slot is 1 / chunks of a micro-batch; the bubble is (stages - 1) / chunks of one.
        alone = min(micro_batches, stages - (stages - 1) / chunks)
        return self.waiting_cost * (alone * seconds + (micro_batches - alone) * exposed)


def own_exchange(cfg: Config, world: int, machine: Machine) -> Exchange:
    """The exchange of `parallel.dispatch`; `cfg` has resolved kernels."""
    sent = traffic(cfg, world)
    forward, backward = (_crossing(cfg, world, machine, x) for x in (sent.forward, sent.backward))
    if nodes(cfg, world) > 1:  # dispatch and combine of a micro-batch, in each pass
        late = 2e-6 * machine.latency_us / sizes(cfg, world).local_tokens
        forward, backward = forward + late, backward + late
    if beside_exchanges(cfg):
        backward -= _beside_wgrads(cfg, world, machine, sent)
    hidden = cfg.parallel.overlap_microbatches == "on"
    skew = SKEW if expert_parallel_size(cfg, world) > 1 else 0.0
    return Exchange(forward, backward, hidden, waiting_cost=WAITING_COST, skew=skew)


def _beside_wgrads(cfg: Config, world: int, machine: Machine, sent: Traffic) -> float:
    """Seconds of a token's exchange in a backward pass that weight gradients hide; a layer's mean.

    Each exchange is hidden by the weight gradients since the one before it. Those of attention in
    the layer above hide the first one of a layer: gradients of sums, or tokens that are sent again.
    Those of the experts hide the last one: gradients of tokens. In pairs they are there in every
    second pass, of two passes. Those of shared experts and the output layer are not counted.
    """
    first, last = (_collective_seconds(cfg, machine, part) for part in (sent.there, sent.back))
    wgrads, passes = layer_wgrads(cfg, world, machine), 2 if pairs(cfg, world) else 1
    return fmean(
        min(first, wgrads[kind].attention / 1e12)
        + min(last, passes * wgrads[kind].experts / 1e12) / passes
        for kind in all_kinds(cfg)
        if not kind.dense
    )


def _collective_seconds(cfg: Config, machine: Machine, sent: Links) -> float:
    """Seconds of a token's bytes by collectives: over the network alone with `hier`."""
    near = 0.0 if TRANSPORTS[cfg.parallel.dispatch].over_nodes else sent.near
    return near / (machine.node_gbs * 1e9) + sent.far / (machine.network_gbs * 1e9)


def _crossing(cfg: Config, world: int, machine: Machine, sent: Links) -> float:
    """Seconds of a token's bytes, without those that overlap the experts of the same layer."""
    near, far = sent.near / (machine.node_gbs * 1e9), sent.far / (machine.network_gbs * 1e9)
    transport = costs(cfg, world)
    if overlap_sms(cfg, world):
        near *= transport.exposed
    if transport.pipelined and not expert_backend(cfg.kernels.backend).own_exchange:
        return max(near, far)
    return near + far


def heads_traffic(cfg: Config, machine: Machine, mixer: str) -> Links:
    """Bytes of one layer with a mixer and one token, of which tensor ranks each have a part."""
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
    gathered: float  # keys and values, or heads, of a layer

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

    Keys and values are gathered in the forward pass, and the sums of their gradients are scattered.
    """
    rows, keys = (f(cfg, machine) for f in (rows_traffic, keys_traffic))
    near, far = machine.node_gbs * 1e9, machine.network_gbs * 1e9
    return ShardSeconds(*(sent.near / near + sent.far / far for sent in (rows, keys)))


def rows_traffic(cfg: Config, machine: Machine) -> Links:
    """Bytes of the collectives of tensor ranks around one module, for one token of a rank.

    Sequence parallelism gathers the input of a module and scatters sums of its output, does both
    again for their gradients, and gathers the input once more for weight gradients.
    """
    tensor, passes = cfg.parallel.tensor, 5 + 2 * ("full" in cfg.run.recompute)
    row = passes * cfg.model.hidden * width(cfg)
    near = math.gcd(tensor, machine.node_gpus)  # neighbours of the rank that has fewest on its host
    return Links(row * (near - 1), row * (tensor - near))


def keys_traffic(cfg: Config, machine: Machine) -> Links:
    """Bytes of core attention's exchange of one layer and one token of a rank, both ways."""
    p = cfg.parallel
    if p.context == 1:
        return Links(0.0, 0.0)
    sent = resolve_name(CONTEXT_EXCHANGES[context_exchange(cfg)].facts).sent(cfg, machine)
    passes = 3 if {"full", "attention"} & set(cfg.run.recompute) else 2
    return Links(passes * sent.near, passes * sent.far)
