"""Experts of the tokens of a rank, and the number of rows that follows.

Legend: T tokens of a rank, E experts, K experts of a token, R ranks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.configs.schema import RouterConfig
from phalanx.moe.router.forced import ForcedBalance
from phalanx.scripts.lab.bench.models import GPUS

KINDS = ("random", "balanced")
"""K distinct experts drawn uniformly, and the balance of model.moe.router.force_balance."""
OF_EIGHT = "as of eight"
"""Drawn so that an eighth of the rows stays on its GPU, as with eight GPUs: rows that cross a link
and rows that a GPU writes to itself share its SMs."""


def routed(
    kind: str, tokens: int, experts: int, top_k: int, *, rank: int, device: torch.device
) -> Tensor:
    """int32 [T, K] of a rank: routing of a kind of KINDS, or OF_EIGHT (at most eight ranks)."""
    if kind == "balanced":
        choice = ForcedBalance(RouterConfig(), experts=experts, top_k=top_k)
        return choice(tokens, rank * tokens).to(torch.int32)
    generator = torch.Generator(device).manual_seed(rank)
    scores = torch.rand(tokens, experts, generator=generator, device=device)
    if kind == OF_EIGHT:
        ranks = dist.get_world_size()
        sends = torch.rand(tokens, generator=generator, device=device) > (ranks - 1) / (GPUS - 1)
        local = torch.arange(experts, device=device) // (experts // ranks) == rank
        scores -= (sends[:, None] & local).float()
    return scores.topk(top_k, dim=1).indices.to(torch.int32)


UNEVEN = (*reversed(KINDS), "Zipf", "half to one expert", "one rank")
"""Kinds of routing that expert replication is measured with, balanced first."""


def uneven(
    kind: str, tokens: int, experts: int, top_k: int, *, rank: int, device: torch.device
) -> Tensor:
    """int32 [T, K] of a rank: routing of a kind of UNEVEN.

    `Zipf`: drawn without replacement by weights 1 / n, the n-th expert of a random order that all
    ranks share. `half to one expert`: drawn uniformly, but half of all tokens take expert 1. `one
    rank`: drawn uniformly from the first rank's experts.
    """
    rank_device: dict[str, Any] = dict(rank=rank, device=device)
    if kind in KINDS:
        return routed(kind, tokens, experts, top_k, **rank_device)
    if kind == "one rank":
        return routed("random", tokens, experts // dist.get_world_size(), top_k, **rank_device)
    generator = torch.Generator(device).manual_seed(rank)
    if kind == "half to one expert":
        idx = routed("random", tokens, experts, top_k, **rank_device)
        takes = torch.rand(tokens, generator=generator, device=device) < 0.5
        idx[:, 0] = torch.where(takes & (idx != 1).all(1), 1, idx[:, 0])
        return idx
    return _zipf(1.0, tokens, experts, top_k, generator)


def _zipf(
    exponent: float, tokens: int, experts: int, top_k: int, generator: torch.Generator
) -> Tensor:
    """int32 [T, K], drawn without replacement by weights n ** -exponent."""
    device = generator.device
    order = torch.randperm(experts, generator=torch.Generator().manual_seed(0)).to(device)
    # The top k of log weight + Gumbel noise are a draw without replacement.
    noise = -torch.log(-torch.log(torch.rand(tokens, experts, generator=generator, device=device)))
    scores = noise - exponent * torch.log(order + 1.0)
    return scores.topk(top_k, dim=1).indices.to(torch.int32)


OVER_NODES = ("random", "Zipf 0.6", "half of the nodes")
"""int32 [T, K] of a rank: routing of a kind of OVER_NODES.

`Zipf 0.6`: as `uneven`, by weights n ** -0.6. `half of the nodes`: drawn uniformly from the experts
of half of the nodes, at least one, drawn for each token.
"""


def over_nodes(
    kind: str,
    tokens: int,
    experts: int,
    top_k: int,
    *,
    nodes: int,
    rank: int,
    device: torch.device,
) -> Tensor:
    """int32 [T, K] of a rank: routing of a kind of OVER_NODES.

    `Zipf 0.6`: as `uneven`, by weights n ** -0.6. `half of the nodes`: drawn uniformly from the
    experts of half of the nodes, at least one, which are drawn for each token.
    """
    generator = torch.Generator(device).manual_seed(rank)
    if kind == "Zipf 0.6":
        return _zipf(0.6, tokens, experts, top_k, generator)
    if kind == "half of the nodes":
        priority = torch.rand(tokens, nodes, generator=generator, device=device)
        chosen = priority.topk(half_of(nodes), dim=1).indices
        allowed = torch.zeros_like(priority).scatter_(1, chosen, 1.0)
        scores = torch.rand(tokens, experts, generator=generator, device=device)
        scores += allowed.repeat_interleave(experts // nodes, 1)
        return scores.topk(top_k, dim=1).indices.to(torch.int32)
    return routed(kind, tokens, experts, top_k, rank=rank, device=device)


def half_of(nodes: int) -> int:
    """Number of nodes that `half of the nodes` allows a token."""
    return max(1, nodes // 2)


def probabilities(tokens: int, top_k: int, *, rank: int, device: torch.device) -> Tensor:
    """fp32 [T, K] that sum to 1."""
    generator = torch.Generator(device).manual_seed(rank)
    return torch.rand(tokens, top_k, generator=generator, device=device).softmax(1)


def fullest(idx_TK: Tensor, experts: int, group: dist.ProcessGroup) -> float:
    """Expert rows of the most loaded rank, over T * K. Collective over the group."""
    counts_E = torch.bincount(idx_TK.flatten(), minlength=experts)
    dist.all_reduce(counts_E, group=group)
    largest = counts_E.view(dist.get_world_size(group), -1).sum(1).max().item()
    return largest / idx_TK.numel()


def bytes_sent(idx_TK: Tensor, hidden: int, *, experts: int, rank: int, ranks: int) -> int:
    """Bytes that leave a GPU in a dispatch: a bf16 row per token and other rank with its experts.

    Each other rank also gets the routing of all tokens, twice 4 bytes a choice.
    """
    owner_TK = idx_TK.long() // (experts // ranks)
    wanted_TR = torch.zeros(len(idx_TK), ranks, dtype=torch.bool, device=idx_TK.device)
    wanted_TR.scatter_(1, owner_TK, True)
    wanted_TR[:, rank] = False
    side = 8 * idx_TK.numel()
    return 2 * hidden * int(wanted_TR.sum()) + (ranks - 1) * side
