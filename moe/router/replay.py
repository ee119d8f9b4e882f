"""Recorded choices in place of the router's (model.moe.router.replay): benchmarks and debugging.

The load of the experts is that of the recorded run, whatever the weights are, and the same in every
step. Probabilities are computed by the router, of the recorded experts. Invariants: no host read,
no state, so that recomputation chooses the same.

Legend: T tokens of this rank, K experts per token, N tokens recorded.
"""

import torch
from torch import Tensor

from phalanx.moe.router.recording import layer_name, read_layer


class Replay(torch.nn.Module):
    """Token n of the expert-parallel group takes the experts of recorded token n % N.

    Args:
        path: file of a recording that fits the model (`moe.router.recording.mismatch`).
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
