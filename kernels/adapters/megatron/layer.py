"""Megatron-Core's MoE layer with its router and shared experts, and the exchange of this project.

Legend: T tokens of a rank, K experts per token, E experts of all ranks, D hidden.
"""

from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from phalanx.adapters.expert_groups import group_of
from phalanx.adapters.megatron.experts import Experts


class SymmMoELayer(MoELayer):
    """The stock layer with tokens exchanged within kernels over NVLink, on gloo by all-to-all.

    It takes the constructor arguments of Megatron-Core's layer. Nothing is read on the host. Every
    rank of the expert-parallel group has as many tokens as any other.

    Raises:
        ValueError: overlapped shared experts, or experts other than `Experts`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.shared_expert_overlap:
            raise ValueError("moe_shared_expert_overlap: symm_spec does not overlap: set it false")
        if not isinstance(self.experts, Experts):
            raise ValueError(
                "experts: SymmMoELayer is built with phalanx.adapters.megatron.Experts"
            )
        self._group = group_of(self.ep_group, self.config.params_dtype)
        self._idx_TK: Tensor | None = None

    def preprocess(
        self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Hidden states, and the [T, K] probabilities of each token's experts, which are noted."""
        chosen_TE = routing_map.bool()
        ranked_TE = torch.where(chosen_TE, probs.detach(), -1.0)
        idx_TK = ranked_TE.topk(self.config.moe_router_topk, dim=-1, sorted=False).indices
        # A token that was dropped or is padding has fewer experts.
        self._idx_TK = torch.where(chosen_TE.gather(1, idx_TK), idx_TK, -1)
        return hidden_states, probs.gather(1, idx_TK)

    def dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Nothing: tokens are exchanged with the computation."""
        return hidden_states, probs

    def routed_experts_compute(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Weighted sum of each token's experts, in the shape of the hidden states."""
        idx_TK, self._idx_TK = self._idx_TK, None
        x_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
        experts = self.experts
        out_TD = self._group.experts(x_TD, idx_TK, probs, *experts.weights, **experts.options)
        return out_TD.view_as(hidden_states), None

    def combine(self, output: Tensor) -> Tensor:
        """Nothing: sums are back already."""
        return output

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        """The output and that of the shared experts."""
        return output if shared_expert_output is None else output + shared_expert_output
