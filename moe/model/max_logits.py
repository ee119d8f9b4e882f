"""The largest attention logit of every head and layer in a step, over all micro-batches and ranks.

Core attention records it in the forward pass of steps that measure it
(`kernels.core_attention.max_logit`), in one table on the device, which is reduced with the totals
of a step (moe.run.step). QK-clip (`extras.muon.qk_clip`) reads the table there, and a log record
has the maximum of each layer. Validation and recomputation do not count.

Shape legend: L layers of the whole model, prediction layers last; H its query heads.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from phalanx.kernels.core_attention.max_logit import MaxLogit
from phalanx.kernels.derivatives import in_backward
from phalanx.moe.router.balance import layer_index


class MaxLogits:
    """Table of the largest logits of a model's chunks, of the same shape on every rank.

    Chunks may be wrapped; the `tp` group of `pg` splits heads.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        config: Any,
        pg: ProcessGroupCollection,
        device: torch.device,
    ) -> None:
        self.layers = config.num_layers + (config.mtp_num_layers or 0)
        heads = config.num_attention_heads
        self.most_LH = torch.full((self.layers, heads), float("-inf"), device=device)
        """fp32; -inf for layers and heads of other ranks, until `put` of the reduced table, and
        always for layers of linear attention, which have no logits."""
        self.measured = False  # in the current step
        self._due = torch.zeros((), dtype=torch.int32, device=device)
        local = heads // pg.tp.size()
        first = pg.tp.rank() * local
        for layer in attention_layers(chunks):
            core = getattr(layer.self_attention, "core_attention", None)
            if core is not None:  # linear attention has none
                most_H = self.most_LH[layer_index(layer, config), first : first + local]
                core.top = MaxLogit(most_H, self._due)

    def begin(self, due: bool) -> None:
        """Prepare a step, which may be a graph replay, that measures logits if `due`."""
        self.measured = due
        self._due.fill_(due)

    def reset(self) -> None:
        """Clear the table: the first of a step's work on the device."""
        self.most_LH.fill_(float("-inf"))

    def flat(self) -> Tensor:
        """This rank's part, fp64 [L * H]; the maximum over all ranks is the table of the model."""
        return self.most_LH.flatten().double()

    def put(self, reduced: Tensor) -> Tensor:
        """Store the maximum over all ranks of `flat`; return that of each layer, fp64 [L]."""
        self.most_LH.copy_(reduced.view_as(self.most_LH))
        return self.most_LH.amax(1).double()


def attention_layers(chunks: Sequence[torch.nn.Module]) -> Iterator[Any]:
    """Transformer layers of this rank's model chunks, in order."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, TransformerLayer):
                yield module


def active_max_logit(core: Any) -> MaxLogit | None:
    """Buffer for the logits of this forward pass; None if they are not measured."""
    top: MaxLogit | None = core.top
    return top if core.training and not in_backward() else None
