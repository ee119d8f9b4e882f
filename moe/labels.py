"""Number of labels that count in a step, and the losses that are divided by it.

A loss is the sum over the labels of the global batch that count, divided by their number, however
the batch is split. The number is known on the device before the first micro-batch: gradients are
right from the start and need no pass that divides them. Without masks it is a constant.

Megatron-Core averages the results of micro-batches and ranks. Each returns its sum divided by the
mean number of labels of a micro-batch of a rank: the mean of these is the sum over all labels
divided by their number. `calculate_per_token_loss` of Megatron-Core divides gradients at the end
instead, which takes a pass over them and adds millions of losses before.

Legend: B sequences of a micro-batch, S tokens of each, K predicted tokens: the next one, and those
further ahead of multi-token prediction.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

Batch = dict[str, Tensor]


class Labels(NamedTuple):
    """Number of labels of a global batch that count."""

    number_K: Tensor  # number over all ranks and micro-batches, int64
    mean_K: Tensor  # mean number in a micro-batch of a rank, fp32; 1 if no label counts


def make_labels(number_K: Tensor, parts: int) -> Labels:
    """Labels of a global batch in `parts` micro-batches of all ranks together."""
    mean_K = (number_K.double() / parts).masked_fill(number_K == 0, 1)
    return Labels(number_K, mean_K.float())


def count_labels(
    inputs: Sequence[Batch], kinds: int, parts: int, group: dist.ProcessGroup
) -> Labels:
    """Labels that count in a step with masks, without a host read. Collective.

    Args:
        inputs: micro-batches of this rank, with a `loss_mask`. If ranks share sequences, mask and
            positions of the full sequences are in `whole_mask` and `whole`.
        kinds: number of predicted tokens, K.
        parts: number of micro-batches of all ranks.
        group: ranks that read different sequences.
    """
    number_K = torch.stack([_number(batch, kinds) for batch in inputs]).sum(0)
    if group.size() > 1:
        dist.all_reduce(number_K, group=group)
    return make_labels(number_K, parts)


def _number(batch: Batch, kinds: int) -> Tensor:
    mask_BS = batch.get("whole_mask", batch["loss_mask"])
    numbers = [mask_BS.sum()]
    # True if the next token is in the same document and sequence.
    continues_BS = batch.get("whole", batch["position_ids"]).roll(-1, 1) != 0
    for _ in range(kinds - 1):
        mask_BS = mask_BS.roll(-1, 1) & continues_BS
        numbers.append(mask_BS.sum())
    return torch.stack(numbers)


def mean_loss(
    loss_BS: torch.Tensor,
    mean: torch.Tensor,
    mask_BS: torch.Tensor | None = None,
    ahead: Sequence[torch.Tensor] = (),
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum, count and report of a micro-batch; Megatron-Core divides the sum by the count.

    Args:
        loss_BS: loss of each token; with a mask in any shape of the same size.
        mean: mean number of labels of a micro-batch of a rank, by which the sum is divided; the
            count is 1.
        mask_BS: tokens that count, bool; None counts all.
        ahead: losses of multi-token prediction, for the report.
    """
    loss_BS = loss_BS.float()
    total = (loss_BS if mask_BS is None else loss_BS.view(mask_BS.shape) * mask_BS).sum() / mean
    report = {"loss": total.detach().clone()}  # Megatron-Core divides in place
    if ahead:
        report["ahead"] = torch.stack(list(ahead))
    return total, torch.ones((), dtype=torch.int32, device=loss_BS.device), report


def sample_losses(
    loss_BS: torch.Tensor,
    mean: torch.Tensor,
    mask_BS: torch.Tensor | None = None,
    ahead: Sequence[torch.Tensor] = (),
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """`mean_loss` with `samples` in the report.

    They are, fp32 [2, B], the sum of each sample's losses on this rank, and its labels that count.
    """
    total, count, report = mean_loss(loss_BS, mean, mask_BS, ahead)
    mask_BS = torch.ones_like(loss_BS, dtype=torch.bool) if mask_BS is None else mask_BS
    loss_BS = loss_BS.float().view(mask_BS.shape) * mask_BS
    return total, count, report | {"samples": torch.stack((loss_BS.sum(1), mask_BS.sum(1)))}
