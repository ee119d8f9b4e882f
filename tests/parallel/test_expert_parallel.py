"""Layers over several gloo ranks against the same experts on one, without Megatron-Core."""

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.kernels.api import Activation, TopK, experts, grouped_experts
from phalanx.parallel.expert_parallel import ExpertParallelGroup, ExpertParallelMoE
from tests.kernels.problems import error, formula
from tests.support.distributed import run_distributed

E, D, WIDTH, K, T = 8, 16, 24, 3, 10
ACT = Activation("quick_geglu", limit=0.7, offset=1.0)
NAMES = ("w1", "w2", "b1", "b2")


def weights() -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    shapes = ((E, 2 * WIDTH, D), (E, D, WIDTH), (E, 2 * WIDTH), (E, D))
    return [torch.randn(s, generator=g) * s[-1] ** -0.5 for s in shapes]


def tokens(ranks: int, kind: str = "random") -> list[Tensor]:
    """Tokens, experts, probabilities and the output's gradient of all ranks, [ranks * T, ...]."""
    g = torch.Generator().manual_seed(2)
    scores = torch.rand(ranks * T, E, generator=g)
    if kind == "one expert":
        scores[:, 1] += 1
    prob, idx = scores.topk(1 if kind == "top 1" else K)
    idx[3, 0], idx[4, 0] = -1, E
    x, dout = (torch.randn(ranks * T, D, generator=g) for _ in range(2))
    return [x, idx, prob, dout]


def own(x: Tensor, rank: int, ranks: int) -> Tensor:
    return x.chunk(ranks)[rank].clone()


def layer(group: ExpertParallelGroup, **options: Any) -> ExpertParallelMoE:
    made = ExpertParallelMoE(group, E, D, WIDTH, K, ACT, bias=True, **options)
    with torch.no_grad():
        for name, whole in zip(NAMES, weights(), strict=True):
            getattr(made, name).copy_(own(whole, group.group.rank(), group.size))
    return made


