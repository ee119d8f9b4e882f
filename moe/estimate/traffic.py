"""What experts send between ranks: rows and bytes of a token, by the links that they take.

Expected over uniformly random routing, exactly: a token's groups are drawn first where
`router.group_topk` limits them (arXiv 2412.19437, section 2.1.2), then its experts among theirs.
Rows have the precision of the run; those in FP8 that others send are half as large.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

from phalanx.configs.layout import expert_parallel_size
from phalanx.configs.machines import MACHINES
from phalanx.configs.schema import Config, MoEConfig


@dataclass(frozen=True)
class Links:
    """Rows or bytes of a token that leave GPUs, on average over the GPUs that pass it on."""

    near: float
    """Over the links inside a node."""
    far: float
    """Over the network, to GPUs of other nodes."""

    def __add__(self, other: "Links") -> "Links":
        return Links(self.near + other.near, self.far + other.far)

    def __rmul__(self, factor: float) -> "Links":
        return Links(factor * self.near, factor * self.far)

    @property
    def total(self) -> float:
        """Of both."""
        return self.near + self.far


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
    there, back = _rows(cfg, world)
    once, none = there + back, Links(0, 0)
    again = once if cfg.run.recompute in ("moe", "full") else none
    if cfg.kernels.backend != "megatron" and one_sided(cfg) and cfg.parallel.save_x == "redispatch":
        # What `hier` brought over the network is kept.
        again += Links(there.near, 0 if cfg.parallel.dispatch == "hier" else there.far)
    return _of(cfg, world, there, back, again)


def least_traffic(cfg: Config, world: int) -> Traffic:
    """What any transport sends over each kind of link: a row once to each other node with one of
    the token's experts, and to each such rank of its own node; one sum back from each; rows a
    second time to experts that are computed again."""
    inside = _straight(cfg, world).near  # other nodes' ranks may get theirs over the network
    rows = Links(inside, _once_a_node(cfg, world).far)
    again = rows if cfg.run.recompute in ("moe", "full") else Links(0, 0)
    return _of(cfg, world, rows, rows, again)


def nodes(cfg: Config, world: int) -> int:
    """Nodes of `run.machine` that an expert-parallel group spans; its ranks are neighbours."""
    return -(-expert_parallel_size(cfg, world) // MACHINES[cfg.run.machine].node_gpus)


def one_sided(cfg: Config) -> bool:
    """Whether tokens are pushed inside a node, to the ranks that want them alone."""
    return cfg.parallel.dispatch == "symm" or (
        cfg.parallel.dispatch == "hier" and cfg.run.precision == "bf16"
    )


def _of(cfg: Config, world: int, there: Links, back: Links, again: Links) -> Traffic:
    row = cfg.model.hidden * (2 if cfg.run.precision == "bf16" else 4)
    ranks = sum(_reached(cfg.model.moe, _rank_sizes(cfg, world)))
    hosts = sum(_reached(cfg.model.moe, _node_sizes(cfg, world)))
    once = there + back
    return Traffic(ranks, hosts, there, back, row * once, row * (once + again))


def _rows(cfg: Config, world: int) -> tuple[Links, Links]:
    """Rows of a token on the way to its experts, and back."""
    p, ranks, count = cfg.parallel, expert_parallel_size(cfg, world), nodes(cfg, world)
    size = ranks / count
    if cfg.kernels.backend == "megatron":  # a copy for each expert
        copies = cfg.model.moe.top_k
        rows = Links(copies * (size - 1) / ranks, copies * (1 - 1 / count))
        return rows, rows
    if p.dispatch == "alltoall":
        # All tokens to all ranks: by an all-gather, in which a row enters a node once and is passed
        # on inside, and an all-to-all, in which each of a node's ranks sends its own sum.
        return Links(ranks - count, count - 1), Links(size - 1, ranks - size)
    if p.dispatch == "hier":
        inside = sum(_reached(cfg.model.moe, _rank_sizes(cfg, world))) if one_sided(cfg) else ranks
        rows = Links(inside * (size - 1) / size, count - 1)
    elif p.dispatch == "deepep":
        rows = _once_a_node(cfg, world)
    else:  # symm; local, with one rank
        rows = _straight(cfg, world)
    return rows, rows


def _straight(cfg: Config, world: int) -> Links:
    """To each rank that wants the token."""
    hit, count = sum(_reached(cfg.model.moe, _rank_sizes(cfg, world))), nodes(cfg, world)
    ranks = expert_parallel_size(cfg, world)
    return Links(hit * (ranks / count - 1) / ranks, hit * (1 - 1 / count))


def _once_a_node(cfg: Config, world: int) -> Links:
    """To the GPU of the same place on each node that wants the token, from there to its ranks."""
    e, ranks = cfg.model.moe, expert_parallel_size(cfg, world)
    by_node = _node_sizes(cfg, world)
    size = ranks / len(by_node)
    hosts = zip(_reached(e, by_node), by_node, strict=True)
    far = sum(reached * (1 - held / e.experts) for reached, held in hosts)
    return Links(sum(_reached(e, _rank_sizes(cfg, world))) * (size - 1) / size, far)


def _rank_sizes(cfg: Config, world: int) -> list[int]:
    """Experts of each rank."""
    ranks = expert_parallel_size(cfg, world)
    return [cfg.model.moe.experts // ranks] * ranks


def _node_sizes(cfg: Config, world: int) -> list[int]:
    """Experts of each node; the last may be smaller."""
    by_rank, most = _rank_sizes(cfg, world), MACHINES[cfg.run.machine].node_gpus
    return [sum(by_rank[i : i + most]) for i in range(0, len(by_rank), most)]


def _reached(e: MoEConfig, sizes: Sequence[int]) -> list[float]:
    """Probability that a token has one of the experts of each of several owners, who hold
    consecutive experts, `sizes` of them."""
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    known: dict[tuple[int, ...], float] = {}
    found = []
    for first, size in zip(firsts, sizes, strict=True):
        parts = _parts(e, first, size)
        if parts not in known:
            known[parts] = 1 - _missed(e, parts)
        found.append(known[parts])
    return found


def _parts(e: MoEConfig, first: int, size: int) -> tuple[int, ...]:
    """How many of `size` experts from `first` on are in each group that has any, sorted."""
    width = e.experts // e.router.groups
    end, begun = first + size, range(first // width, -(-(first + size) // width))
    return tuple(sorted(min(end, (g + 1) * width) - max(first, g * width) for g in begun))


def _missed(e: MoEConfig, parts: Sequence[int]) -> float:
    """Probability that a token has none of an owner's experts, which are `parts` of groups."""
    r, width = e.router, e.experts // e.router.groups
    ways = {(0, 0): 1}
    """Ways to choose among the owner's groups, by (groups chosen, experts of the owner in them)."""
    for part in parts:
        more: dict[tuple[int, int], int] = {}
        for (chosen, held), n in ways.items():
            for key in ((chosen, held), (chosen + 1, held + part)):
                more[key] = more.get(key, 0) + n
        ways = more
    pool, others = r.group_topk * width, r.groups - len(parts)
    missed = sum(
        n * comb(others, r.group_topk - chosen) * comb(pool - held, e.top_k)
        for (chosen, held), n in ways.items()
        if chosen <= r.group_topk
    )
    return missed / (comb(r.groups, r.group_topk) * comb(pool, e.top_k))
