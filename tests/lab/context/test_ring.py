"""Ring attention of the laboratory against attention of one rank, values and gradients."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.moe.model.test_attention import draw
from tests.support.distributed import run_distributed

B, T, H, G, D = 2, 48, 4, 2, 8


def inputs() -> list[torch.Tensor]:
    """Queries, keys, values and the gradient of the result, of whole sequences."""
    return [draw(B, T, n, D, seed=i) for i, n in enumerate((H, G, G, H))]


def _own(ranks: int) -> list[torch.Tensor]:
    from phalanx.scripts.lab.context.ring import Plain, ring_attention

    chunks = torch.arange(T).chunk(2 * ranks)
    mine = torch.cat([chunks[dist.get_rank()], chunks[2 * ranks - 1 - dist.get_rank()]])
    *local, upstream = (x[:, mine].clone() for x in inputs())
    local = [x.requires_grad_() for x in local]
    group: Any = dist.group.WORLD
    out = ring_attention(*local, group, Plain())
    return [mine, out.detach(), *torch.autograd.grad(out, local, upstream)]


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_of_a_ring_are_one(ranks: int) -> None:
    *local, upstream = inputs()
    q, k, v = (x.requires_grad_() for x in local)
    out = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    wanted = [out.detach(), *torch.autograd.grad(out, (q, k, v), upstream)]
    for mine, *found in run_distributed(_own, ranks, ranks):
        for got, whole in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, whole[:, mine], rtol=1e-5, atol=2e-6)
