"""Choices of experts in place of the router's, for benchmarks and debugging.

Balanced by force (model.moe.router.force_balance), or those of a recorded run, with its load,
whatever the weights are (model.moe.router.replay). Probabilities are the router's. Invariants: no
host read, no state, so that recomputation chooses the same.

Legend: T tokens of this rank, E experts in G groups of M members, K experts per token, N tokens
recorded.
"""

import random

import torch
from torch import Tensor

from phalanx.configs.schema import RouterConfig
from phalanx.moe.router.recording import layer_name, read_layer

_PATTERNS = 64


class ForcedBalance(torch.nn.Module):
    """Token n of the expert-parallel group takes the experts at K distinct shifts from n % E.

    So E consecutive tokens load every expert K times. Each of 64 such runs has random shifts of
    its own, within the limit on groups: as many ranks per token as a trained router would use, so
    that traffic is realistic.
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


class Replay(torch.nn.Module):
    """Token n of the expert-parallel group takes the experts of recorded token n % N.

    The recording at `path` fits the model (`moe.router.recording.mismatch`).
    """

    table: Tensor  # recorded experts, int16 [N, K]; empty before `load_layer`

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path
        empty = torch.empty(0, 0, dtype=torch.int16, device=torch.cuda.current_device())
        self.register_buffer("table", empty, persistent=False)

    def load_layer(self, number: int, prediction: bool) -> None:
        """Read the choices of a layer, by its number from 1 within its kind."""
        ids = read_layer(self._path, layer_name(number, prediction))
        self.table = torch.from_numpy(ids.astype("int16")).to(self.table.device)

    def forward(self, tokens: int, first_token: int) -> Tensor:
        """Experts of tokens `first_token`, `first_token` + 1, ... of the group: int64 [T, K]."""
        n_T = torch.arange(first_token, first_token + tokens, device=self.table.device)
        return self.table.index_select(0, n_T % self.table.size(0)).long()
