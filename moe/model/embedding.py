"""The word embedding, with a gradient that is added directly to the buffer of its weight.

For every micro-batch Megatron-Core fills a table of the vocabulary with the gradient, adds it to
the buffer and discards it. This module updates only the rows of the tokens that occur
(`kernels.elementwise.rows`), if linear layers add to the buffer too
(`gradient_accumulation_fusion`); otherwise it is Megatron-Core's.

Legend: B sequences, S positions, D hidden, V rows of this rank's part of the vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.kernels.elementwise.rows import index_add_
from phalanx.kernels.expert_mlp import main_grad


class WordEmbedding(VocabParallelEmbedding):
    """Megatron-Core's VocabParallelEmbedding; parameters and checkpoints are the same."""

    def forward(self, ids_BS: Tensor) -> Tensor:
        """Embeddings [B, S, D], or this rank's part [s, B, D] if sequence parallel."""
        accumulates = self.config.gradient_accumulation_fusion and main_grad.takes(self.weight)
        if not (accumulates and torch.is_grad_enabled()):
            return super().forward(ids_BS)  # type: ignore[no-any-return]
        # Sequence first, as all later layers have it.
        local_SB = ids_BS.t() - self.vocab_start_index
        rows_SBD = _Rows.apply(self.weight, local_SB, self.tp_group.size() > 1)
        if self.reduce_scatter_embeddings:
            return reduce_scatter_to_sequence_parallel_region(rows_SBD, group=self.tp_group)  # type: ignore[no-any-return]
        if self.tp_group.size() > 1:
            rows_SBD = reduce_from_tensor_model_parallel_region(rows_SBD, group=self.tp_group)
        return rows_SBD.transpose(0, 1)


class _Rows(torch.autograd.Function):
    """Rows of a table; with `masked`, 0 for ids outside the table."""

    @staticmethod
    def forward(ctx: Any, weight_VD: Tensor, ids_SB: Tensor, masked: bool) -> Tensor:
        ids_SB = ids_SB.contiguous()
        ctx.save_for_backward(ids_SB)
        ctx.weight = weight_VD
        if not masked:
            return F.embedding(ids_SB, weight_VD)
        outside_SB = (ids_SB < 0) | (ids_SB >= weight_VD.shape[0])
        rows_SBD = F.embedding(ids_SB.masked_fill(outside_SB, 0), weight_VD)
        return rows_SBD.masked_fill_(outside_SB[..., None], 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows_SBD: Tensor) -> tuple[Tensor | None, None, None]:
        (ids_SB,) = ctx.saved_tensors
        drows_SBD = drows_SBD.contiguous()

        def compute(buffer: main_grad.Buffer) -> None:
            if not buffer.add:
                buffer.out.zero_()
            index_add_(buffer.out, ids_SB.flatten(), drows_SBD.flatten(0, 1))

        return main_grad.write(ctx.weight, compute), None, None


def install(model: Any) -> None:
    """Replace the embedding of a Megatron-Core language model, if it has one."""
    embedding = getattr(model, "embedding", None)
    if embedding is None:
        return
    words = embedding.word_embeddings
    words.__class__ = WordEmbedding
    if model.config.gradient_accumulation_fusion and hasattr(words.weight, "zero_out_wgrad"):
        # For the embedding's sake Megatron-Core's hook adds the gradient that autograd returns. All
        # users of the weight now add to the buffer themselves, and return undefined contents.
        words.weight.zero_out_wgrad = False
