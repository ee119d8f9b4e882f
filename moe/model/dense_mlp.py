"""The MLP of layers without experts, by the kernels of the routed experts.

Megatron-Core's MLP computes the activated gate, its product with the up projection and their
gradients by separate kernels, and saves them all. In these kernels they are part of the GEMMs, and
only the projection is saved (`kernels.expert_mlp.dense_mlp`).
"""

from dataclasses import replace
from typing import Any

from megatron.core.transformer.mlp import MLP
from torch import Tensor

from phalanx.kernels.expert_mlp.dense_mlp import dense_fc1, dense_fc2
from phalanx.kernels.expert_mlp.mlp_spec import Margins, MLPSpec, for_widths
from phalanx.moe.model.kernel_facts import uses_expert_kernels
from phalanx.parallel.megatron.param_gather import gathered
from phalanx.parallel.megatron.recipe_linear import compute_by
from phalanx.parallel.memory.layer_context import INACTIVE, LayerContext
from phalanx.parallel.memory.recompute import checkpoint


class DenseMLP(MLP):
    """Megatron-Core's MLP by the kernels that `uses_expert_kernels` selects.

    Parameters and checkpoints are the same. No communication overlaps it: no SMs are left free.
    """

    def __init__(self, *, spec: MLPSpec, pg_collection: Any, **kwargs: Any) -> None:
        kwargs.pop("is_mtp_layer", None)
        super().__init__(tp_group=pg_collection.tp, **kwargs)
        c, spec = self.config, replace(spec, margins=Margins())
        self.spec = for_widths(spec, c.ffn_hidden_size)  # where the expert kernels are used
        self._fused = uses_expert_kernels(
            spec, ffn=c.ffn_hidden_size, tensor=self.tp_group.size(), bias=c.add_bias_linear
        )
        if spec.recipe is not None and not self._fused:  # Megatron-Core adds biases
            compute_by(spec, self)

    def forward(
        self, hidden_states: Tensor, *args: Any, memory: LayerContext = INACTIVE, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        """Output [s, B, D] of hidden states [s, B, D], and a bias to add or None."""
        if not self._fused:
            if memory.recomputes("mlp"):
                return checkpoint(self._with_bias, hidden_states), None
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[no-any-return]
        w1, w2 = (gathered(linear).weight for linear in (self.linear_fc1, self.linear_fc2))
        first = dense_fc1(hidden_states.flatten(0, 1), w1, self.spec)
        memory.drop("mlp", [first.h_NH], first.recompute)
        return dense_fc2(first, w2, self.spec).view_as(hidden_states), None

    def _with_bias(self, hidden_states: Tensor) -> Tensor:
        out, bias = super().forward(hidden_states)
        return out if bias is None else out + bias
