"""Gradients that a training framework's buffers take: what is added, what is returned, what not."""

import pytest
import torch

from phalanx.kernels.expert_mlp import main_grad
from phalanx.kernels.expert_mlp.activation import Activation
from tests.kernels.problems import Problem, forward, gradients, leaves_of, make

ACT = Activation("quick_geglu", limit=0.7, offset=1.0)
PARAMETERS = ("w1", "w2", "b1", "b2")


def parameters(p: Problem, hooked: bool = True) -> dict[str, torch.Tensor]:
    """Leaves of a problem as Megatron-Core's wrapper leaves them: with buffer and flag."""
    leaves = leaves_of(p)
    for name in PARAMETERS:
        leaf = leaves[name] = torch.nn.Parameter(leaves[name].detach().clone())
        leaf.main_grad = torch.zeros(leaf.shape)
        if hooked:
            leaf.grad_added_to_main_grad = False
    return leaves


def step(p: Problem, leaves: dict[str, torch.Tensor], backend: str, **options) -> None:
    forward(p, leaves, backend, **options).backward(p.dout)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_buffers_add_up_micro_batches(backend: str, dtype: torch.dtype, split: bool) -> None:
    p = make(ACT, dtype, rows=128)
    leaves, plain = parameters(p), leaves_of(p)
    expected = gradients(forward(p, plain, backend), p.dout, plain)
    for _ in range(3):
        step(p, leaves, backend, split=split, accumulate=True)
        for name in PARAMETERS:
            leaf = leaves[name]
            assert leaf.grad_added_to_main_grad
            # A gradient arrives, of any content, and starts the reduction.
            assert leaf.grad.shape == leaf.shape and leaf.grad.dtype == dtype
            leaf.grad = None
    tolerance = 2**-7 if dtype == torch.bfloat16 else 1e-6
    for name in PARAMETERS:
        want = 3 * expected[f"d{name}"].float()
        torch.testing.assert_close(leaves[name].main_grad, want, rtol=tolerance, atol=1e-6)
    assert torch.equal(leaves["x"].grad, 3 * expected["dx"])


def test_buffers_in_bf16_have_the_sums_that_are_rounded_each_time() -> None:
    p = make(ACT, torch.bfloat16, rows=128)
    leaves, plain = parameters(p), leaves_of(p)
    expected = gradients(forward(p, plain, "torch"), p.dout, plain)
    for name in PARAMETERS:
        leaves[name].main_grad = leaves[name].main_grad.bfloat16()
    for _ in range(3):
        step(p, leaves, "torch", accumulate=True)
    for name in ("w1", "w2"):
        dw = expected[f"d{name}"]
        assert leaves[name].grad_added_to_main_grad
        assert torch.equal(leaves[name].main_grad, dw + dw + dw)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_the_first_gradient_of_a_step_replaces_the_last_step(backend: str) -> None:
    """Experts without rows too, whose gradient is 0."""
    p = make(ACT, torch.bfloat16, rows=128)
    leaves, cleared = parameters(p), parameters(p)
    for name in PARAMETERS:
        leaves[name].main_grad.fill_(float("nan"))
    main_grad.replace_next(leaves[name] for name in PARAMETERS)
    for _ in range(2):
        step(p, leaves, backend, accumulate=True)
        step(p, cleared, backend, accumulate=True)
    for name in PARAMETERS:
        assert torch.equal(leaves[name].main_grad, cleared[name].main_grad)


def test_the_reference_adds_in_fp32() -> None:
    """Terms that bf16 would have lost on the way are in the buffer."""
    p = make(ACT, torch.bfloat16)
    wide = {k: v.detach().float().requires_grad_() for k, v in leaves_of(p).items()}
    exact = gradients(forward(p, wide, "reference"), p.dout.float(), wide)
    leaves = parameters(p)
    step(p, leaves, "reference", accumulate=True)
    for name in ("w2", "b2"):  # their factors are the same in both precisions, but for a and prob
        assert leaves[name].main_grad.bfloat16().ne(leaves[name].main_grad).any()
        torch.testing.assert_close(leaves[name].main_grad, exact[f"d{name}"], rtol=0.1, atol=0.05)


def test_without_a_hook_no_gradient_comes() -> None:
    p = make(ACT, torch.float32)
    leaves = parameters(p, hooked=False)
    step(p, leaves, "torch", accumulate=True)
    assert all(leaves[name].grad is None and leaves[name].main_grad.any() for name in PARAMETERS)


def test_a_hook_that_adds_what_comes_gets_zeros() -> None:
    p = make(ACT, torch.float32)
    leaves = parameters(p)
    leaves["w1"].zero_out_wgrad = True
    step(p, leaves, "torch", accumulate=True)
    assert not leaves["w1"].grad.any() and leaves["w1"].main_grad.any()


@pytest.mark.parametrize("why", ["not asked", "bf16 buffer", "other shape", "frozen", "no buffer"])
def test_otherwise_gradients_are_gradients(why: str) -> None:
    p = make(ACT, torch.float32)
    leaves, plain = parameters(p), leaves_of(p)
    w1 = leaves["w1"]
    if why == "bf16 buffer":
        w1.main_grad = w1.main_grad.bfloat16()
    if why == "other shape":
        w1.main_grad = w1.main_grad[:1]
    if why == "no buffer":
        del w1.main_grad
    if why == "frozen":
        w1.requires_grad_(False)
    step(p, leaves, "torch", accumulate=why != "not asked")
    expected = gradients(forward(p, plain, "torch"), p.dout, plain)
    assert not w1.grad_added_to_main_grad
    if why == "frozen":
        assert w1.grad is None and not w1.main_grad.any()
    else:
        assert torch.equal(w1.grad, expected["dw1"])
    assert leaves["w2"].grad_added_to_main_grad == (why != "not asked")


def test_saved_tensors_may_be_replaced() -> None:
    """Offloading gives other tensors back than the parameters whose buffers are meant."""
    p = make(ACT, torch.float32)
    leaves = parameters(p)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        out = forward(p, leaves, "torch", accumulate=True)
    out.backward(p.dout)
    assert all(leaves[name].grad_added_to_main_grad for name in PARAMETERS)
