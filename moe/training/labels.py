"""Number of labels that count in a step.

A loss is the sum over the labels of the global batch that count, divided by their number, however
the batch is cut into micro-batches and dealt to ranks. The number is known on the device before
the first micro-batch: gradients are right from the start, of the magnitude that they have without
masks, and need no pass that divides them. Without masks it is a constant.

Megatron-Core takes the mean of what micro-batches and ranks return. Each returns its sum divided by
the mean number of labels that a micro-batch of a rank has: the mean of these is the sum over all
labels divided by their number. `calculate_per_token_loss` of Megatron-Core divides gradients at the
end instead, which takes a pass over them and has sums of millions of losses in between.

Legend: B sequences of a micro-batch, S tokens of each, K tokens that are predicted: the next one,
and those further ahead of multi-token prediction.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

Batch = dict[str, Tensor]


class Labels(NamedTuple):
    """Labels of a global batch that count."""

    number_K: Tensor
    """int64: of all ranks and micro-batches."""
    mean_K: Tensor
    """fp32: of a micro-batch of a rank, on average; 1 where none counts."""


def make_labels(number_K: Tensor, parts: int) -> Labels:
    """`number_K` labels in so many micro-batches of all ranks together."""
    mean_K = (number_K.double() / parts).masked_fill(number_K == 0, 1)
    return Labels(number_K, mean_K.float())


def count_labels(
    inputs: Sequence[Batch], kinds: int, parts: int, group: dist.ProcessGroup
) -> Labels:
    """Labels that count in a step with masks, without a host read.

    Args:
        inputs: micro-batches of this rank, with a `loss_mask`. Where ranks share sequences there
            are the mask and the positions of whole ones in `whole_mask` and `whole`.
        kinds: K.
        parts: micro-batches of all ranks.
        group: ranks that read different sequences.
    """
    number_K = torch.stack([_number(batch, kinds) for batch in inputs]).sum(0)
    if group.size() > 1:
        dist.all_reduce(number_K, group=group)
    return make_labels(number_K, parts)


def _number(batch: Batch, kinds: int) -> Tensor:
    mask_BS = batch.get("whole_mask", batch["loss_mask"])
    numbers = [mask_BS.sum()]
    # Whether the token behind is of the same document, and of the same sequence.
    goes_on_BS = batch.get("whole", batch["position_ids"]).roll(-1, 1) != 0
    for _ in range(kinds - 1):
        mask_BS = mask_BS.roll(-1, 1) & goes_on_BS
        numbers.append(mask_BS.sum())
    return torch.stack(numbers)
