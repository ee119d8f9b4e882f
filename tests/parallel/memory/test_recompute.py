"""Functions whose results or intermediate tensors are freed and recomputed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.parallel.memory.layer_context import (
    KEEP_ALL,
    LayerContext,
    MemoryPlan,
    current_layer_context,
    enter_layer,
)
from phalanx.parallel.memory.recompute import DroppedTensors, RecomputedRegion, checkpoint


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Body(torch.nn.Module):
    """Two results of two inputs, by parameters; counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(drawn(8, 8, seed=3))
        self.calls = 0

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        z = (x @ self.weight).sin()
        return z * y, z + x


def results(run: Callable[[Body, Tensor, Tensor], Any]) -> tuple[list[Tensor], Body]:
    """Loss and gradients of x, y and the weight."""
    body, x, y = Body(), drawn(4, 8, seed=1).requires_grad_(), drawn(4, 8, seed=2).requires_grad_()
    loss = run(body, x, y)
    loss.backward()
    grads = [t.grad for t in (x, y, body.weight)]
    assert all(g is not None for g in grads)
    return [loss.detach(), *(g for g in grads if g is not None)], body


def after(u: Tensor, v: Tensor) -> Tensor:
    """A sum that reads both results, and saves them."""
    return (u * v).sum()


def region(body: Body, x: Tensor, y: Tensor) -> Tensor:
    part = RecomputedRegion(body)
    u, v = part(x, y)
    out = after(u, v)
    part.drop()
    assert u.untyped_storage().nbytes() == v.untyped_storage().nbytes() == 0
    out.register_hook(lambda _: part.fill())
    return out


def test_recomputation_has_the_bits_of_saved_tensors() -> None:
    saved, _ = results(lambda body, x, y: after(*body(x, y)))
    for recomputed in (lambda body, x, y: after(*checkpoint(body, x, y)), region):
        got, body = results(recomputed)
        assert body.calls == 2
        assert all(torch.equal(a, b) for a, b in zip(got, saved, strict=True))


def test_the_addend_is_not_saved() -> None:
    def body(x: Tensor, addend: Tensor | None = None) -> Tensor:
        out = x.sin() * x
        return out if addend is None else out + addend

    x, addend, up = (drawn(4, 8, seed=seed).requires_grad_() for seed in range(3))
    saved = body(x, addend)
    wanted = torch.autograd.grad(saved, (x, addend), up)
    freed = addend * 1
    got = checkpoint(body, x, addend=freed)
    assert torch.equal(got, saved)
    freed.untyped_storage().resize_(0)
    assert all(map(torch.equal, torch.autograd.grad(got, (x, addend), up), wanted))
    assert not checkpoint(body, x.detach(), addend=addend.detach()).requires_grad
    only = checkpoint(body, x.detach(), addend=addend)
    assert torch.equal(torch.autograd.grad(only, addend, up)[0], up)


def test_only_inputs_that_need_a_gradient_get_one() -> None:
    body, x, y = Body(), drawn(4, 8).requires_grad_(), drawn(4, 8)
    for run in (lambda: after(*checkpoint(body, x, y)), lambda: region(body, x, y)):
        x.grad = None
        run().backward()
        assert x.grad is not None and y.grad is None


def test_results_that_were_not_filled_are_an_error() -> None:
    part = RecomputedRegion(Body())
    out = after(*part(drawn(4, 8).requires_grad_(), drawn(4, 8)))
    with pytest.raises(RuntimeError, match="have not been filled"):
        out.backward()


def test_dropped_tensors_are_refilled_in_place() -> None:
    """Other views of them that were saved are valid as well."""
    x = drawn(4, 8).requires_grad_()
    y = x.exp()
    out = (y.flatten()[3:] * 2).sin().sum() + y.sum()
    wanted = torch.autograd.grad(out, x, retain_graph=True)[0]
    part = DroppedTensors([y], lambda: [x.exp()])
    part.drop()
    assert y.untyped_storage().nbytes() == 0
    part.fill()
    (got,) = torch.autograd.grad(out, x)
    assert torch.equal(got, wanted) and torch.equal(y, x.exp())


def test_a_context_does_what_its_plan_names() -> None:
    body, x = Body(), drawn(4, 8).requires_grad_()
    with enter_layer(MemoryPlan(frozenset({"named"})), 1) as memory:
        assert current_layer_context() is memory
        assert memory.recomputes("named") and not memory.recomputes("other")
        u, v = memory.region("other", body, x, x)
        memory.drop("other", [u], lambda: pytest.fail("the plan saves it"))
        w, z = memory.region("named", body, x, x)
        out = after(u, v) + after(w, z)
        memory.end(out)
    assert u.untyped_storage().nbytes() and not w.untyped_storage().nbytes()
    assert body.calls == 2
    out.backward()
    assert body.calls == 3 and current_layer_context() is not memory


def test_without_gradients_nothing_is_freed() -> None:
    everything = MemoryPlan(frozenset({"named"}), frozenset({"named"}))
    with torch.no_grad(), enter_layer(everything, 1) as memory:
        u, _ = memory.region("named", Body(), drawn(4, 8), drawn(4, 8))
        memory.offload("named", u)
        memory.end(u)
        assert u.untyped_storage().nbytes()
    assert not LayerContext(KEEP_ALL).recomputes("named") and not current_layer_context().offloads(
        "named"
    )
