"""Masks over blocks of experts' weights: which live, what reads them, their place in checkpoints.

A mask is data on the device: captured graphs read it, and an update writes it in place. Weights
stay dense in storage, and dead blocks are zeros in them.

Legend: L local experts, D hidden, F expert width, B rows and columns of a block; f = F / B and
d = D / B blocks.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from torch import Tensor

from phalanx.extras.block_sparse.slices import zero_dead_
from phalanx.moe.experts import Experts


class Matrix(NamedTuple):
    """Weights of one matrix of each expert, and their mask."""

    weight: torch.nn.Parameter  # [L, R, C], as stored
    living: Tensor  # bool [L, block rows, C / B]
    block_row_R: Tensor  # int64 [R], block row of each stored row: its place in `living`
    in_order_R: Tensor  # int64 [R], stored rows in the order of their block rows

    def dead_rows(self) -> Tensor:
        """Mask of the dead blocks that stored rows cross: bool [L * R, C / B]."""
        return self.living[:, self.block_row_R].logical_not_().flatten(0, 1)

    def of_blocks(self, square: Tensor) -> Tensor:
        """Sums of squares of blocks, shaped like `living`, from those of `slices.squares`."""
        shape = (*self.living.shape[:2], -1, self.living.shape[2])
        return square.view(len(self.living), -1, shape[-1])[:, self.in_order_R].view(shape).sum(2)


class BlockMasks(torch.nn.Module):
    """Masks of the experts of one layer on one rank.

    Kernels read `living_fc1`, bool [L, f, d], which a gate and its linear half share, and
    `living_fc2`, bool [L, d, f], in the order of channels of checkpoints, whatever the order in
    storage is. All experts of a layer have the same number of living blocks in a matrix. They are
    changed in place, between steps, which `after_changes` tells.

    Args:
        experts: weights [L, 2F or F, D] and [L, D, F], F and D multiples of the block.
        block: B.
    """

    living_fc1: Tensor
    living_fc2: Tensor
    began: Tensor

    def __init__(self, experts: Experts, block: int) -> None:
        super().__init__()
        self.block, self._experts = block, [experts]  # in a list: the experts own this module
        local, hidden, width = experts.w2.shape
        f, d, device = width // block, hidden // block, experts.w2.device
        self.register_buffer("living_fc1", torch.ones(local, f, d, dtype=torch.bool, device=device))
        self.register_buffer("living_fc2", torch.ones(local, d, f, dtype=torch.bool, device=device))
        self.register_buffer("began", torch.zeros(local, dtype=torch.int64, device=device))
        """Step of the run at which the masks began, all alive; -1: with what was loaded."""
        self.skips = False  # fused kernels in bf16 skip dead blocks
        self.wants_all = False
        """True in a step after which blocks may grow: it needs gradients of dead blocks too."""
        order, rows = experts.spec.channel_order, torch.arange(experts.w1.size(1))
        if order is not None:
            rows = order.store(rows, 0)
        for name, block_row_R in (
            ("fc1", rows % width // block),
            ("fc2", torch.arange(hidden) // block),
        ):
            in_order_R = block_row_R.argsort(stable=True)
            self.register_buffer(f"block_row_{name}", block_row_R.to(device), persistent=False)
            self.register_buffer(f"in_order_{name}", in_order_R.to(device), persistent=False)
        self.loaded = False  # masks have been loaded, which nobody has looked at
        self._after: list[Callable[[BlockMasks], object]] = []

    @property
    def group(self) -> Any:
        """Process group of the ranks with copies of these experts."""
        return self._experts[0].expert_dp_group

    def matrices(self) -> Iterator[Matrix]:
        """Both matrices, fc1 first."""
        for name, weight in (("fc1", self._experts[0].w1), ("fc2", self._experts[0].w2)):
            names = (f"living_{name}", f"block_row_{name}", f"in_order_{name}")
            yield Matrix(weight, *(self.get_buffer(each) for each in names))

    def after_changes(self, callback: Callable[["BlockMasks"], object]) -> None:
        """Have `callback(masks)` called after each change, as to make lists of living blocks.

        The call comes from the host, between steps, on the stream of the update; shapes are the
        same in every call. What a captured graph reads has to be changed in place.
        """
        self._after.append(callback)

    @torch.no_grad()
    def changed(self) -> None:
        """Make dead blocks of the weights zero, and tell all that the masks have changed."""
        for matrix in self.matrices():
            zero_dead_(matrix.weight.detach().view(-1), 0, matrix.dead_rows(), self.block)
        self._tell()

    def want_all(self, wanted: bool) -> None:
        """Note whether the next step needs gradients of dead blocks, and tell all of a change."""
        if wanted != self.wants_all:
            self.wants_all = wanted
            self._tell()

    def _tell(self) -> None:
        for callback in self._after:
            callback(self)

    def sharded_state(
        self, prefix: str, sharded_offsets: tuple[tuple[int, int, int], ...]
    ) -> ShardedStateDict:
        """Masks as shards of [.., E, ...] over experts, as `moe.experts.Experts` has weights."""
        experts, axis = self._experts[0], len(sharded_offsets)
        split = (axis, experts.ep_group.rank(), experts.ep_group.size())
        return {
            f"{prefix}{name}": ShardedTensor.from_rank_offsets(
                f"{prefix}{self.block}.{name}",
                self.get_buffer(name),
                *sharded_offsets,
                split,
                replica_id=(0, 0, experts.expert_dp_group.rank()),
                prepend_axis_num=axis,
            )
            for name in ("living_fc1", "living_fc2", "began")
        }

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *given: Any) -> None:
        """Load masks; those that a checkpoint lacks are all alive."""
        if f"{prefix}began" not in state:
            self.living_fc1.fill_(True)
            self.living_fc2.fill_(True)
            self.began.fill_(-1)
        super()._load_from_state_dict(state, prefix, *given)
        self.loaded = True
        self.changed()  # a mean of checkpoints has weights in blocks that died in the last of them
