"""Linear attention of a layer: Gated DeltaNet (arXiv 2412.06464) over extras.linear_attention.

Parameters, tensor parallelism and checkpoints are Megatron-Core's. The forward pass is our own:
Megatron-Core's needs flash-linear-attention on any device, repeats queries and keys for every value
head, and finds documents by bounds that it reads on the host. Here a backend computes everything
between the two projections, and documents are distinguished by positions, on the device.

The recurrence runs along a whole sequence. Under context parallelism a rank therefore computes some
of the heads over whole sequences between the projections, which work token by token.

Shape legend: S positions, B batch, D hidden, I outputs of the input projection, C channels of the
convolution, K key heads, V value heads, d channels of a head.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor
from torch.profiler import record_function

from phalanx.extras.linear_attention.context_parallel import (
    own_heads,
    own_tokens,
    whole_sequences,
)
from phalanx.extras.linear_attention.gated_delta import (
    causal_conv,
    gated_delta_rule,
    gated_rms_norm,
)
from phalanx.moe.model.norm import RMSNorm
from phalanx.parallel.megatron.gathered import gathered
from phalanx.parallel.megatron.imports import without


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
    """Megatron-Core's GatedDeltaNet for training on whole sequences; parameters are the same.

    Args:
        backend: backend of `extras.linear_attention.gated_delta`.
        args, kwargs: arguments of Megatron-Core's class.
    """

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
        """Attention of one layer.

        Args:
            hidden_states: [S, B, D], under sequence parallelism S / tensor of them; under context
                parallelism S is the rank's two chunks of the sequence, as Megatron-Core assigns
                them.
            packed_seq_params: `moe.model.packed.Packed` of the S tokens of one sequence, or None.
            attention_mask, kwargs: part of Megatron-Core's protocol, not used: linear attention is
                always causal and has no rotary angles.

        Returns:
            Output in the shape of hidden_states, and no bias.
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
                mixed_BSI = whole_sequences(mixed_BSI, self.in_proj_split_sections, group)
            out_BSC = self._between(mixed_BSI, position_BS).flatten(2)
            if self.cp_size > 1:
                out_BSC = own_tokens(out_BSC, group)
            out_SBC = out_BSC.reshape(batch, -1, out_BSC.shape[-1]).transpose(0, 1).contiguous()
        out, bias = self.out_proj(out_SBC)
        return out, bias

    def _between(self, mixed_BSI: Tensor, position_BS: Tensor | None) -> Tensor:
        """Input of the output projection [B, S, V, d], from the output of the input projection.

        Both are of this context rank's heads over whole sequences.
        """
        d = self.value_head_dim
        keys, values = (n // self.cp_size for n in (self.qk_dim_local_tp, self.v_dim_local_tp))
        qkv_BSC, gate, beta_BSV, alpha_BSV = mixed_BSI.split(list(self.feat_dim_split), -1)
        conv_CW = gathered(self.conv1d).weight.squeeze(1)
        weight_CW = self._local(conv_CW, *self.in_proj_split_sections[:3])
        qkv_BSC = causal_conv(qkv_BSC, weight_CW, position_BS, backend=self.backend)
        q, k, v = (x.unflatten(-1, (-1, d)) for x in qkv_BSC.split([keys, keys, values], -1))
        rate_BSV = F.softplus(alpha_BSV.float() + self._local(self.dt_bias).float())
        out_BSVd = gated_delta_rule(
            q,
            k,
            v,
            -self._local(self.A_log).float().exp() * rate_BSV,
            beta_BSV.sigmoid(),
            position_BS,
            backend=self.backend,
        )
        norm, gate_BSVd = gathered(self.out_norm), gate.unflatten(-1, (-1, d))
        return gated_rms_norm(out_BSVd, gate_BSVd, norm.weight, norm.eps, backend=self.backend)

    def _local(self, parameter: Tensor, *sections: int) -> Tensor:
        """Part of a parameter that belongs to this context rank's heads; one section by default."""
        if self.cp_size == 1:
            return parameter
        return own_heads(parameter, sections or (len(parameter),), self.pg_collection.cp)


def spec(backend: str) -> ModuleSpec:
    """Layer spec of linear attention.

    Args:
        backend: backend of `extras.linear_attention.gated_delta`.
    """
    submodules = _MEGATRON.GatedDeltaNetSubmodules(
        in_proj=ColumnParallelLinear, out_norm=OutputNorm, out_proj=RowParallelLinear
    )
    return ModuleSpec(module=GatedDelta, params={"backend": backend}, submodules=submodules)
