"""What experts send between ranks: copies of a token, and bytes of a layer."""

from dataclasses import dataclass
from math import comb, gcd

from configs.layout import expert_parallel_size
from configs.schema import Config


@dataclass(frozen=True)
class Traffic:
    """Of one MoE layer and one token, leaving its rank."""

    ranks: float
    """Expected ranks that hold one of the token's experts, its own included."""
    copies: float
    """Times that a token's row is sent one way."""
    forward: float
    """Bytes: to the experts and back."""
    backward: float
    """Bytes: gradients to the experts and back, and tokens once more where they were not kept."""


def traffic(cfg: Config, world: int) -> Traffic:
    """Expected over uniformly random routing."""
    p, ranks = cfg.parallel, expert_parallel_size(cfg, world)
    hit = ranks * _reached(cfg, ranks)
    remote = hit * (ranks - 1) / ranks
    if p.dispatch == "alltoall" and cfg.kernels.backend != "megatron":
        remote = ranks - 1.0  # every token to every rank
    elif cfg.kernels.backend == "megatron":
        remote = cfg.model.moe.top_k * (ranks - 1) / ranks  # once for each expert
    row = remote * cfg.model.hidden * (2 if cfg.run.precision == "bf16" else 4)
    again = p.dispatch == "symm" and p.save_x == "redispatch" and cfg.kernels.backend != "megatron"
    passes = 2 * row
    repeated = passes if cfg.run.recompute in ("moe", "full") else 0.0
    return Traffic(hit, remote, passes, passes + repeated + (row if again else 0.0))


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
