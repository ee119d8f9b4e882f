"""Core attention of ranks that share sequences, by either exchange, against that of one rank."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.moe.model.test_attention import BATCH, SEQUENCE, config, core, draw, install
from tests.support.distributed import run_distributed

pytestmark = pytest.mark.dist

DOCUMENTS = ((0, 5, 6, 13), (0, 3, 21))
"""Starts of documents in each sequence: inside chunks and at their ends, and of one token."""


def positions() -> torch.Tensor:
    place_BS = torch.zeros(BATCH, SEQUENCE, dtype=torch.int64)
    for row, begins in zip(place_BS, DOCUMENTS, strict=True):
        for first, end in zip(begins, (*begins[1:], SEQUENCE), strict=True):
            row[first:end] = torch.arange(end - first)
    return place_BS


def _context(
    changes: dict[str, Any], layer: int, k: int, v: int, ranks: int, exchange: str, mask: bool
) -> list[torch.Tensor]:
    """Output [S, B, H v] and gradients of this rank."""
    install()
    from phalanx.moe.model.packed import packed
    from phalanx.parallel.groups import create

    pg = create(context=ranks).pg
    shared = dict(context_parallel_size=ranks, **changes)
    how = dict(layer=layer, k_channels=k, v_channels=v)
    module = core(config(**shared), pg, exchange=exchange, **how)
    if module.softmax_offset is not None:
        module.load_state_dict({"softmax_offset": draw(4, seed=3)})
    # Chunk r and its mirror image belong to rank r.
    chunks = torch.arange(SEQUENCE).chunk(2 * ranks)
    mine = torch.cat([chunks[dist.get_rank()], chunks[2 * ranks - 1 - dist.get_rank()]])
    documents = None
    if mask:
        more = dict(whole_BS=positions(), last_BS=positions()[:, mine]) if ranks > 1 else {}
        documents = packed(positions()[:, mine], places=4, ranks=ranks, **more)

    def own(x: torch.Tensor) -> torch.Tensor:
        """This rank's part; packed, sequences lie behind each other."""
        x = x[mine]
        return x.transpose(0, 1).reshape(1, -1, *x.shape[2:]).transpose(0, 1) if mask else x

    shapes = [(4, k), (2, k), (2, v)]
    local = [own(draw(SEQUENCE, BATCH, *each, seed=i)) for i, each in enumerate(shapes)]
    local = [x.clone().requires_grad_() for x in local]
    out = module(*local, packed_seq_params=documents)
    upstream = own(draw(SEQUENCE, BATCH, 4 * v, seed=7))
    assert out.shape == upstream.shape and out.is_contiguous()
    grads = torch.autograd.grad(out, [*local, *module.parameters()], upstream)
    by_token = [out.detach(), *grads[:3]]
    if mask:
        by_token = [x.reshape(BATCH, -1, *x.shape[2:]).transpose(0, 1) for x in by_token]
    return [*by_token, *grads[3:]]


def joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Whole sequences from those of all ranks."""
    chunks, ranks = {}, len(parts)
    for rank, part in enumerate(parts):
        chunks[rank], chunks[2 * ranks - 1 - rank] = part.chunk(2)
    return torch.cat([chunks[c] for c in sorted(chunks)])


CASES: list[tuple[dict[str, Any], int, int, int, bool]] = [
    ({}, 1, 8, 8, False),
    ({}, 1, 24, 16, False),
    # Windows that end inside the own chunk, in the chunk before, and several chunks back.
    ({"window_size": (1, 0), "softmax_type": "learnable"}, 1, 8, 8, False),
    ({"window_size": (6, 0), "softmax_type": "learnable"}, 1, 8, 8, False),
    ({"window_size": (15, 0)}, 1, 8, 8, False),
    (
        {"window_size": (6, 0), "window_attn_skip_freq": 2, "softmax_type": "learnable"},
        *(2, 8, 8, False),
    ),
    ({}, 1, 24, 16, True),
    ({"window_size": (6, 0), "softmax_type": "learnable"}, 1, 8, 8, True),
]


@pytest.mark.parametrize("exchange", ["keys", "heads"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("changes", "layer", "k", "v", "mask"), CASES)
def test_ranks_that_share_sequences_are_one(
    changes: dict[str, Any], layer: int, k: int, v: int, mask: bool, ranks: int, exchange: str
) -> None:
    """Four ranks are more than the two key-value heads, of which each then has two copies."""
    common = changes, layer, k, v
    (alone,) = run_distributed(_context, 1, *common, 1, "", mask)
    parts = run_distributed(_context, ranks, *common, ranks, exchange, mask)
    for index, expected in enumerate(alone[:4]):
        got = joined([part[index] for part in parts])
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=5e-6)
    for index, expected in enumerate(alone[4:], start=4):
        total = torch.stack([part[index] for part in parts]).sum(0)
        torch.testing.assert_close(total, expected, rtol=1e-5, atol=5e-6)


def test_documents_do_not_see_each_other() -> None:
    """A comparison of ranks alone would not notice masks that none of them applies."""
    (masked,), (whole,) = (
        run_distributed(_context, 1, {}, 1, 8, 8, 1, "", mask) for mask in (True, False)
    )
    assert (masked[0] - whole[0]).abs().max() > 0.1
