"""The loss on a GPU against fp64, and weight gradients added inside the GEMM."""

import pytest
import torch
import torch.distributed as dist

from phalanx.moe.model.loss import cross_entropy
from phalanx.parallel.megatron.weight_grad import Accumulate

pytestmark = pytest.mark.gpu


@pytest.fixture
def group():
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1, 7), (33, 2, 4096), (128, 1, 201088), (5, 3, 5000)])
def test_cross_entropy(shape, dtype, group):
    S, B, V = shape
    torch.manual_seed(0)
    logits = (8 * torch.randn(shape, device="cuda")).to(dtype)
    logits[0, 0, 0] = 100.0
    labels = torch.randint(V, (B, S), device="cuda")
    weight = torch.randn(B, S, device="cuda")
    exact = logits.double().requires_grad_()
    want = torch.nn.functional.cross_entropy(
        exact.view(-1, V), labels.t().reshape(-1), reduction="none"
    )
    (want.view(S, B).t() * weight).sum().backward()
    given = logits.clone().requires_grad_()
    loss = cross_entropy(given, labels, group)
    assert loss.dtype == torch.float32 and loss.shape == (B, S)
    torch.testing.assert_close(loss.double(), want.view(S, B).t(), rtol=1e-5, atol=1e-5)
    (loss * weight).sum().backward()
    rounding = 2**-8 if dtype == torch.bfloat16 else 2**-18
    bound = rounding * exact.grad.abs() + 1e-6
    assert bool(((given.grad.double() - exact.grad).abs() <= bound).all())


def gradient(logits, labels, weight, group, expected):
    overwritten = logits.clone().requires_grad_()
    if expected is None:
        loss = cross_entropy(overwritten, labels, group)
    else:
        grad = torch.tensor(expected, device="cuda")
        loss = cross_entropy(overwritten, labels, group, lambda: grad)
    assert torch.equal(overwritten.detach(), logits) == (expected is None)
    (loss * weight).sum().backward()
    return loss.detach(), overwritten.grad


@pytest.mark.parametrize("shape", [(33, 2, 4096), (128, 1, 201088)])
def test_expected_gradients(shape, group):
    S, B, V = shape
    torch.manual_seed(1)
    logits = (8 * torch.randn(shape, device="cuda")).bfloat16()
    labels = torch.randint(V, (B, S), device="cuda")
    expected = 2.0**-9
    weight = torch.full((B, S), expected, device="cuda")
    want_loss, want = gradient(logits, labels, weight, group, None)
    loss, grad = gradient(logits, labels, weight, group, expected)
    torch.testing.assert_close(loss, want_loss, rtol=1e-5, atol=1e-5)
    assert (grad == want).float().mean() > 0.999  # sums in another order
    torch.testing.assert_close(grad, want, rtol=2**-7, atol=0)
    # Tokens whose gradient is another, or none.
    weight[0, :7] = torch.tensor([0.0, 1.0, -0.3, 2 * expected, expected, 0.0, 5e-7], device="cuda")
    _, want = gradient(logits, labels, weight, group, None)
    _, grad = gradient(logits, labels, weight, group, expected)
    torch.testing.assert_close(grad, want, rtol=2**-7, atol=0)
    assert not grad[0, 0].any() and not grad[5, 0].any()


def test_logits_are_overwritten_only_for_an_expected_gradient(group):
    logits = torch.zeros(2, 1, 64, device="cuda", dtype=torch.bfloat16)
    labels = torch.zeros(1, 2, dtype=torch.int64, device="cuda")
    cross_entropy(logits, labels, group, lambda: torch.tensor(0.5, device="cuda"))
    assert not logits.any()  # no gradient is needed
    logits.requires_grad_()
    cross_entropy(logits, labels, group)
    assert not logits.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("T", "O", "I"), [(1, 8, 16), (100, 264, 72), (4096, 2880, 2880)])
def test_weight_gradients_are_added(T, O, I, dtype):  # noqa: E741
    torch.manual_seed(0)
    x, dy = (torch.randint(-2, 3, (T, n), device="cuda").bfloat16() for n in (I, O))
    main = torch.randint(-9, 9, (O, I), device="cuda").to(dtype)
    want = main.double() + dy.double().t() @ x.double()
    before = main.data_ptr()
    if dtype == torch.float32:
        Accumulate.wgrad_gemm_accum_fp32(x, dy, main)
        assert torch.equal(main, want.float())  # integers: exact
    else:  # partial sums may be rounded to bf16 too
        size = main.double().abs() + dy.double().abs().t() @ x.double().abs()
        Accumulate.wgrad_gemm_accum_fp16(x, dy, main)
        assert bool(((main.double() - want).abs() <= 2**-8 * size).all())
    assert main.data_ptr() == before
