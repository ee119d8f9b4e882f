"""Which experts the tokens of a rank take, and how many rows follow from it.

Legend: T tokens of a rank, E experts, K experts of a token, R ranks.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.configs.schema import RouterConfig
from phalanx.moe.router.forced_balance import ForcedBalance
from phalanx.scripts.bench.models import GPUS

KINDS = ("random", "balanced")
"""K distinct experts drawn evenly, and the forced balance of model.moe.router.force_balance."""
OF_EIGHT = "as of eight"
"""Drawn so that an eighth of the rows stays on its GPU, as with eight of them: what crosses a link
and what a GPU writes to itself share its SMs."""


def routed(
    kind: str, tokens: int, experts: int, top_k: int, *, rank: int, device: torch.device
) -> Tensor:
    """int32 [T, K] of a rank, of a kind of KINDS, or OF_EIGHT of a group of `dist`'s size, at most
    eight."""
    if kind == "balanced":
        choice = ForcedBalance(RouterConfig(), experts=experts, top_k=top_k)
        return choice(tokens, rank * tokens).to(torch.int32)
    generator = torch.Generator(device).manual_seed(rank)
    scores = torch.rand(tokens, experts, generator=generator, device=device)
    if kind == OF_EIGHT:
        ranks = dist.get_world_size()
        leaving = torch.rand(tokens, generator=generator, device=device) > (ranks - 1) / (GPUS - 1)
        own = torch.arange(experts, device=device) // (experts // ranks) == rank
        scores -= (leaving[:, None] & own).float()
    return scores.topk(top_k, dim=1).indices.to(torch.int32)


UNEVEN = (*reversed(KINDS), "Zipf", "half to one expert", "one rank")
"""What clones of hot experts are measured with, balanced first."""


def uneven(
    kind: str, tokens: int, experts: int, top_k: int, *, rank: int, device: torch.device
) -> Tensor:
    """int32 [T, K] of a rank, of a kind of UNEVEN.

    `Zipf`: drawn without replacement by weights 1 / n, the n-th expert of a random order that all
    ranks share. `half to one expert`: drawn evenly, but half of all tokens take the second expert.
    `one rank`: drawn evenly of the first rank's.
    """
    where = dict(rank=rank, device=device)
    if kind in KINDS:
        return routed(kind, tokens, experts, top_k, **where)
    if kind == "one rank":
        return routed("random", tokens, experts // dist.get_world_size(), top_k, **where)
    generator = torch.Generator(device).manual_seed(rank)
    if kind == "half to one expert":
        idx = routed("random", tokens, experts, top_k, **where)
        takes = torch.rand(tokens, generator=generator, device=device) < 0.5
        idx[:, 0] = torch.where(takes & (idx != 1).all(1), 1, idx[:, 0])
        return idx
    order = torch.randperm(experts, generator=torch.Generator().manual_seed(0)).to(device)
    # The largest of log weight + Gumbel noise are a draw without replacement.
    noise = -torch.log(-torch.log(torch.rand(tokens, experts, generator=generator, device=device)))
    return (noise - torch.log(order + 1.0)).topk(top_k, dim=1).indices.to(torch.int32)


def probabilities(tokens: int, top_k: int, *, rank: int, device: torch.device) -> Tensor:
    """fp32 [T, K] that sum to 1."""
    generator = torch.Generator(device).manual_seed(rank)
    return torch.rand(tokens, top_k, generator=generator, device=device).softmax(1)


def fullest(idx_TK: Tensor, experts: int, group: dist.ProcessGroup) -> float:
    """Expert rows of the rank that gets most, over T * K. All ranks of the group ask together."""
    counts_E = torch.bincount(idx_TK.flatten(), minlength=experts)
    dist.all_reduce(counts_E, group=group)
    most = counts_E.view(dist.get_world_size(group), -1).sum(1).max().item()
    return most / idx_TK.numel()


def bytes_sent(idx_TK: Tensor, hidden: int, *, experts: int, rank: int, ranks: int) -> int:
    """That leave a GPU in a dispatch: a bf16 row for each other rank with an expert of a token.

    And to each other rank the routing of all tokens, an id and a probability of 4 bytes each.
    """
    owner_TK = idx_TK.long() // (experts // ranks)
    wanted_TR = torch.zeros(len(idx_TK), ranks, dtype=torch.bool, device=idx_TK.device)
    wanted_TR.scatter_(1, owner_TK, True)
    wanted_TR[:, rank] = False
    side = 8 * idx_TK.numel()
    return 2 * hidden * int(wanted_TR.sum()) + (ranks - 1) * side
