"""What experts send between ranks: rows and bytes of a token, by the links that they take.

Expected over uniformly random routing, exactly: a token's groups are drawn first where
`router.group_topk` limits them (arXiv 2412.19437, section 2.1.2), then its experts among theirs.
Rows have the precision of the run; with `precision.dispatch=fp8` those to the experts are FP8.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import NamedTuple

from phalanx.configs.formats import in_bf16, quantizes_on_arrival, width
from phalanx.configs.layout import expert_parallel_size, replica_slots
from phalanx.configs.machines import MACHINES
from phalanx.configs.schema import Config, MoEConfig
from phalanx.kernels.quantize import packed
from phalanx.parallel.dispatcher.costs import NOTHING, GroupTopology, Links, TransportCosts
from phalanx.parallel.dispatcher.transport import class_of
from phalanx.parallel.dispatcher.transport_class import waits_for_tokens


@dataclass(frozen=True)
class Traffic:
    """Of one MoE layer and one token."""

    ranks: float
    """Expected ranks that hold one of the token's experts, its own included."""
    nodes: float
    """The same of nodes of `run.machine`."""
    there: Links
    """Rows, on the way to the experts."""
    back: Links
    """Rows, on the way back."""
    forward: Links
    """Bytes: there and back."""
    backward: Links
    """Bytes: gradients there and back, and tokens once more where they were not kept."""


def traffic(cfg: Config, world: int) -> Traffic:
    """As `parallel.dispatch` sends them; of `kernels.backend=megatron` its own all-to-all."""
    sent = _of_megatron(cfg, world) if cfg.kernels.backend == "megatron" else costs(cfg, world)
    again = _twice(cfg)
    there, back = (sent.there, sent.back) if again else (NOTHING, NOTHING)
    return _of(cfg, world, (sent.there, sent.back), (there + sent.resent, back))


def least_traffic(cfg: Config, world: int) -> Traffic:
    """What any transport sends over each kind of link: a row once to each other node with one of
    the token's experts, and to each such rank of its own node; one sum back from each; rows a
    second time to experts that are computed again."""
    group = reach(cfg, world)
    # Other nodes' ranks may get theirs over the network.
    rows = Links(group.once_a_rank.near, group.once_a_node.far)
    again = rows if _twice(cfg) else NOTHING
    return _of(cfg, world, (rows, rows), (again, NOTHING))


def _twice(cfg: Config) -> bool:
    """Whether the backward pass sends all once more, as it computes MoE layers again."""
    return not {"moe", "full"}.isdisjoint(cfg.run.recompute)


