"""Shared experts in two halves: one while tokens go to the routed experts, one on their way back.

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
from phalanx.moe.model.dense_mlp import takes
from phalanx.parallel.megatron.gathered import gathered
from phalanx.parallel.megatron.recipe_linear import compute_by
from phalanx.parallel.memory.again import checkpoint
from phalanx.parallel.memory.layer_pass import now

MEGATRON = partial(
    SharedExpertMLP,
    submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
)
"""Megatron-Core's."""


class SharedExperts(SharedExpertMLP):
    """Megatron-Core's, parameters and checkpoints included, by the kernels of the routed experts.

    Where `takes` says no, Megatron-Core computes them whole, on the way back, their products by the
    recipe.

    Args:
        spec: how.
        given: what Megatron-Core's takes.
    """

    def __init__(self, *, spec: MLPSpec, **given: Any) -> None:
        super().__init__(submodules=MEGATRON.keywords["submodules"], **given)
        ffn = self.config.moe_shared_expert_intermediate_size
        self.spec = for_widths(spec, ffn)
        """How they are computed, if in halves."""
        self._halves = takes(spec, ffn=ffn, tensor=self.tp_group.size(), bias=False)
        if spec.recipe is not None and not self._halves:
            compute_by(spec, self)

    def halves(self, hidden_SBD: Tensor) -> tuple[Callable[[], None], Callable[[], Tensor]]:
        """One call of [s, B, D]: the first half, and the second, which returns [N, D]."""
        between: list[DenseFc1] = []

        def first() -> None:
            if self._halves:
                with record_function("moe/shared"):
                    x_ND, w1 = hidden_SBD.flatten(0, 1), gathered(self.linear_fc1).weight
                    made = dense_fc1(x_ND, w1, self.spec)
                    now().drop("mlp", [made.h_NH], made.again)
                    between.append(made)

        def second() -> Tensor:
            with record_function("moe/shared"):
                if not self._halves and now().again("mlp"):
                    return checkpoint(self, hidden_SBD).flatten(0, 1)
                if not self._halves:
                    return self(hidden_SBD).flatten(0, 1)
                w2 = gathered(self.linear_fc2).weight
                out_ND = dense_fc2(between.pop(), w2, self.spec)
                return out_ND if self.gate_weight is None else out_ND * self._gate(hidden_SBD)

        return first, second

    def _gate(self, hidden_SBD: Tensor) -> Tensor:
        """[N, 1], of each token (arXiv 2407.10671, section 2.2.2)."""
        return F.linear(hidden_SBD.flatten(0, 1), gathered(self).gate_weight).sigmoid()
