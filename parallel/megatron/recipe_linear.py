"""Megatron-Core's parallel linear layers, computed by a recipe of FP8.

Their parameters, names and checkpoints stay. A layer of Megatron-Core 0.19.2 calls its
`_forward_impl` with the input and weights of this rank.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor, nn

from phalanx.kernels.expert_mlp.dense_mlp import dense_linear
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec, for_widths


def compute_by(spec: MLPSpec, module: nn.Module) -> None:
    """Have all parallel linear layers of a module compute by the recipe of `spec`.

    Those of widths that its kernels do not take are computed by torch's. Sums over tensor parallel
    ranks are Megatron-Core's. Blocks of weights begin anew on each rank.
    """
    for layer in module.modules():
        if isinstance(layer, (ColumnParallelLinear, RowParallelLinear)):
            layer._forward_impl = _Product(for_widths(spec, *layer.weight.shape))


def computes_by(layer: Any) -> MLPSpec | None:
    """How a layer that `compute_by` was told of is computed; None of others."""
    product = getattr(layer, "_forward_impl", None)
    return product.spec if isinstance(product, _Product) else None


class _Product:
    """In place of Megatron-Core's linear_with_grad_accumulation_and_async_allreduce."""

    def __init__(self, spec: MLPSpec) -> None:
        self.spec = spec

    def __call__(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sequence_parallel: bool,
        allreduce_dgrad: bool,
        tp_group: Any,
        **of_megatron: Any,
    ) -> Tensor:
        if sequence_parallel:  # what is kept for the gradient of the weights is the whole, in FP8
            input = gather_from_sequence_parallel_region(input, group=tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        y_NO = dense_linear(input.flatten(0, -2), weight, bias, self.spec)
        # No view: of one whose channels are turned in place autograd would copy the gradient, four
        # times over. torch's own linear layer does the same.
        y: Tensor = torch.ops.aten._unsafe_view(y_NO, [*input.shape[:-1], y_NO.shape[-1]])
        return y