def run(made: ExpertParallelMoE, kind: str) -> list[Tensor]:
    """Output, and gradients of tokens, probabilities and this rank's experts."""
    ranks, rank = made.group.size, made.group.group.rank()
    x, idx, prob, dout = (own(t, rank, ranks) for t in tokens(ranks, kind))
    out = made(x.requires_grad_(), idx, prob.requires_grad_())
    leaves = [x, prob, *(getattr(made, name) for name in NAMES)]
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def on_one_rank(ranks: int, kind: str, **options: Any) -> list[Tensor]:
    x, idx, prob, dout = tokens(ranks, kind)
    leaves = [x.requires_grad_(), prob.requires_grad_(), *(w.requires_grad_() for w in weights())]
    out = grouped_experts(x, idx, prob, *leaves[2:], activation=ACT, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def layer_of_all(kind: str) -> list[Tensor]:
    group = ExpertParallelGroup(transport="alltoall", dtype=torch.float32)
    results = run(layer(group), kind)
    assert not group.overflowed()
    group.release()
    return results


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["random", "one expert", "top 1"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_equals_one_rank(ranks: int, kind: str) -> None:
    whole = on_one_rank(ranks, kind)
    for rank, results in enumerate(run_distributed(layer_of_all, ranks, kind)):
        for got, want in zip(results, whole, strict=True):
            assert error(got, own(want, rank, ranks)) < 1e-6


def function_with_group() -> list[Tensor]:
    group = ExpertParallelGroup(transport="alltoall", dtype=torch.float32)
    x, idx, prob, dout = (own(t, dist.get_rank(), 2) for t in tokens(2))
    shares = [own(w, dist.get_rank(), 2).requires_grad_() for w in weights()]
    routing = TopK(idx, prob.requires_grad_())
    out = experts(x.requires_grad_(), routing, shares, {"activation": ACT}, group)
    return [out.detach(), *torch.autograd.grad(out, [x, prob, *shares], dout)]


@pytest.mark.dist
def test_function_with_a_group_against_fp64() -> None:
    """A statement of its own: every expert on every token."""
    x, idx, prob, dout = (t.double() if t.is_floating_point() else t for t in tokens(2))
    leaves = [x.requires_grad_(), prob.requires_grad_()]
    leaves += [w.double().requires_grad_() for w in weights()]
    w1, w2, b1, b2 = leaves[2:]
    y_ETD = formula(x @ w1.mT + b1[:, None], ACT) @ w2.mT + b2[:, None]
    share_ET = torch.stack([torch.where(idx == e, prob, 0.0).sum(-1) for e in range(E)])
    want = (y_ETD * share_ET[..., None]).sum(0)
    exact = [want.detach(), *torch.autograd.grad(want, leaves, dout)]
    for rank, results in enumerate(run_distributed(function_with_group, 2)):
        for got, true in zip(results, exact, strict=True):
            assert error(got, own(true, rank, 2)) < 1e-6


def layer_of_halves() -> list[Tensor]:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = ExpertParallelGroup(halves[dist.get_rank() // 2], dtype=torch.float32)
    assert group.transport.name == "alltoall"
    return run(layer(group), "random")


@pytest.mark.dist
def test_groups_are_independent() -> None:
    whole = on_one_rank(2, "random")
    for rank, results in enumerate(run_distributed(layer_of_halves, 4)):
        for got, want in zip(results, whole, strict=True):
            assert error(got, own(want, rank % 2, 2)) < 1e-6


def rerun_with_more() -> list[Any]:
    group = ExpertParallelGroup(capacity_factor=1.0, dtype=torch.float32)
    layers = [layer(group), layer(group)]
    group.budget.experts.factor = 0.01  # one tile; tests have few tokens
    seen = [group.overflowed()]
    dropped = [run(made, "one expert")[0] for made in layers]
    seen.append(group.overflowed())
    group.grow()
    results = [run(made, "one expert") for made in layers]
    seen += [group.overflowed(), torch.equal(dropped[0], results[0][0])]
    return [seen, *results]


@pytest.mark.dist
def test_overflow_is_rerun_with_more_rows() -> None:
    """One layer with too few rows is enough, on any rank; the second run is complete."""
    whole = on_one_rank(2, "one expert")
    for rank, (seen, *results) in enumerate(run_distributed(few_rows, 2)):
        assert seen == [False, True, False, False]
        for got, want in zip(results[0], whole, strict=True):
            assert error(got, own(want, rank, 2)) < 1e-6
        for first, second in zip(*results, strict=True):
            assert torch.equal(first, second)


def few_rows() -> list[Any]:
    """Rows that need no whole tiles, as tests have few."""
    from phalanx.parallel.dispatcher import capacity

    before, capacity.ROW_MULTIPLE = capacity.ROW_MULTIPLE, 1
    try:
        return rerun_with_more()
    finally:
        capacity.ROW_MULTIPLE = before


def in_other_numbers() -> list[Tensor]:
    group = ExpertParallelGroup(transport="alltoall")
    made, (x, idx, prob, _) = layer(group), (own(t, dist.get_rank(), 2) for t in tokens(2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        auto = made(x, idx, prob)
    quantized = layer(group, recipe="fp8_block").bfloat16()(x.bfloat16(), idx, prob)
    plain = made.bfloat16()(x.bfloat16(), idx, prob)
    return [auto, plain, quantized]


@pytest.mark.dist
def test_autocast_and_recipes() -> None:
    for auto, plain, quantized in run_distributed(in_other_numbers, 2):
        assert auto.dtype == torch.bfloat16 and torch.equal(auto, plain)
        assert 1e-3 < error(quantized, plain) < 0.15


def without_tokens() -> list[Tensor]:
    made = layer(ExpertParallelGroup())
    x, idx, prob, _ = (own(t, dist.get_rank(), 2)[:0] for t in tokens(2))
    out = made(x.requires_grad_(), idx, prob)
    return [out.detach(), *torch.autograd.grad(out.sum(), [x, made.w1])]


@pytest.mark.dist
def test_no_tokens() -> None:
    for out, dx, dw1 in run_distributed(without_tokens, 2):
        assert out.shape == dx.shape == (0, D) and not dw1.any()


def refusals() -> list[str]:
    def message(**options: Any) -> str:
        with pytest.raises(ValueError) as error:
            ExpertParallelGroup(**options)
        return str(error.value)

    group, found = ExpertParallelGroup(), [message(transport="nvshmem"), message(transport="symm")]
    found.append(message(capacity_factor=0.5))
    for sizes in ((7, D, WIDTH, K), (E, D, WIDTH, 9)):
        with pytest.raises(ValueError) as error:
            ExpertParallelMoE(group, *sizes)
        found.append(str(error.value))
    made, (x, idx, prob, _) = layer(group), (own(t, dist.get_rank(), 2) for t in tokens(2))
    for given in ((x, prob, prob), (x[1:], idx, prob)):
        with pytest.raises(ValueError) as error:
            made(*given)
        found.append(str(error.value))
    return found


@pytest.mark.dist
def test_arguments_are_checked() -> None:
    (unknown, symm, factor, experts, top_k, floats, fewer), _ = run_distributed(refusals, 2)
    assert unknown.startswith("unknown transport=nvshmem: set it to auto, local, symm")
    assert (
        symm.startswith("transport=symm cannot run in the group of 2 ranks from rank 0: needs CUDA")
        and "parallel." not in symm
    )
    assert factor == "capacity_factor=0.5: set it to 1 or more"
    assert "experts a multiple of the group's 2 ranks" in experts and "top_k=9" in top_k
    assert floats == "topk_idx must hold integers, expert ids, not torch.float32"
    assert fewer.startswith("expected x [..., D] and topk_idx, topk_prob [..., K], not [9, 16]")


_ALONE = """
import sys, torch, torch.distributed as dist
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap
from phalanx.parallel.expert_parallel import ExpertParallelGroup, ExpertParallelMoE
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = ExpertParallelGroup(dtype=torch.float32)
layer = ExpertParallelMoE(group, 4, 16, 8, 2)
x, (prob, idx) = torch.randn(5, 16), torch.rand(5, 4).topk(2)
def loss(x):
    return layer(x, idx, prob).square().sum()
def dual():
    with forward_ad.dual_level():
        loss(forward_ad.make_dual(x, x))
def second():
    leaf = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    dx.sum().backward()
loss(x).backward()
assert not group.overflowed() and layer.w1.grad.any()
ways = lambda: grad(loss)(x), lambda: vmap(loss)(x[None]), lambda: jvp(loss, (x,), (x,))
print(*sorted({name.split(".")[0] for name in sys.modules}))
for way in (*ways, dual, second):
    try:
        print(way())
    except RuntimeError as error:
        print(error)
group.release()
dist.destroy_process_group()
"""


def test_needs_torch_alone_and_has_first_derivatives_of_autograd_alone() -> None:
    done = subprocess.run([sys.executable, "-c", _ALONE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    modules, *transforms, dual, second = done.stdout.splitlines()
    assert not {"megatron", "hydra", "omegaconf", "wandb", "cutlass"} & {*modules.split()}
    assert len(transforms) == 3
    for line in transforms:
        assert line.startswith("expert parallelism does not work inside of torch.func (grad, vjp")
    assert dual.startswith("expert parallelism has no derivatives in forward mode")
    assert second == "the expert MLP has first gradients only: leave out create_graph"