def nodes(cfg: Config, world: int) -> int:
    """Nodes of `run.machine` that an expert-parallel group spans; its ranks are neighbours."""
    return -(-expert_parallel_size(cfg, world) // MACHINES[cfg.run.machine].node_gpus)


def costs(cfg: Config, world: int) -> TransportCosts:
    """What the transport of `parallel.dispatch` sends and holds; `cfg` has no `auto` there."""
    return class_of(cfg.parallel.dispatch).costs(reach(cfg, world))


def overlaps(cfg: Config, world: int) -> bool:
    """Whether experts work while tokens are on their way."""
    waits = waits_for_tokens(cfg.kernels.backend, quantizes_on_arrival(cfg))
    return waits and bool(cfg.parallel.comm_sms) and costs(cfg, world).exposed < 1


def reach(cfg: Config, world: int) -> GroupTopology:
    """The expert-parallel group, and what an average token wants of it."""
    e, p, d = cfg.model.moe, cfg.parallel, cfg.data
    by_node = _node_sizes(cfg, world)
    hosts = zip(_reached(e, by_node), by_node, strict=True)
    return GroupTopology(
        ranks=expert_parallel_size(cfg, world),
        nodes=nodes(cfg, world),
        tokens=d.micro_batch * d.sequence_length // p.context // p.tensor,
        wanted_ranks=sum(_reached(e, _rank_sizes(cfg, world))),
        other_nodes=sum(reached * (1 - held / e.experts) for reached, held in hosts),
        pushes=in_bf16(cfg) and cfg.run.device != "cpu",
        keep=p.save_x == "keep",
        rows_back=e.top_k if replica_slots(cfg, world) else 1,
    )


def row_bytes(cfg: Config) -> int:
    """Of a token, or of a gradient, on the way to the experts."""
    hidden, fp8 = cfg.model.hidden, cfg.precision.dispatch == "fp8"
    return packed.row_bytes(hidden) if fp8 else hidden * width(cfg)


def _of(cfg: Config, world: int, once: tuple[Links, Links], again: tuple[Links, Links]) -> Traffic:
    """Of rows (there, back) that are sent in either pass, and again in the backward pass."""
    to, fro = row_bytes(cfg), cfg.model.hidden * width(cfg)
    ranks = sum(_reached(cfg.model.moe, _rank_sizes(cfg, world)))
    hosts = sum(_reached(cfg.model.moe, _node_sizes(cfg, world)))
    forward, more = (to * there + fro * back for there, back in (once, again))
    return Traffic(ranks, hosts, *once, forward, forward + more)


def _of_megatron(cfg: Config, world: int) -> TransportCosts:
    """A copy for each expert, by an all-to-all of rows."""
    copies, group = cfg.model.moe.top_k, reach(cfg, world)
    near, far = (group.node_ranks - 1) / group.ranks, 1 - 1 / group.nodes
    rows = Links(copies * near, copies * far)
    return TransportCosts(rows, rows)


def _rank_sizes(cfg: Config, world: int) -> list[int]:
    """Experts of each rank."""
    ranks = expert_parallel_size(cfg, world)
    return [cfg.model.moe.experts // ranks] * ranks


def _node_sizes(cfg: Config, world: int) -> list[int]:
    """Experts of each node; the last may be smaller."""
    by_rank, most = _rank_sizes(cfg, world), MACHINES[cfg.run.machine].node_gpus
    return [sum(by_rank[i : i + most]) for i in range(0, len(by_rank), most)]


class _Draw(NamedTuple):
    """How a token's experts are chosen."""

    experts: int
    top_k: int
    groups: int
    group_topk: int


def _reached(e: MoEConfig, sizes: Sequence[int]) -> list[float]:
    """Probability that a token has one of the experts of each of several owners, who hold
    consecutive experts, `sizes` of them."""
    draw = _Draw(e.experts, e.top_k, e.router.groups, e.router.group_topk)
    return _probabilities(draw, tuple(sizes))


@functools.cache
def _probabilities(draw: _Draw, sizes: tuple[int, ...]) -> list[float]:
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    known: dict[tuple[int, ...], float] = {}
    found = []
    for first, size in zip(firsts, sizes, strict=True):
        parts = _parts(draw, first, size)
        if parts not in known:
            known[parts] = 1 - _missed(draw, parts)
        found.append(known[parts])
    return found


def _parts(draw: _Draw, first: int, size: int) -> tuple[int, ...]:
    """How many of `size` experts from `first` on are in each group that has any, sorted."""
    width = draw.experts // draw.groups
    end, begun = first + size, range(first // width, -(-(first + size) // width))
    return tuple(sorted(min(end, (g + 1) * width) - max(first, g * width) for g in begun))


def _missed(draw: _Draw, parts: Sequence[int]) -> float:
    """Probability that a token has none of an owner's experts, which are `parts` of groups."""
    width = draw.experts // draw.groups
    ways = {(0, 0): 1}
    """Ways to choose among the owner's groups, by (groups chosen, experts of the owner in them)."""
    for part in parts:
        more: dict[tuple[int, int], int] = {}
        for (chosen, held), n in ways.items():
            for key in ((chosen, held), (chosen + 1, held + part)):
                more[key] = more.get(key, 0) + n
        ways = more
    pool, others = draw.group_topk * width, draw.groups - len(parts)
    missed = sum(
        n * comb(others, draw.group_topk - chosen) * comb(pool - held, draw.top_k)
        for (chosen, held), n in ways.items()
        if chosen <= draw.group_topk
    )
    return missed / (comb(draw.groups, draw.group_topk) * comb(pool, draw.top_k))
