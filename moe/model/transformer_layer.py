"""The layer of all models: Megatron-Core's, with its additions inside the kernels around them.

    sum = hidden                  normed = norm(sum)       no kernel of its own for the sum
    sum = attention(normed) + sum normed = norm(sum)       one kernel
    hidden = mlp(normed) + sum                             in the combine of an MoE layer

Megatron-Core 0.19.2 adds after attention and after the MLP in passes of their own, and autograd
adds the gradients of a norm and of what goes past it in another. Its `fused_residual_rmsnorm`
spares only the last, and only with Transformer Engine. Here `moe.model.norm.ResidualNorm` makes a
norm and its sum, and takes both gradients. On a CPU, and with Transformer Engine's norm, the
additions are Megatron-Core's, in its order.

Legend: s positions of this rank, B sequences, D hidden.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import make_viewless_tensor
from torch import Tensor, nn

from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec
from phalanx.moe.layer import MoE
from phalanx.moe.model.norm import ResidualNorm
from phalanx.parallel.megatron.recipe_linear import compute_by
from phalanx.parallel.memory.layer_context import (
    KEEP_ALL,
    MemoryPlan,
    current_layer_context,
    enter_layer,
)
from phalanx.parallel.memory.recompute import checkpoint


class Layer(TransformerLayer):
    """Megatron-Core's layer for training on whole sequences, parameters and checkpoints included.

    Args:
        projections: how attention's are computed, if by a recipe.
        memory: what is computed again or moved to host memory.
        given: what Megatron-Core's takes.

    Raises:
        ValueError: a configuration with dropout, residuals in fp32, or Megatron-Core's own
            recomputation, which `memory` takes the place of.
    """

    def __init__(
        self,
        *given: Any,
        projections: MLPSpec | None = None,
        memory: MemoryPlan = KEEP_ALL,
        **named: Any,
    ) -> None:
        super().__init__(*given, **named)
        self._memory = memory
        if projections is not None:
            compute_by(projections, self.self_attention)
        if self.hidden_dropout or self.config.fp32_residual_connection:
            raise ValueError("layers have no dropout and no residuals in fp32")
        if self.config.recompute_granularity is not None:
            raise ValueError("layers compute again what run.recompute says, not Megatron-Core")

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        rotary_pos_emb: Any = None,
        packed_seq_params: Any = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """One layer.

        Args:
            hidden_states: [s, B, D].
            attention_mask: passed on to attention.
            rotary_pos_emb: angles, for attention.
            packed_seq_params: `moe.model.packed.Packed`, for attention, or None.
            others: of Megatron-Core's protocol, for inference and encoders: None.

        Returns:
            Hidden states [s, B, D], and no context.
        """
        assert all(value is None for value in others.values()), others.keys()
        attend = partial(
            self.self_attention,
            attention_mask=attention_mask,
            rotary_pos_emb=rotary_pos_emb,
            packed_seq_params=packed_seq_params,
        )
        with enter_layer(self._memory, self.layer_number) as memory:
            if memory.again("full"):
                hidden = checkpoint(partial(self._forward, attend), hidden_states)
                memory.move("residual", hidden_states)
            else:
                hidden = self._forward(attend, hidden_states)
            # Pipeline schedules free what a stage returns, which they cannot do to a view.
            hidden = make_viewless_tensor(hidden, hidden.requires_grad, keep_graph=True)
            memory.end(hidden)
        return hidden, None

    def _forward(self, attend: Callable[[Tensor], Any], hidden: Tensor) -> Tensor:
        memory = current_layer_context()
        normed, residual = _fork(self.input_layernorm, hidden)
        memory.drop("norm", [normed], partial(_normed, self.input_layernorm, hidden))
        out, bias = attend(normed)
        memory.close(out)
        out = out if bias is None else out + bias
        normed, total = _fork(self.pre_mlp_layernorm, out, residual)
        # The sum is made again with its norm: of the sum as it was rounded, that would be another.
        again = partial(_fork, self.pre_mlp_layernorm, out, residual)
        memory.drop("norm", [normed, total], again)
        memory.move("residual", residual, out if memory.again("norm") else total)
        if isinstance(self.mlp, MoE):
            hidden, _ = self.mlp(normed, residual=total)
            return hidden
        out, bias = self.mlp(normed)
        return total + (out if bias is None else out + bias)


def _normed(norm: nn.Module, x: Tensor) -> tuple[Tensor]:
    return (_fork(norm, x)[0],)


def _fork(norm: nn.Module, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and that sum."""
    if isinstance(norm, ResidualNorm):
        normed, total = norm(x, residual)
        return normed, total
    total = x if residual is None else residual + x
    return norm(total), total
