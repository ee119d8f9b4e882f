"""Choice of keys, attention to them and the indexer's losses, against all pairs at once in fp64."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.extras.sparse_attention import products
from phalanx.extras.sparse_attention.attend import attend
from phalanx.extras.sparse_attention.loss import loss_of_chosen, loss_of_visible
from phalanx.extras.sparse_attention.selection import Index, select

B, S, H, J, C, R, E = 2, 23, 3, 4, 10, 6, 8
SCALE = 0.3
FIRST = torch.tensor([[0] * S, [0] * 7 + [7] * 9 + [16] * (S - 16)])
"""First visible keys: one document, and three of them."""


def drawn(keys: int = S) -> tuple[Tensor, Tensor, Index]:
    g = torch.Generator().manual_seed(5)
    shapes = [(B, S, H, C), (B, keys, C), (B, S, J, E), (B, keys, E), (B, S, J)]
    made = (torch.randn(s, generator=g, dtype=torch.float64) for s in shapes)
    q, kv, *index = (x.requires_grad_() for x in made)
    return q, kv, Index(*index)


def seen(first: Tensor | None, keys: int = S) -> Tensor:
    """Visible keys of every query [B, S, T], the last of which is the last query's own."""
    at = torch.arange(keys - S, keys)[:, None]
    mask = (torch.arange(keys) <= at).expand(B, S, keys)
    return mask if first is None else mask & (torch.arange(keys) >= first[..., None])


def scores(index: Index) -> Tensor:
    """Scores of all pairs [B, S, T] by their definition."""
    q, k, w = index
    return torch.einsum("bsj,bsjt->bst", w, torch.einsum("bsje,bte->bsjt", q, k).relu())


def as_mask(chosen: Tensor, keys: int = S) -> Tensor:
    mask = torch.zeros(B, S, keys + 1, dtype=torch.bool)
    return mask.scatter(2, chosen.long() % (keys + 1), True)[..., :keys]


