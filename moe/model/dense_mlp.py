"""The MLP of layers without experts, by the kernels of the routed experts.

Megatron-Core's writes the activated half, its product with the other and their gradients by kernels
of their own, and saves them all. Here activation and gradients are part of the GEMMs, and the
projection alone is saved (`kernels.expert_mlp.dense_mlp`).
"""

from dataclasses import replace
from typing import Any

from megatron.core.transformer.mlp import MLP
from torch import Tensor

from phalanx.kernels.expert_mlp.dense_mlp import dense_fc1, dense_fc2
from phalanx.kernels.expert_mlp.mlp_spec import FUSED_MULTIPLE, Margins, MLPSpec, for_widths
from phalanx.parallel.megatron.gathered import gathered
from phalanx.parallel.megatron.recipe_linear import compute_by
from phalanx.parallel.memory.again import checkpoint
from phalanx.parallel.memory.layer_pass import now


def takes(spec: MLPSpec, *, ffn: int, tensor: int, bias: bool) -> bool:
    """Whether a dense MLP runs by the kernels of the routed experts.

    Args:
        spec: how it is computed.
        ffn: width of the activation.
        tensor: ranks that share the MLP.
        bias: of its two linear layers.
    """
    ours = (spec.backend == "fused" and ffn % FUSED_MULTIPLE == 0) or spec.recipe is not None
    return ours and tensor == 1 and not bias


class DenseMLP(MLP):
    """Megatron-Core's, parameters and checkpoints included; computed as `takes` says.

    Args:
        spec: how. No communication runs beside: no SMs are left free.
        given: what Megatron-Core's takes.
    """

    def __init__(self, *, spec: MLPSpec, pg_collection: Any, **given: Any) -> None:
        given.pop("is_mtp_layer", None)
        super().__init__(tp_group=pg_collection.tp, **given)
        c, spec = self.config, replace(spec, margins=Margins())
        self.spec = for_widths(spec, c.ffn_hidden_size)
        """How it is computed, if in halves."""
        self._fused = takes(
            spec, ffn=c.ffn_hidden_size, tensor=self.tp_group.size(), bias=c.add_bias_linear
        )
        if spec.recipe is not None and not self._fused:  # biases are Megatron-Core's to add
            compute_by(spec, self)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """[s, B, D] to [s, B, D], and a bias to add or None."""
        memory = now()
        if not self._fused:
            if memory.again("mlp"):
                return checkpoint(self._whole, hidden_states), None
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[no-any-return]
        w1, w2 = (gathered(linear).weight for linear in (self.linear_fc1, self.linear_fc2))
        first = dense_fc1(hidden_states.flatten(0, 1), w1, self.spec)
        memory.drop("mlp", [first.h_NH], first.again)
        return dense_fc2(first, w2, self.spec).view_as(hidden_states), None

    def _whole(self, hidden_states: Tensor) -> Tensor:
        out, bias = super().forward(hidden_states)
        return out if bias is None else out + bias
