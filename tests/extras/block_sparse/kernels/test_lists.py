"""Lists of living blocks against loops over the mask."""

import pytest
import torch
from torch import Tensor

from phalanx.extras.block_sparse.kernels.lists import BLOCK, MOST, ROW_SHIFT, Blocks, Contraction


def drawn(L: int, n: int, k: int, living: int, seed: int = 0) -> Tensor:
    """A mask with as many living blocks for each expert."""
    g = torch.Generator().manual_seed(seed)
    order = torch.rand(L, n * k, generator=g).argsort(-1)
    return (order < living).view(L, n, k)


def check(blocks: Blocks, living: Tensor) -> None:
    whole = torch.cat([living] * blocks.parts, 1)
    _check_contraction(blocks.forward, living)
    _check_contraction(blocks.backward, whole.mT)
    count, tiles = int(blocks.tiles[0]), blocks.tiles[1:].view(len(living), -1)
    for expert, places in zip(whole, tiles.tolist(), strict=True):
        listed = [(p >> ROW_SHIFT, p & ((1 << ROW_SHIFT) - 1)) for p in places]
        assert sorted(listed[:count]) == [tuple(p) for p in expert.nonzero().tolist()]
        assert listed[:count] == sorted(listed[:count], key=lambda at: (at[1] // 8, at))  # bands
        assert len(set(listed)) == expert.numel()  # those that live, and then the others


def _check_contraction(made: Contraction, living: Tensor) -> None:
    for expert, listed, counts in zip(living, *made, strict=True):
        for row, blocks, count in zip(expert, listed.tolist(), counts.tolist(), strict=True):
            wanted = row.nonzero().flatten().tolist()
            # A tile without living blocks has a dead one, of zeros.
            assert blocks[:count] == (wanted or blocks[:1])
            assert count == max(1, len(wanted)) and 0 <= blocks[0] < len(row)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("living", [1, 7, 20, 35])
def test_lists_have_the_living_blocks_of_each_tile(living, parts):
    mask = drawn(3, 5, 7, living)
    check(Blocks(mask, parts), mask)


def test_an_update_is_in_place_as_graphs_read_it():
    blocks = Blocks(drawn(2, 4, 6, 12), 2)
    tensors = [*blocks.forward, *blocks.backward, blocks.tiles]
    before = [t.data_ptr() for t in tensors]
    for living in (3, 24, 12):
        mask = drawn(2, 4, 6, living, seed=living)
        blocks.update(mask)
        check(blocks, mask)
    assert before == [t.data_ptr() for t in tensors]


def test_the_widest_weights():
    mask = drawn(1, MOST // 2, MOST, 100)
    check(Blocks(mask, 2), mask)
    for n, k in ((MOST // 2 + 1, 2), (2, MOST + 1)):
        with pytest.raises(ValueError, match=f"at most {MOST * BLOCK} each way"):
            Blocks(drawn(1, n, k, 2), 2)