@pytest.fixture(params=[1, 4000, 1 << 28], ids=["one by one", "some", "all"])
def in_pieces(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries one by one, some at a time, and all together."""
    monkeypatch.setattr(products, "_ON_CPU", request.param)


@pytest.mark.parametrize("first", [None, FIRST], ids=["one document", "documents"])
@pytest.mark.parametrize("top_k", [1, 6, 40])
def test_the_best_visible_keys_are_chosen(
    in_pieces: None, first: Tensor | None, top_k: int
) -> None:
    _, _, index = drawn()
    chosen, visible = select(index, first, top_k=top_k), seen(first)
    assert chosen.dtype == torch.int32 and chosen.shape == (B, S, min(top_k, S))
    found, exact = as_mask(chosen), scores(index).masked_fill(~visible, -torch.inf)
    assert torch.equal(found.sum(-1), visible.sum(-1).clamp(max=top_k)), "and none twice"
    assert not (found & ~visible).any()
    worst = exact.masked_fill(~found, torch.inf).amin(-1)
    assert (exact.masked_fill(found, -torch.inf).amax(-1) <= worst).all()


def test_queries_behind_other_keys() -> None:
    """A chunk whose first key is that of the sequence."""
    _, _, index = drawn(keys=S + 9)
    chosen = select(index, None, top_k=S + 9, before=9)
    assert torch.equal(as_mask(chosen, S + 9), seen(None, S + 9))


def dense(q: Tensor, kv: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    logits = torch.einsum("bshc,btc->bsht", q, kv) * SCALE
    p = logits.masked_fill(~mask[:, :, None], -torch.inf).softmax(-1)
    return torch.einsum("bsht,btr->bshr", p, kv[..., :R]), p.mean(2)


@pytest.mark.parametrize("first", [None, FIRST], ids=["one document", "documents"])
def test_attention_and_its_gradients_are_those_of_masked_attention(
    in_pieces: None, first: Tensor | None
) -> None:
    q, kv, index = drawn()
    chosen = select(index, first, top_k=6)
    out, mean = attend(q, kv, chosen, scale=SCALE, values=R)
    exact, p = dense(q, kv, as_mask(chosen))
    torch.testing.assert_close(out, exact, rtol=1e-12, atol=1e-12)
    picked = p.gather(2, chosen.long().clamp(min=0)).masked_fill(chosen < 0, 0)
    torch.testing.assert_close(mean, picked, rtol=1e-12, atol=1e-12)
    assert not mean.requires_grad
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(6)).double()
    found, want = (torch.autograd.grad(x, (q, kv), dout) for x in (out, exact))
    torch.testing.assert_close(found, want, rtol=1e-11, atol=1e-12)


def test_with_all_keys_chosen_it_is_causal_attention() -> None:
    q, kv, index = drawn()
    out, _ = attend(q, kv, select(index, None, top_k=S), scale=SCALE, values=R)
    keys, values = (x[:, None].expand(-1, H, -1, -1) for x in (kv, kv[..., :R]))
    exact = F.scaled_dot_product_attention(
        q.transpose(1, 2), keys, values, is_causal=True, scale=SCALE
    )
    torch.testing.assert_close(out, exact.transpose(1, 2), rtol=1e-12, atol=1e-12)


def divergence(target: Tensor, score: Tensor, mask: Tensor) -> Tensor:
    """torch's, of the probabilities within the mask."""
    log_p = score.masked_fill(~mask, -torch.inf).log_softmax(-1)
    return F.kl_div(log_p.masked_fill(~mask, 0), target, reduction="sum")


def assert_only_the_indexer_learns(
    loss: Tensor, exact: Tensor, index: Index, *main: Tensor
) -> None:
    torch.testing.assert_close(loss, exact, rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad(2 * loss, (*index, *main), allow_unused=True)
    want = torch.autograd.grad(2 * exact, tuple(index))
    torch.testing.assert_close(found[:3], want, rtol=1e-11, atol=1e-12)
    assert found[3:] == (None,) * len(main)


@pytest.mark.parametrize("first", [None, FIRST], ids=["one document", "documents"])
def test_loss_over_chosen_keys(in_pieces: None, first: Tensor | None) -> None:
    q, kv, index = drawn()
    chosen = select(index, first, top_k=6)
    _, target = attend(q, kv, chosen, scale=SCALE, values=R)
    mask = as_mask(chosen)
    p = dense(q, kv, mask)[1].detach()
    exact = divergence(p, scores(index), mask)
    loss = loss_of_chosen(index, chosen, target)
    assert loss > 1
    assert_only_the_indexer_learns(loss, exact, index, q, kv)


@pytest.mark.parametrize("first", [None, FIRST], ids=["one document", "documents"])
def test_loss_over_visible_keys(in_pieces: None, first: Tensor | None) -> None:
    q, kv, index = drawn()
    keys = kv[:, :, None].expand(-1, -1, H, -1)
    p = dense(q, kv, seen(first))[1].detach()
    exact = divergence(p, scores(index), seen(first))
    loss = loss_of_visible(index, q, keys, first, scale=SCALE)
    assert_only_the_indexer_learns(loss, exact, index, q, kv)


def test_a_perfect_indexer_has_no_loss() -> None:
    """One head of attention, whose logits are the scores."""
    _, _, index = drawn()
    q = torch.ones(B, S, 1, 1).double()
    w, k = torch.ones(B, S, 1).double(), torch.rand(B, S, 1).double()
    index = Index(q, k, w)
    chosen = select(index, None, top_k=6)
    _, target = attend(q, k, chosen, scale=1.0, values=1)
    assert abs(loss_of_chosen(index, chosen, target)) < 1e-12
    assert abs(loss_of_visible(index, q, k[:, :, None], None, scale=1.0)) < 1e-12


def test_bf16_errs_by_its_rounding() -> None:
    q, kv, index = drawn()
    chosen = select(index, None, top_k=6)
    exact, _ = attend(q, kv, chosen, scale=SCALE, values=R)
    rounded, _ = attend(q.bfloat16(), kv.bfloat16(), chosen, scale=SCALE, values=R)
    assert rounded.dtype == torch.bfloat16
    assert 0 < (rounded - exact).norm() / exact.norm() < 2**-7
