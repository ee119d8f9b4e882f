"""Exchange between tokens and heads of ranks that share sequences.

A rank has two chunks of each sequence with all heads, as Megatron-Core deals them out: of 2 R
chunks rank r has chunks r and 2 R - 1 - r, which balances causal attention of a whole sequence.
Work along a sequence whose heads do not know of each other can be shared out by heads instead
(DeepSpeed Ulysses, arXiv 2309.14509): one all-to-all before it and one after it, and gradients take
the same ways in reverse. The order of tokens is restored, and cut again after. Sizes are static and
nothing is read on the host.

Legend: S positions of a rank, in two chunks of s, B batch, C channels, R context ranks.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all
from torch import Tensor


def whole_sequences(parts_BSC: Sequence[Tensor], group: dist.ProcessGroup) -> Tensor:
    """This rank's heads at all tokens of the sequences, from all heads at this rank's tokens.

    Args:
        parts_BSC: one for each kind of heads, as queries, keys and values, which ranks share out in
            their order; of one floating dtype and any strides. R divides all C.

    Returns:
        [B, R S, sum(C) / R], contiguous: the parts one after another, each 1 / R as wide.
    """
    ranks = group.size()
    sent_R2Bsc = torch.cat(
        [
            x_BSC.unflatten(1, (2, -1)).unflatten(-1, (ranks, -1)).permute(3, 1, 0, 2, 4)
            for x_BSC in parts_BSC
        ],
        -1,
    )
    came = all_to_all(group, sent_R2Bsc).flatten(0, 1).unbind()
    order = dealt(ranks)
    return torch.stack([came[order.index(n)] for n in range(2 * ranks)], 1).flatten(1, 2)


def own_tokens(x_BTc: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The inverse of `whole_sequences` for one section: [B, R S, C / R] -> [B, S, C]."""
    ranks = group.size()
    chunks = x_BTc.unflatten(1, (2 * ranks, -1)).unbind(1)
    sent = torch.stack([chunks[n] for n in dealt(ranks)])
    came_R2Bsc = all_to_all(group, sent.unflatten(0, (ranks, 2)))
    return came_R2Bsc.permute(2, 1, 3, 0, 4).flatten(3).flatten(1, 2)


def own_heads(x: Tensor, sections: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Return this rank's heads of parameters [C, ...] that have `sections` of each kind of heads.

    Its gradient is zero for other ranks' heads; the sum over the ranks is that of all.
    """
    parts = x.split(list(sections))
    return torch.cat([part.chunk(group.size())[group.rank()] for part in parts])


def dealt(ranks: int) -> list[int]:
    """Chunks of a sequence in the order of the ranks that have them."""
    return [chunk for rank in range(ranks) for chunk in (rank, 2 * ranks - 1 - rank)]
