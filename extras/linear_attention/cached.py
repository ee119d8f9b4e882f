"""Linear attention that keeps its state behind prompts, so that a new token is computed alone.

A layer keeps the last inputs of its convolution and the matrix of each value head
(`moe.inference.cache` describes how new tokens come). Tokens that pad a prompt change neither.

Legend: as `extras.linear_attention.gated_delta_net`.
"""

from typing import Any

import torch
from torch import Tensor

from phalanx.extras.linear_attention.gated_delta import causal_conv, gated_delta_rule_and_state
from phalanx.extras.linear_attention.gated_delta_net import GatedDelta
from phalanx.extras.linear_attention.torch_delta import gated_delta_step
from phalanx.moe.inference.cache import NewTokens, Reading, keep_last, state_like


def install(layer: Any, reading: Reading) -> None:
    """Give a layer of linear attention a cache."""
    layer.__class__ = CachedGatedDelta
    layer.reading, layer.inputs, layer.state, layer.continues = reading, None, None, False


class CachedGatedDelta(GatedDelta):
    """Gated DeltaNet with a cache of its state."""

    reading: Reading
    inputs: Tensor  # of the convolution at the last W - 1 tokens, [B, W - 1, C]
    state: Tensor  # [B, V, d, d], fp32
    continues: bool  # tokens are `NewTokens`

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As `GatedDelta`."""
        self.continues = isinstance(packed_seq_params, NewTokens)
        return super().forward(hidden_states, attention_mask, packed_seq_params, **kwargs)

    def _between(self, mixed_BSI: Tensor, position_BS: Tensor | None) -> Tensor:
        length_B = self.reading.length_B
        if not self.continues and length_B is None:
            return super()._between(mixed_BSI, position_BS)
        qkv_BSC, gate, beta_BSV, alpha_BSV = mixed_BSI.split(list(self.feat_dim_split), -1)
        beta_BSV, log_decay_BSV = beta_BSV.sigmoid(), self._log_decay(alpha_BSV)
        taps_CW = self._taps_CW()
        before = taps_CW.shape[1] - 1
        if length_B is None:
            inputs_BWC = torch.cat((self.inputs, qkv_BSC), 1)
            qkv_BSC = causal_conv(inputs_BWC, taps_CW, backend="torch")[:, -1:]
            self.inputs.copy_(inputs_BWC[:, 1:])
            q, k, v = (x[:, 0] for x in self._heads(qkv_BSC))
            decay_BV, beta_BV = log_decay_BSV[:, 0], beta_BSV[:, 0]
            out_BVd, state = gated_delta_step(q, k, v, decay_BV, beta_BV, self.state)
            self.state.copy_(state)
            return self._gated(out_BVd[:, None], gate)
        self.inputs = state_like(self.inputs, keep_last(qkv_BSC, before, length_B))
        qkv_BSC = causal_conv(qkv_BSC, taps_CW, backend=self.backend)
        padding_BS = torch.arange(qkv_BSC.shape[1], device=qkv_BSC.device) >= length_B[:, None]
        q, k, v = self._heads(qkv_BSC)
        out_BSVd, state = gated_delta_rule_and_state(
            q,
            k,
            v,
            log_decay_BSV.masked_fill(padding_BS[..., None], 0),
            beta_BSV.masked_fill(padding_BS[..., None], 0),
            backend=self.backend,
        )
        self.state = state_like(self.state, state)
        return self._gated(out_BSVd, gate)
