"""Linear attention of a layer: Gated DeltaNet (arXiv 2412.06464) over extras.linear_attention.

Parameters, tensor parallelism and checkpoints are Megatron-Core's. The forward pass is our own:
Megatron-Core's needs flash-linear-attention on any device, repeats queries and keys for every value
head, and finds documents by bounds that it reads on the host. Here a backend computes everything
between the two projections, and documents are distinguished by positions, on the device.

The recurrence runs along a whole sequence. Under context parallelism ranks that share sequences
therefore share out the heads, which do not know of each other, between the projections, which work
token by token: one exchange there and one back; gradients take the same ways in reverse. Of the 2 R
chunks of a sequence, Megatron-Core deals rank r chunks r and 2 R - 1 - r, which balances causal
attention. Here the order of tokens is restored, and cut again after (`extras.context.exchange`).
Sizes are static and nothing is read on the host.

Shape legend: S positions, in two chunks of s, B batch, D hidden, I outputs of the input projection,
C channels of the convolution, K key heads, V value heads, d channels of a head, R context ranks.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor
from torch.profiler import record_function

from phalanx.extras.context.exchange import own_heads, own_tokens, whole_sequences
from phalanx.extras.linear_attention.gated_delta import (
    causal_conv,
    gated_delta_rule,
    gated_rms_norm,
)
from phalanx.moe.model.norm import RMSNorm
from phalanx.parallel.megatron.imports import without
from phalanx.parallel.megatron.param_gather import gathered


def _gated_delta_net() -> Any:
    """Megatron-Core's package `ssm.gated_delta_net`, without flash-linear-attention.

    It imports the library on any device, which takes seconds, and its layers insist on it when they
    are built; this module computes between their projections itself.
    """
    with without("fla"):
        from megatron.core.ssm import gated_delta_net
    gated_delta_net.common.HAVE_FLA = True
    return gated_delta_net


_MEGATRON = _gated_delta_net()


class OutputNorm(RMSNorm):
    """RMSNorm of each value head, times SiLU of its gate; its weight is never stored less 1."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__(config, hidden_size, eps)
        self.centered = False
        torch.nn.init.ones_(self.weight)


class GatedDelta(_MEGATRON.GatedDeltaNet):  # type: ignore[misc, name-defined]
    """Megatron-Core's GatedDeltaNet over a `backend`, for whole sequences; same parameters."""

    def __init__(self, *args: Any, backend: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.backend = backend

    def _setup_variant_attrs(self) -> None:
        super()._setup_variant_attrs()
        self.gated_delta_rule = gated_delta_rule  # Megatron-Core's constructor requires one

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of one layer: output in the shape of hidden_states, and no bias.

        Args:
            hidden_states: [S, B, D], under sequence parallelism S / tensor of them; under context
                parallelism S is the rank's two chunks of the sequence, as Megatron-Core assigns
                them.
            packed_seq_params: `moe.model.packed.Packed` of the S tokens of one sequence, or None.
            attention_mask, kwargs: part of Megatron-Core's protocol, not used: linear attention is
                always causal and has no rotary angles.
        """
        mixed_SBI, _ = self.in_proj(hidden_states)
        with record_function("attention/linear"):
            batch, packed = mixed_SBI.shape[1], packed_seq_params
            # The model sees packed sequences as one; the recurrence needs them one by one.
            sequences, position_BS = batch, None
            if packed is not None:
                sequences, position_BS = packed.sequences, packed.whole_BS
            mixed_BSI = mixed_SBI.transpose(0, 1).reshape(sequences, -1, mixed_SBI.shape[-1])
            group = self.pg_collection.cp
            if self.cp_size > 1:
                parts = mixed_BSI.split(list(self.in_proj_split_sections), -1)
                mixed_BSI = whole_sequences(parts, group)
            out_BSC = self._between(mixed_BSI, position_BS).flatten(2)
            if self.cp_size > 1:
                out_BSC = own_tokens(out_BSC, group)
            out_SBC = out_BSC.reshape(batch, -1, out_BSC.shape[-1]).transpose(0, 1).contiguous()
        out, bias = self.out_proj(out_SBC)
        return out, bias

    def _between(self, mixed_BSI: Tensor, position_BS: Tensor | None) -> Tensor:
        """Input of the output projection, from the output of the input projection, of own heads."""
        qkv_BSC, gate, beta_BSV, alpha_BSV = mixed_BSI.split(list(self.feat_dim_split), -1)
        qkv_BSC = causal_conv(qkv_BSC, self._taps_CW(), position_BS, backend=self.backend)
        q, k, v = self._heads(qkv_BSC)
        out_BSVd = gated_delta_rule(
            q,
            k,
            v,
            self._log_decay(alpha_BSV),
            beta_BSV.sigmoid(),
            position_BS,
            backend=self.backend,
        )
        return self._gated(out_BSVd, gate)

    def _taps_CW(self) -> Tensor:
        conv_CW = gathered(self.conv1d).weight.squeeze(1)
        return self._local(conv_CW, *self.in_proj_split_sections[:3])

    def _heads(self, qkv_BSC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of each head."""
        keys, values = (n // self.cp_size for n in (self.qk_dim_local_tp, self.v_dim_local_tp))
        parts = qkv_BSC.split([keys, keys, values], -1)
        q, k, v = (x.unflatten(-1, (-1, self.value_head_dim)) for x in parts)
        return q, k, v

    def _log_decay(self, alpha_BSV: Tensor) -> Tensor:
        rate_BSV = F.softplus(alpha_BSV.float() + self._local(self.dt_bias).float())
        return -self._local(self.A_log).float().exp() * rate_BSV

    def _gated(self, out_BSVd: Tensor, gate: Tensor) -> Tensor:
        norm, gate_BSVd = gathered(self.out_norm), gate.unflatten(-1, (-1, self.value_head_dim))
        return gated_rms_norm(out_BSVd, gate_BSVd, norm.weight, norm.eps, backend=self.backend)

    def _local(self, parameter: Tensor, *sections: int) -> Tensor:
        if self.cp_size == 1:
            return parameter
        return own_heads(parameter, sections or (len(parameter),), self.pg_collection.cp)


def spec(backend: str, *_: Any) -> ModuleSpec:
    """Layer spec of linear attention by a backend of `extras.linear_attention.gated_delta`."""
    submodules = _MEGATRON.GatedDeltaNetSubmodules(
        in_proj=ColumnParallelLinear, out_norm=OutputNorm, out_proj=RowParallelLinear
    )
    return ModuleSpec(module=GatedDelta, params={"backend": backend}, submodules=submodules)
