"""Latent experts: tokens are projected to fewer channels before they are sent to their experts.

    hidden -> route -> down -> dispatch -> experts -> combine -> up -> + shared + residual

LatentMoE of Nemotron 3 (arXiv 2512.20856). Dispatch, experts and combine have L channels in place
of D, so that bytes and FLOPs of an expert shrink by D / L, which pays for more experts and more of
them per token. The router and shared experts read the full hidden states. Projections stay in bf16
whatever the recipe of the run, and have no biases.

Legend: s tokens of a sequence on this rank, B sequences, T = s * B, D hidden, L latent channels,
K experts per token, N received tokens.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor
from torch.profiler import record_function

from phalanx.moe.layer import MoE
from phalanx.parallel.memory.layer_context import INACTIVE, LayerContext


class LatentMoE(MoE):
    """`moe.layer.MoE` whose experts have `config.moe_latent_size` channels.

    Args: those of MoE. Parameters beside them: latent_in_proj.weight [L, D] and
    latent_out_proj.weight [D, L].
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config, latent = self.config, self.config.moe_latent_size
        how: Any = dict(config=config, bias=False, tp_group=self.tp_group)
        self.latent_in_proj = ColumnParallelLinear(
            config.hidden_size, latent, init_method=config.init_method, **how
        )
        self.latent_out_proj = RowParallelLinear(
            latent,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **how,
        )

    def _forward(
        self,
        hidden_SBD: Tensor,
        residual_SBD: Tensor | None = None,
        memory: LayerContext = INACTIVE,
    ) -> Tensor:
        """Output of the layer [s, B, D]."""
        shared_fc1 = shared_fc2 = None
        if self.shared_experts is not None:
            shared_fc1, shared_fc2 = self.shared_experts.halves(hidden_SBD, memory)
        with record_function("moe/route"):
            topk_idx_TK, topk_prob_TK = self.router(hidden_SBD)
        with record_function("moe/latent"):
            latent_SBL, _ = self.latent_in_proj(hidden_SBD)
        with record_function("moe/dispatch"):
            sent = self.dispatcher.send_tokens(latent_SBL.flatten(0, 1), topk_idx_TK, topk_prob_TK)
            if shared_fc1 is not None and self.dispatcher.splits_shared_experts:
                shared_fc1()  # while tokens are in flight
            received = self.dispatcher.receive_tokens(sent)
            del sent
        if received.statistics is not None and self.training and torch.is_grad_enabled():
            self.router.statistics.note(received.statistics)
        with record_function("moe/experts"):
            out_NL = self.experts(received, (), memory)
        if not self._combine_in_experts:
            with record_function("moe/combine"):
                sums = self.dispatcher.send_sums(out_NL, received, alone=shared_fc2 is None)
                # What the shared experts have left of their work hides the sums in flight.
                shared_TD = None if shared_fc2 is None else shared_fc2()
                out_NL = self.dispatcher.receive_sums(sums, received, ())
        else:
            shared_TD = None if shared_fc2 is None else shared_fc2()
        with record_function("moe/latent"):
            out_SBD, _ = self.latent_out_proj(out_NL.view_as(latent_SBL))
        if shared_TD is not None:
            out_SBD = out_SBD + shared_TD.view_as(out_SBD)
        return out_SBD if residual_SBD is None else out_SBD + residual_SBD
