"""Transforms of torch.func over the public functions: right values, or an error that names them."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

# torch's own of forward mode cannot be compiled once a CPU stands in for CUDA in this process.
import torch._decomp.decompositions_for_jvp
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

from phalanx.kernels.api import GroupedMLP, grouped_experts, grouped_experts_sorted, router_topk
from tests.kernels.compiling import compiling
from tests.kernels.routing.topk_stand_ins import topk, topk_backward

E, D, WIDTH, K, T = 4, 8, 16, 2, 3
BACKENDS = ["reference", "torch"]
Function = Callable[..., Tensor]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


W1, W2 = drawn(E, 2 * WIDTH, D, seed=1) / 3, drawn(E, D, WIDTH, seed=2) / 4
PROB, IDX = drawn(T, E, seed=3).softmax(-1).topk(K)
COUNTS = torch.tensor([1, 0, 2, 0])


def of_tokens(backend: str) -> dict[str, tuple[Function, Tensor]]:
    """Scalar functions of each differentiable argument, and its value."""
    x = drawn(T, D)

    def loss(x: Tensor, prob: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return grouped_experts(x, IDX, prob, w1, w2, backend=backend).square().sum()

    def loss_of_rows(rows: Tensor, prob: Tensor) -> Tensor:
        made = grouped_experts_sorted(rows, COUNTS, prob, W1, W2, backend=backend)
        return made.square().sum()

    module = GroupedMLP(E, D, WIDTH, K, backend=backend)

    def loss_of_module(w1: Tensor) -> Tensor:
        out = functional_call(module, {"w1": w1, "w2": W2}, (x, IDX, PROB))
        return out.square().sum()

    return {
        "x": (lambda v: loss(v, PROB, W1, W2), x),
        "topk_prob": (lambda v: loss(x, v, W1, W2), PROB),
        "w1": (lambda v: loss(x, PROB, v, W2), W1),
        "w2": (lambda v: loss(x, PROB, W1, v), W2),
        "rows": (lambda v: loss_of_rows(v, PROB[:, 0]), x),
        "row_prob": (lambda v: loss_of_rows(x, v), PROB[:, 0]),
        "module": (loss_of_module, W1),
    }


ARGUMENTS = list(of_tokens("auto"))


def reverse(function: Function, at: Tensor) -> Tensor:
    leaf = at.clone().requires_grad_()
    return torch.autograd.grad(function(leaf), leaf)[0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_gradients_of_torch_func_are_those_of_autograd(name: str, backend: str) -> None:
    function, at = of_tokens(backend)[name]
    want = reverse(function, at)
    assert want.any()
    torch.testing.assert_close(grad(function)(at), want)
    torch.testing.assert_close(jacrev(function)(at), want)
    torch.testing.assert_close(vjp(function, at)[1](torch.tensor(1.0))[0], want)
    rows = torch.autograd.functional.jacobian(function, at, vectorize=True)
    torch.testing.assert_close(rows, want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_samples(backend: str) -> None:
    """vmap of a gradient, the gradient of a vmap, and a vmap alone, against loops."""
    x, (prob, idx) = drawn(5, T, D), drawn(5, T, E, seed=3).softmax(-1).topk(K)

    def loss(x: Tensor, idx: Tensor, prob: Tensor, w1: Tensor) -> Tensor:
        return grouped_experts(x, idx, prob, w1, W2, backend=backend).square().sum()

    axes = (0, 0, 0, None)
    values = [loss(*sample, W1) for sample in zip(x, idx, prob, strict=True)]
    torch.testing.assert_close(vmap(loss, axes)(x, idx, prob, W1), torch.stack(values))
    of_samples = vmap(grad(loss, (0, 2, 3)), axes)(x, idx, prob, W1)
    for n in range(5):
        leaves = [t.clone().requires_grad_() for t in (x[n], prob[n], W1)]
        want = torch.autograd.grad(loss(leaves[0], idx[n], *leaves[1:]), leaves)
        for got, true in zip(of_samples, want, strict=True):
            torch.testing.assert_close(got[n], true)
    total = grad(lambda w1: vmap(loss, axes)(x, idx, prob, w1).sum())(W1)
    torch.testing.assert_close(total, of_samples[2].sum(0))
    leaf = W1.clone().requires_grad_()
    vmap(loss, axes)(x, idx, prob, leaf).sum().backward()
    torch.testing.assert_close(leaf.grad, total)


def dual(function: Function, at: Tensor) -> None:
    with forward_ad.dual_level():
        function(forward_ad.make_dual(at, torch.ones_like(at)))


def compiled(function: Function, at: Tensor) -> None:
    with compiling():
        torch.compile(lambda x: jvp(function, (x,), (x,))[1], backend="aot_eager")(at)


FORWARD: dict[str, Callable[[Function, Tensor], Any]] = {
    "jvp": lambda f, at: jvp(f, (at,), (torch.ones_like(at),)),
    "jacfwd": lambda f, at: jacfwd(f)(at),
    "linearize": linearize,
    "hessian": lambda f, at: hessian(f)(at),
    "dual numbers": dual,
    "compiled": compiled,
}
SECOND: dict[str, Callable[[Function, Tensor], Any]] = {
    "grad of grad": lambda f, at: grad(lambda x: grad(f)(x).square().sum())(at),
    "jacrev of jacrev": lambda f, at: jacrev(jacrev(f))(at),
    "create_graph": lambda f, at: torch.autograd.functional.hessian(f, at),
    "jvp by two backward passes": lambda f, at: torch.autograd.functional.jvp(f, at, at),
}


@pytest.mark.parametrize("way", FORWARD)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_forward_mode_is_an_error_by_name(name: str, way: str) -> None:
    """A tangent that nobody propagates would look like a derivative of 0."""
    function, at = of_tokens("auto")[name]
    with pytest.raises(RuntimeError, match="the expert MLP has no derivatives in forward mode"):
        FORWARD[way](function, at)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", SECOND)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_second_derivatives_are_an_error_by_name(name: str, way: str, backend: str) -> None:
    function, at = of_tokens(backend)[name]
    with pytest.raises(RuntimeError, match="the expert MLP has first derivatives only: leave out"):
        SECOND[way](function, at)


def test_a_compiled_gradient_says_what_to_compile() -> None:
    function, at = of_tokens("auto")["x"]
    with compiling():
        with pytest.raises(RuntimeError, match="compile the function, and not its gradient"):
            torch.compile(grad(function), backend="aot_eager")(at)
        torch._dynamo.reset()
        got = grad(torch.compile(function, backend="aot_eager"))(at)
    torch.testing.assert_close(got, reverse(function, at))


def test_gradients_in_buffers_are_those_of_autograd_alone() -> None:
    def loss(x: Tensor) -> Tensor:
        return grouped_experts(x, IDX, PROB, W1, W2, accumulate=True).sum()

    for transform in (grad, jacrev, vmap):
        with pytest.raises(RuntimeError, match="^accumulate=True does not work inside of torch.fu"):
            transform(loss)(drawn(1, T, D) if transform is vmap else drawn(T, D))
    with pytest.raises(RuntimeError, match="^accumulate=True has no derivatives in forward mode"):
        dual(loss, drawn(T, D))


def weights_of(logits: Tensor) -> Tensor:
    return router_topk(logits, K, score="sigmoid", scale=2.0)[1].square().sum()


def of_router(logits: Tensor) -> Tensor:
    """Sum of (2 sigmoid)^2 over the best K experts, in plain PyTorch."""
    return (2 * logits.topk(K).values.sigmoid()).square().sum()


def test_the_router_in_operations_of_torch_has_all_derivatives() -> None:
    logits = drawn(T, E)
    for transform in (grad, jacrev, jacfwd, hessian):
        want = transform(of_router)(logits)
        torch.testing.assert_close(transform(weights_of)(logits), want)


def test_the_kernel_of_the_router_has_first_derivatives() -> None:
    pytest.importorskip("cutlass")
    from phalanx.kernels.functional import router
    from phalanx.kernels.sm90.routing import topk as kernel

    logits = drawn(T, E)
    want = reverse(of_router, logits)
    stand_ins = mock.patch.multiple(kernel, topk=topk, topk_backward=topk_backward)
    with stand_ins, mock.patch.object(router, "_is_fused", return_value=True):
        torch.testing.assert_close(grad(weights_of)(logits), want)
        torch.testing.assert_close(jacrev(weights_of)(logits), want)
        torch.testing.assert_close(vmap(grad(weights_of))(logits[None])[0], want)
        for way in FORWARD.values():
            with pytest.raises(RuntimeError, match="router_topk has no derivatives in forward"):
                way(weights_of, logits)
        for way in SECOND.values():
            with pytest.raises(RuntimeError, match="router_topk has first derivatives only"):
                way(weights_of, logits)
