"""Forced balance, for benchmarks: a choice of experts that loads all experts equally.

Replaces the top-k of the router (model.moe.router.force_balance). Invariants: no host read, no
state, and as many ranks per token as a trained router would use, so that traffic is realistic.

Legend: T tokens of this rank, E experts in G groups of M members, K experts per token.
"""

import random

import torch
from torch import Tensor

from phalanx.configs.schema import RouterConfig

_PATTERNS = 64


class ForcedBalance(torch.nn.Module):
    """Token n of the expert-parallel group takes the experts at K distinct shifts from n % E.

    So E consecutive tokens load every expert K times, and the balance is perfect if the group's
    tokens are a multiple of E. Each of 64 such runs has random shifts of its own, within the limit
    on groups. Recomputation chooses the same.
    """

    table: Tensor  # int64 [64, K, 2]: shifts of group and member

    def __init__(self, options: RouterConfig, *, experts: int, top_k: int) -> None:
        super().__init__()
        self.groups, self.members = options.groups, experts // options.groups
        draw = random.Random(0)
        shifts = []
        for _ in range(_PATTERNS):
            allowed = draw.sample(range(self.groups), options.group_topk)
            pairs = [(g, m) for g in allowed for m in range(self.members)]
            shifts.append(draw.sample(pairs, top_k))
        table = torch.tensor(shifts, dtype=torch.int64, device=torch.cuda.current_device())
        self.register_buffer("table", table, persistent=False)

    def forward(self, tokens: int, first_token: int) -> Tensor:
        """Experts of tokens `first_token`, `first_token` + 1, ... of the group: int64 [T, K]."""
        n_T = torch.arange(first_token, first_token + tokens, device=self.table.device)
        expert_T, run_T = n_T % (self.groups * self.members), n_T // (self.groups * self.members)
        shift_TK2 = self.table.index_select(0, run_T % _PATTERNS)
        group_TK = (expert_T[:, None] // self.members + shift_TK2[..., 0]) % self.groups
        member_TK = (expert_T[:, None] + shift_TK2[..., 1]) % self.members
        return group_TK * self.members + member_TK
