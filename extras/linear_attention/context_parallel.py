"""Some of the heads over whole sequences, in place of all heads over this context rank's tokens.

For layers that go through a sequence from its beginning, as linear attention does: heads do not
know of each other, so ranks that share sequences share out the heads instead for as long as such a
layer needs. One exchange there and one back; gradients take the same ways in reverse.

Of the 2 R chunks of a sequence, Megatron-Core deals rank r chunks r and 2 R - 1 - r, which balances
causal attention. Here the order of tokens is restored, and cut again after. Sizes are static and
nothing is read on the host.

Legend: R context ranks, B sequences, S tokens of each on a rank, in two chunks of s; C channels.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all
from torch import Tensor


def whole_sequences(x_BSC: Tensor, sections: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """This rank's heads at all tokens of the sequences, from all heads at this rank's tokens.

    Args:
        x_BSC: of any floating dtype and strides.
        sections: channels of each kind, as queries, keys and values; ranks share out the heads of
            each, in their order. All are multiples of R.
        group: the R ranks.

    Returns:
        [B, R S, C / R], contiguous, with the same sections, each 1 / R as wide.
    """
    ranks = group.size()
    x_B2sC = x_BSC.unflatten(1, (2, -1))
    sent_R2Bsc = torch.cat(
        [
            part.unflatten(-1, (ranks, -1)).permute(3, 1, 0, 2, 4)
            for part in x_B2sC.split(list(sections), -1)
        ],
        -1,
    )
    came = all_to_all(group, sent_R2Bsc).flatten(0, 1).unbind()
    dealt = _dealt(ranks)
    return torch.stack([came[dealt.index(n)] for n in range(2 * ranks)], 1).flatten(1, 2)


def own_tokens(x_BTc: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All heads at this rank's tokens, from this rank's heads at all tokens.

    The inverse of `whole_sequences` for one section.

    Args:
        x_BTc: [B, R S, C / R], of any floating dtype and strides.
        group: the R ranks.

    Returns:
        [B, S, C].
    """
    ranks = group.size()
    chunks = x_BTc.unflatten(1, (2 * ranks, -1)).unbind(1)
    sent = torch.stack([chunks[n] for n in _dealt(ranks)])
    came_R2Bsc = all_to_all(group, sent.unflatten(0, (ranks, 2)))
    return came_R2Bsc.permute(2, 1, 3, 0, 4).flatten(3).flatten(1, 2)


def own_heads(x: Tensor, sections: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Return this rank's heads of parameters [C, ...] with the sections of `whole_sequences`.

    Its gradient is zero for other ranks' heads; the sum over the ranks is that of all.
    """
    parts = x.split(list(sections))
    return torch.cat([part.chunk(group.size())[group.rank()] for part in parts])


def _dealt(ranks: int) -> list[int]:
    """Chunks of a sequence by rank, two each."""
    return [chunk for rank in range(ranks) for chunk in (rank, 2 * ranks - 1 - rank)]
