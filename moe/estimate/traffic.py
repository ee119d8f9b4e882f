"""What experts send between ranks: copies of a token, and bytes of a layer."""

from dataclasses import dataclass
from math import comb, gcd

from configs.layout import expert_parallel_size
from configs.machines import MACHINES
from configs.schema import Config


@dataclass(frozen=True)
class Traffic:
    """Of one MoE layer and one token, leaving its rank."""

    ranks: float
    """Expected ranks that hold one of the token's experts, its own included."""
    copies: float
    """Times that a token's row is sent one way."""
    crossings: float
    """How many of these times it goes to another node of `run.machine`."""
    forward: float
    """Bytes: to the experts and back."""
    backward: float
    """Bytes: gradients to the experts and back, and tokens once more where they were not kept."""
    network: float
    """How many of these bytes, of both, go to other nodes."""


def traffic(cfg: Config, world: int) -> Traffic:
    """Expected over uniformly random routing."""
    p, ranks, count = cfg.parallel, expert_parallel_size(cfg, world), nodes(cfg, world)
    size = ranks / count
    hit = ranks * _reached(cfg, ranks)
    own = cfg.kernels.backend != "megatron"
    # To how many ranks, this one included; by all but `hier`, which goes by a rank of each node.
    to = hit if own else cfg.model.moe.top_k  # once for each expert
    if own and (p.dispatch == "alltoall" or (p.dispatch == "hier" and not one_sided(cfg))):
        to = ranks  # every token to every rank
    far, near = to * (1 - 1 / count), to * (size - 1) / ranks
    if own and p.dispatch == "hier":
        far, near = count - 1, to * (size - 1) / size
    row = cfg.model.hidden * (2 if cfg.run.precision == "bf16" else 4)
    again = 0.0
    if own and one_sided(cfg) and p.save_x == "redispatch":
        again = (near if p.dispatch == "hier" else near + far) * row
    repeated = 2 if cfg.run.recompute in ("moe", "full") else 0
    forward, backward = 2 * (near + far) * row, (2 + repeated) * (near + far) * row + again
    return Traffic(hit, near + far, far, forward, backward, (4 + repeated) * far * row)


def nodes(cfg: Config, world: int) -> int:
    """Nodes of `run.machine` that an expert-parallel group spans; its ranks are neighbours."""
    return -(-expert_parallel_size(cfg, world) // MACHINES[cfg.run.machine].node_gpus)


def one_sided(cfg: Config) -> bool:
    """Whether tokens are pushed inside a node, to the ranks that want them alone."""
    return cfg.parallel.dispatch == "symm" or (
        cfg.parallel.dispatch == "hier" and cfg.run.precision == "bf16"
    )


def _reached(cfg: Config, ranks: int) -> float:
    """Probability that one rank has an expert of a token.

    With group-limited routing the token's groups are drawn first, then experts among theirs.
    """
    e, r = cfg.model.moe, cfg.model.moe.router
    groups = r.groups if gcd(r.groups, ranks) in (r.groups, ranks) else 1
    limit = r.group_topk if groups > 1 else 1
    in_group, pool = e.experts // groups, limit * e.experts // groups
    mine = max(1, groups // ranks)  # groups that a rank has a part of
    missed = 0.0
    for chosen in range(max(0, mine + limit - groups), min(mine, limit) + 1):
        drawn = comb(mine, chosen) * comb(groups - mine, limit - chosen) / comb(groups, limit)
        own = chosen * min(in_group, e.experts // ranks)
        missed += drawn * comb(pool - own, e.top_k) / comb(pool, e.top_k)
    return 1 - missed
