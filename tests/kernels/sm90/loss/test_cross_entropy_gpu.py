"""`cross_entropy` on a GPU against fp64."""

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")
if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from phalanx.kernels.sm90.loss import cross_entropy as module

pytestmark = pytest.mark.gpu


def cross_entropy_(logits: Tensor, target: Tensor, scale: float) -> Tensor:
    return module.cross_entropy_(logits, target, torch.tensor(scale, device="cuda"))


def exact(logits: Tensor, target: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Loss and gradient in fp64; a target that is no column has the logit 0."""
    x = logits.double()
    lse = torch.logsumexp(x, 1)
    known = (target >= 0) & (target < logits.shape[1])
    at = target.clamp(0, logits.shape[1] - 1)[:, None]
    hit = torch.where(known, x.gather(1, at)[:, 0], 0.0)
    grad = (x - lse[:, None]).exp()
    grad.scatter_add_(1, at, -known.double()[:, None])
    return lse - hit, scale * grad


def check(logits: Tensor, target: Tensor, scale: float = 1.0) -> Tensor:
    want, grad = exact(logits, target, scale)
    loss = cross_entropy_(logits, target, scale)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-5)
    bound = 2**-8 * grad.abs() + 1e-6 * scale
    assert bool(((logits.double() - grad).abs() <= bound).all())
    return loss


def drawn(N: int, V: int, spread: float = 4.0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(N + V)
    logits = (spread * torch.randn(N, V, device="cuda")).bfloat16()
    return logits, torch.randint(V, (N,), device="cuda")


@pytest.mark.parametrize("V", [8, 56, 64, 72, 1000, 32000, 129280, 151936, 163840, 201088, 230400])
@pytest.mark.parametrize("N", [1, 2, 700])
def test_loss_and_gradient(N: int, V: int) -> None:
    check(*drawn(N, V), 2.0**-13)


@pytest.mark.parametrize("scale", [1.0, -0.37, 1e-9, 0.0])
def test_scales(scale: float) -> None:
    logits, target = drawn(33, 4096)
    want, grad = exact(logits, target, scale)
    loss = cross_entropy_(logits, target, scale)
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-5)
    assert bool(((logits.double() - grad).abs() <= 2**-8 * grad.abs() + 1e-6 * abs(scale)).all())


def test_targets_at_the_edges_of_parts_and_beyond() -> None:
    V = 4096
    at = [0, 7, 8, 511, 512, 513, 4095, -1, -100, 4096, 2**40]
    logits, _ = drawn(len(at), V)
    check(logits, torch.tensor(at, device="cuda"))


def test_large_logits_and_what_is_masked() -> None:
    logits, target = drawn(8, 151936, 30.0)
    logits[0, 5] = 1e4
    logits[1, 8:] = float("-inf")
    target[1] = 3
    logits[2, 100:2000] = float("-inf")
    target[2] = 99
    logits[3] = -1e4
    check(logits, target)


def test_what_is_no_number_reaches_the_loss() -> None:
    for wrong in (float("nan"), float("inf")):
        logits, target = drawn(4, 32000)
        logits[1, 31999] = wrong
        loss = cross_entropy_(logits, target, 1.0)
        assert loss.isnan().tolist() == [False, True, False, False]
        assert bool(logits[1].isnan().all()) and not bool(logits[0].isnan().any())


def test_same_bits_in_every_run_and_in_a_graph() -> None:
    given, target = drawn(3000, 50304)
    first = given.clone()
    loss = cross_entropy_(first, target, 0.5)
    for _ in range(3):
        again = given.clone()
        assert torch.equal(cross_entropy_(again, target, 0.5), loss)
        assert torch.equal(again, first)
    again, graph, scale = given.clone(), torch.cuda.CUDAGraph(), torch.tensor(0.5, device="cuda")
    with torch.cuda.graph(graph):
        captured = module.cross_entropy_(again, target, scale)
    for _ in range(2):
        again.copy_(given)
        graph.replay()
        assert torch.equal(captured, loss) and torch.equal(again, first)


def test_rows_do_not_depend_on_each_other() -> None:
    logits, target = drawn(1000, 129280)
    some = logits[17:20].clone()
    loss = cross_entropy_(logits, target, 1.0)
    assert torch.equal(cross_entropy_(some, target[17:20].clone(), 1.0), loss[17:20])
    assert torch.equal(some, logits[17:20])


def test_refusals() -> None:
    target = torch.zeros(2, dtype=torch.int64, device="cuda")
    for V in (4, 230408):
        with pytest.raises(ValueError, match="multiples of 8"):
            cross_entropy_(torch.zeros(2, V, device="cuda").bfloat16(), target, 1.0)
    with pytest.raises(ValueError, match="bfloat16"):
        cross_entropy_(torch.zeros(2, 8, device="cuda"), target, 1.0)
    assert cross_entropy_(torch.zeros(0, 8, device="cuda").bfloat16(), target[:0], 1.0).numel() == 0
    assert math.isclose(
        cross_entropy_(torch.zeros(2, 8, device="cuda").bfloat16(), target, 1.0)[0].item(),
        math.log(8),
        rel_tol=1e-6,
    )
