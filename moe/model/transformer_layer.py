"""The layer of all models: Megatron-Core's, with residual additions fused into other kernels.

    sum = hidden                  normed = norm(sum)       no separate kernel for the sum
    sum = attention(normed) + sum normed = norm(sum)       one kernel
    hidden = mlp(normed) + sum                             in the combine of an MoE layer

Megatron-Core 0.19.2 adds after attention and after the MLP in separate passes, and autograd adds
the gradients of a norm and of its residual in another. Its `fused_residual_rmsnorm` saves only the
last, and only with Transformer Engine. On a CPU, and with Transformer Engine's norm, the additions
are Megatron-Core's, in its order.

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
from phalanx.moe.model.dense_mlp import DenseMLP
from phalanx.moe.model.norm import ResidualNorm
from phalanx.parallel.megatron.recipe_linear import compute_by
from phalanx.parallel.memory.layer_context import (
    INACTIVE,
    KEEP_ALL,
    LayerContext,
    MemoryPlan,
    enter_layer,
)
from phalanx.parallel.memory.recompute import checkpoint


class Layer(TransformerLayer):
    """Megatron-Core's layer for training on whole sequences, parameters and checkpoints included.

    Args:
        projections: kernels and recipe of attention's projections, if they are quantized.
        memory: activations that are recomputed or offloaded.

    Raises:
        ValueError: a config with dropout, residuals in fp32, or Megatron-Core's own recomputation,
            which `memory` replaces.
    """

    def __init__(
        self,
        *args: Any,
        projections: MLPSpec | None = None,
        memory: MemoryPlan = KEEP_ALL,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._memory = memory
        if projections is not None:
            compute_by(projections, self.self_attention)
        if self.hidden_dropout or self.config.fp32_residual_connection:
            raise ValueError("layers have no dropout and no residuals in fp32")
        if self.config.recompute_granularity is not None:
            raise ValueError("run.recompute selects what layers recompute, not Megatron-Core")

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        rotary_pos_emb: Any = None,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Hidden states after the layer [s, B, D], and no context.

        The `packed_seq_params` are a `moe.model.packed.Packed` or None; `kwargs`, for inference and
        encoders, are None.
        """
        assert all(value is None for value in kwargs.values()), kwargs.keys()
        attend = partial(
            self.self_attention,
            attention_mask=attention_mask,
            rotary_pos_emb=rotary_pos_emb,
            packed_seq_params=packed_seq_params,
        )
        with enter_layer(self._memory, self.layer_number) as memory:
            if memory.recomputes("full"):
                hidden = checkpoint(partial(self._forward, attend, INACTIVE), hidden_states)
                memory.offload("residual", hidden_states)
            else:
                hidden = self._forward(attend, memory, hidden_states)
            # Pipeline schedules free what a stage returns, which they cannot do to a view.
            hidden = make_viewless_tensor(hidden, hidden.requires_grad, keep_graph=True)
            memory.end(hidden)
        return hidden, None

    def _forward(
        self, attend: Callable[[Tensor], Any], memory: LayerContext, hidden: Tensor
    ) -> Tensor:
        normed, residual = _fork(self.input_layernorm, hidden)
        memory.drop("norm", [normed], partial(_normed, self.input_layernorm, hidden))
        out, bias = attend(normed)
        memory.close(out)
        out = out if bias is None else out + bias
        normed, total = _fork(self.pre_mlp_layernorm, out, residual)
        # The sum is recomputed with its norm: the norm of the rounded sum would have other bits.
        recompute = partial(_fork, self.pre_mlp_layernorm, out, residual)
        memory.drop("norm", [normed, total], recompute)
        memory.offload("residual", residual, out if memory.recomputes("norm") else total)
        if isinstance(self.mlp, MoE):
            hidden, _ = self.mlp(normed, residual=total, memory=memory)
            return hidden
        dense = isinstance(self.mlp, DenseMLP)
        out, bias = self.mlp(normed, memory=memory) if dense else self.mlp(normed)
        return total + (out if bias is None else out + bias)


def _normed(norm: nn.Module, x: Tensor) -> tuple[Tensor]:
    return (_fork(norm, x)[0],)


def _fork(norm: nn.Module, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    if isinstance(norm, ResidualNorm):
        normed, total = norm(x, residual)
        return normed, total
    total = x if residual is None else residual + x
    return norm(total), total
