"""Shared experts in two parts, which overlap dispatch and combine of the routed experts.

Legend: s tokens of a sequence on this rank, B sequences, D hidden, N = s * B, H and F widths of h
and of its activation.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor
from torch.profiler import record_function

from phalanx.kernels.expert_mlp.dense_mlp import DenseFc1, dense_fc1, dense_fc2
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec, for_widths
from phalanx.moe.model.kernel_facts import uses_expert_kernels
from phalanx.parallel.megatron.param_gather import gathered
from phalanx.parallel.megatron.recipe_linear import compute_by
from phalanx.parallel.memory.layer_context import INACTIVE, LayerContext
from phalanx.parallel.memory.recompute import checkpoint

MEGATRON = partial(
    SharedExpertMLP,
    submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
)


class SharedExperts(SharedExpertMLP):
    """Megatron-Core's SharedExpertMLP by the kernels of the routed experts.

    Parameters and checkpoints are the same. Where `uses_expert_kernels` says no, Megatron-Core
    computes all of it in the second part, its GEMMs by the recipe.
    """

    def __init__(self, *, spec: MLPSpec, **kwargs: Any) -> None:
        super().__init__(submodules=MEGATRON.keywords["submodules"], **kwargs)
        ffn = self.config.moe_shared_expert_intermediate_size
        self.spec = for_widths(spec, ffn)  # where the MLP is computed in two parts
        self._splits = uses_expert_kernels(spec, ffn=ffn, tensor=self.tp_group.size(), bias=False)
        if spec.recipe is not None and not self._splits:
            compute_by(spec, self)

    def halves(
        self, hidden_SBD: Tensor, memory: LayerContext = INACTIVE
    ) -> tuple[Callable[[], None], Callable[[], Tensor]]:
        """The two parts of one call of [s, B, D]; the second returns the output [N, D].

        The second computes the first too, unless it has been computed.
        """
        pending: list[DenseFc1] = []

        def first() -> None:
            if self._splits and not pending:
                with record_function("moe/shared"):
                    x_ND, w1 = hidden_SBD.flatten(0, 1), gathered(self.linear_fc1).weight
                    first_half = dense_fc1(x_ND, w1, self.spec)
                    memory.drop("mlp", [first_half.h_NH], first_half.recompute)
                    pending.append(first_half)

        def second() -> Tensor:
            first()
            with record_function("moe/shared"):
                if not self._splits and memory.recomputes("mlp"):
                    return checkpoint(self, hidden_SBD).flatten(0, 1)
                if not self._splits:
                    return self(hidden_SBD).flatten(0, 1)
                w2 = gathered(self.linear_fc2).weight
                out_ND = dense_fc2(pending.pop(), w2, self.spec)
                return out_ND if self.gate_weight is None else out_ND * self._gate(hidden_SBD)

        return first, second

    def _gate(self, hidden_SBD: Tensor) -> Tensor:
        """Gate [N, 1] of each token (arXiv 2407.10671, section 2.2.2)."""
        return F.linear(hidden_SBD.flatten(0, 1), gathered(self).gate_weight).sigmoid()
