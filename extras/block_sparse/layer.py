"""The MoE layer with masks over blocks of its experts' weights."""

from functools import partial
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedStateDict

from phalanx.extras.block_sparse.kernels.backend import skip_dead_blocks
from phalanx.extras.block_sparse.kernels.lists import BLOCK
from phalanx.extras.block_sparse.masks import BlockMasks
from phalanx.moe.layer import MoE


class BlockSparseMoE(MoE):
    """`moe.layer.MoE` whose experts have `block_masks`; what it computes is the same.

    Args: those of MoE, and `block`, the rows and columns of a block.
    """

    def __init__(self, *args: Any, block: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.experts.block_masks = masks = BlockMasks(self.experts, block)
        masks.skips = block == BLOCK and skip_dead_blocks(self.experts, masks)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Weights as those of any other layer, and the masks."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        masks: BlockMasks = self.experts.block_masks
        own = masks.sharded_state(f"{prefix}experts.block_masks.", sharded_offsets)
        return dict(state | own)


BLOCKS_64 = partial(BlockSparseMoE, block=64)
BLOCKS_128 = partial(BlockSparseMoE, block=128)
